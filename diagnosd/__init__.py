"""diagnosd says why a distributed training job is slow."""

__version__ = "0.1.0"

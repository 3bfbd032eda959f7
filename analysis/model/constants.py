"""The figures that no table gives, fitted on published step times: `diagnosd model fit steps.csv` prints this file.

Everything else in the model is a data sheet, somebody's measurement of a part, or a formula, with its source beside it.
One figure more was chosen on figures that it is scored on: hardware.BY_SOFTWARE, the depth of a software network's
pipeline, on two curves. And Omni-Path's share in hardware.FABRICS was read off the one source that it serves.
Fitted on 77 step times of 10 sources.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    # Of the rate of the best-shaped matrix product, what the products of a training step reach: shapes, launch gaps.
    products: float = 0.783
    # Of tensor-parallel communication, what stays visible where the framework overlaps it with the products.
    tensor_exposed: float = 0.296
    # Of communication that is hidden behind computing, what computing is slowed by: they share processors and memory.
    interference: float = 0.301
    # Seconds of every step that depend on nothing here: launches, gradient norm, logging, the loop itself.
    fixed: float = 0.185
    # Relative error of computing, one standard deviation in ln; that of other terms is a multiple of it (step.SPREADS).
    spread: float = 0.0801


SHIPPED = Constants()

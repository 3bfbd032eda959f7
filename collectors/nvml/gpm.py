"""How much of a GPU worked between two looks: GPU performance monitoring, which Hopper and later have.

It has counters of its own: a user's profiler and DCGM do not lose theirs to it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from diagnosd.collectors.nvml.fields import ACTIVITY
from diagnosd.collectors.nvml.sheet import unsupported

APART_NS = 100_000_000  # nvml.h: the driver refreshes what it samples no sooner
NOISE = 0.05  # the counters behind a share are not read at one instant: a little more than all is all


class Activity:
    """Two samples, the last and the one before."""

    def __init__(self, nvml: ModuleType, gpu: object) -> None:
        self.unreadable = 0
        self._nvml = nvml
        self._gpu = gpu
        self._supported: bool | None = None
        self._samples: list[Any] = []  # the older one first
        self._sampled_ns: int | None = None  # when the newer one was; None where it is not one
        self._names = [name for _, name in ACTIVITY]
        self._answered: set[str] = set()
        self._metrics: Any = None

    def read(self, now_ns: int) -> dict[str, float]:
        """Shares of the time since the last read, 0 to 1: nothing at the first. LostError, DownError."""
        self.unreadable = 0
        try:
            return self._shares(now_ns) if self._is_supported() else {}
        except self._nvml.NVMLError as error:
            self._sampled_ns = None
            if unsupported(error.value) and self._supported is None:
                self._supported = False
            else:
                self.unreadable = len(self._names)
            return {}

    def lacking(self) -> list[str]:
        every = [name for _, name in ACTIVITY]
        return every if self._supported is False else [name for name in every if name not in self._names]

    def close(self) -> None:
        self._sampled_ns = None
        while self._samples:
            self._nvml.nvmlGpmSampleFree(self._samples.pop())

    def _is_supported(self) -> bool:
        if self._supported is None:
            support = getattr(self._nvml, "nvmlGpmQueryDeviceSupport", None)
            self._supported = bool(support and support(self._gpu).isSupportedDevice)
        return self._supported

    def _shares(self, now_ns: int) -> dict[str, float]:
        before, self._sampled_ns = self._sampled_ns, None
        if before is not None and 0 <= now_ns - before < APART_NS:
            self._sampled_ns = before
            return {}
        while len(self._samples) < 2:
            self._samples.append(self._nvml.nvmlGpmSampleAlloc())
        self._samples.reverse()
        self._nvml.nvmlGpmSampleGet(self._gpu, self._samples[1])
        self._sampled_ns = now_ns
        return {} if before is None else self._between()

    def _between(self) -> dict[str, float]:
        metrics = self._metrics = self._metrics or self._asked()
        metrics.sample1, metrics.sample2 = self._samples
        self._nvml.nvmlGpmMetricsGet(metrics)
        shares = {}
        for metric, (_, name) in zip(metrics.metrics, ACTIVITY, strict=False):
            if name in self._names and (share := self._share(metric, name)) is not None:
                shares[name] = share
        return shares

    def _asked(self) -> Any:
        metrics = self._nvml.c_nvmlGpmMetricsGet_t()
        metrics.version, metrics.numMetrics = self._nvml.NVML_GPM_METRICS_GET_VERSION, len(ACTIVITY)
        for place, (number, _) in enumerate(ACTIVITY):
            metrics.metrics[place].metricId = number
        return metrics

    def _share(self, metric: Any, name: str) -> float | None:
        code = metric.nvmlReturn
        if code and unsupported(code) and name not in self._answered:
            self._names.remove(name)
            return None
        share: float = metric.value / 100
        if code or not 0 <= share <= 1 + NOISE:
            self.unreadable += 1
            return None
        self._answered.add(name)
        return min(share, 1.0)

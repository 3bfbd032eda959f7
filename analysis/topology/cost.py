"""What a finding costs a job, by the performance model: the step with it, over the step without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp

import numpy as np

from diagnosd.analysis.model.constants import SHIPPED
from diagnosd.analysis.model.machine import Machine, declared
from diagnosd.analysis.model.step import SPREADS, step, z
from diagnosd.analysis.model.workload import ModelError, TooLittleKnownError, Workload, read
from diagnosd.analysis.topology.finding import Cost, Effect, Finding
from diagnosd.analysis.topology.site import JobSeen, Site
from diagnosd.documents import ClusterSpec

OF_NETWORK = ("rail", "transport", "nics", "crossing", "layout")


class Model:
    """The model of one job on the machines that it should have; None of it where too little is known."""

    def __init__(self, site: Site, job: JobSeen) -> None:
        self.name, self.hosts, self.why_not = job.name, job.hosts, ""
        self._work: Workload | None = None
        self._machine: Machine | None = None
        inventories = {host: site.inventories[host] for host in job.hosts if host in site.inventories}
        try:
            machine = declared(site.cluster or ClusterSpec(), inventories)
            if machine is None:
                self.why_not = "no GPU is named"
                return
            self._machine = replace(machine, clock=1.0, crossing=0.0)
            self._work, _ = read(job.spec, job.world, newer=machine.gpu.newer)
            if machine.gpu.peak(self._work.dtype) is None:
                self._work = None
                self.why_not = f"an {machine.gpu.name} has no {job.spec.dtype}"
        except (ModelError, TooLittleKnownError) as error:
            self.why_not = str(error)

    def cost(self, effect: Effect) -> Cost | None:
        """None where the model does not know the job, or its network."""
        work, machine = self._work, self._machine
        nonsense = min(effect.least, effect.value, effect.most) <= 0 and effect.kind != "crossing"
        if work is None or machine is None or nonsense:
            return None
        if not machine.nics or not machine.nic_rate:
            if effect.kind in OF_NETWORK and len(self.hosts) > 1:
                return None
            machine = replace(machine, nics=1.0, nic_rate=float("inf"))
        healthy = _seconds(work, _with(machine, effect, effect.healthy) if effect.kind == "crossing" else machine)
        if effect.kind == "layout":
            better = _seconds(replace(work, layout=effect.better), machine) if effect.better else healthy
            best = value = worst = healthy / better
        else:
            best, value, worst = (
                _seconds(work, _with(machine, effect, amount)) / healthy
                for amount in (effect.least, effect.value, effect.most)
            )
        wide = exp(z() * SPREADS["tensor"] * SHIPPED.spread)
        low, high = 1 + max(best - 1, 0.0) / wide, 1 + max(worst - 1, 0.0) * wide
        return Cost(self.name, max(value, 1.0), low, high)


def _with(machine: Machine, effect: Effect, amount: float) -> Machine:
    match effect.kind:
        case "rail" | "transport":  # of the slowest rail, for which the others wait, or of all of them
            return replace(machine, rail=machine.rail * amount)
        case "nics":
            return replace(machine, nics=machine.nics * amount)
        case "nvlink":
            return replace(machine, nvlink=amount)
        case "clock":
            return replace(machine, clock=amount)
        case "crossing":
            return replace(machine, crossing=amount)
        case "layout":
            return machine


def _seconds(work: Workload, machine: Machine) -> float:
    return float(np.max(step(work, machine).total))


def priced(site: Site, findings: list[Finding]) -> list[Finding]:
    """Each with what it costs the job that it costs most."""
    models = {job.name: Model(site, job) for job in site.ordered_jobs()}
    return [replace(each, cost=_dearest(each, models)) for each in findings]


def _dearest(finding: Finding, models: Mapping[str, Model]) -> Cost | None:
    if finding.effect is None:
        return None
    costs = []
    for name, model in models.items():
        if name in finding.jobs if finding.jobs else not set(finding.hosts).isdisjoint(model.hosts):
            costs.append(model.cost(finding.effect))
    known = [cost for cost in costs if cost is not None]
    return max(known, key=lambda cost: (cost.slowdown, cost.job), default=None)

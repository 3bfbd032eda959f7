"""`diagnosd model fit FILE`: makes analysis/model/constants.py anew from published step times."""

from __future__ import annotations

from pathlib import Path

from diagnosd.analysis.model.constants import Constants
from diagnosd.analysis.model.fitting import fit
from diagnosd.analysis.model.published import rows, step_cases
from diagnosd.documents import DocumentError

TEXT = '''\
"""The figures that no table gives, fitted on published step times: `diagnosd model fit {file}` prints this file.

Everything else in the model is a data sheet, somebody's measurement of a part, or a formula, with its source beside it.
One figure more was chosen on figures that it is scored on: hardware.BY_SOFTWARE, the depth of a software network's
pipeline, on two curves. And Omni-Path's share in hardware.FABRICS was read off the one source that it serves.
Fitted on {count} step times of {sources} sources.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    # Of the rate of the best-shaped matrix product, what the products of a training step reach: shapes, launch gaps.
    products: float = {products:.3f}
    # Of tensor-parallel communication, what stays visible where the framework overlaps it with the products.
    tensor_exposed: float = {tensor_exposed:.3f}
    # Of communication that is hidden behind computing, what computing is slowed by: they share processors and memory.
    interference: float = {interference:.3f}
    # Seconds of every step that depend on nothing here: launches, gradient norm, logging, the loop itself.
    fixed: float = {fixed:.3f}
    # Relative error of computing, one standard deviation in ln; that of other terms is a multiple of it (step.SPREADS).
    spread: float = {spread:.4f}


SHIPPED = Constants()
'''


def written(path: Path) -> str:
    """The text of constants.py."""
    try:
        cases, _ = step_cases(rows(path.read_text(encoding="utf-8")))
    except ValueError as error:  # also of what is not UTF-8
        raise DocumentError(f"{path}: {error}") from error
    found = fit(cases)
    figures = {name: getattr(found, name) for name in Constants.__dataclass_fields__}
    return TEXT.format(file=path.name, count=len(cases), sources=len({case.source for case in cases}), **figures)

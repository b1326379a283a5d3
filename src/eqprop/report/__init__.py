"""Figures, tables and pages, made from run folders only.

The package can be called: `eqprop.report("runs")` writes the page of a folder, like the command, and
`eqprop.report(comparison, "toy")` the figures of what `eqprop.gdu.compare` returned.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, overload

from eqprop.gdu import Report

if TYPE_CHECKING:
    from eqprop.report.page import ReportFiles
    from eqprop.run.own import Factory


class _Callable(ModuleType):
    @overload
    def __call__(
        self, folder: str | Path, out: str | Path | None = None, *, model: Factory | None = None
    ) -> ReportFiles: ...

    @overload
    def __call__(self, folder: Report, out: str | Path) -> Path: ...

    def __call__(
        self, folder: str | Path | Report, out: str | Path | None = None, *, model: Factory | None = None
    ) -> ReportFiles | Path:
        """Write the page of a run folder, or of a folder of run folders; see `eqprop.report.page.write_report`.

        Of a comparison it writes gdu.json, traces.json and figures/ (PNG and PDF) to `out`, like `eqprop gdu --out`.
        `model` is the function that builds the net, of runs that trained your own.
        """
        if isinstance(folder, Report):
            from eqprop.report.gdu import write_comparison

            if out is None:
                raise ValueError("A comparison has no folder of its own. Say where to write: report(comparison, OUT).")
            return write_comparison(folder, Path(out))
        from eqprop.report.page import write_report

        return write_report(Path(folder), None if out is None else Path(out), model=model)


sys.modules[__name__].__class__ = _Callable

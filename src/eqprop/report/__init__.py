"""Figures, tables and pages, made from run folders only.

The package can be called: `eqprop.report("runs")` writes the page of a folder, like the command.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eqprop.report.page import Written


class _Callable(ModuleType):
    def __call__(self, folder: str | Path, out: str | Path | None = None) -> Written:
        """Write the page of a run folder, or of a folder of run folders; see `eqprop.report.page.write_report`."""
        from eqprop.report.page import write_report

        return write_report(Path(folder), None if out is None else Path(out))


sys.modules[__name__].__class__ = _Callable

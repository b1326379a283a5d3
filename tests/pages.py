"""The scripts under docs/ that make pages, as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parents[1] / "docs"


def page_maker(name: str) -> ModuleType:
    """docs/NAME.py, which finds the other scripts as it does when it is run itself: its folder comes first."""
    if str(DOCS) not in sys.path:
        sys.path.insert(0, str(DOCS))
    return importlib.import_module(name)

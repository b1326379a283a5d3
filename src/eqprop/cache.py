"""The cache folder for compiled kernels and downloaded data."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(*parts: str) -> Path:
    """The subfolder `parts` of eqprop/ in $EQPROP_CACHE, else in $XDG_CACHE_HOME, else in ~/.cache."""
    home = os.environ.get("EQPROP_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache").joinpath("eqprop", *parts)

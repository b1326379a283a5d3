"""Provenance of a result: versions, machine, commit. Stored with every published number."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy
import torch

__version__ = "0.3.0"


def provenance(device: torch.device | str = "cpu") -> dict[str, object]:
    """Versions, machine, device, commit and time, ready for JSON."""
    device = torch.device(device)
    return {
        "eqprop": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device_name(device),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def commit() -> str | None:
    """The commit of the source tree this package runs from, marked if the tree is dirty; None if unknown.

    Set EQPROP_COMMIT when the source is copied without its repository.
    """
    if os.environ.get("EQPROP_COMMIT"):
        return os.environ["EQPROP_COMMIT"]
    here = Path(__file__).resolve().parent
    try:
        head = _git(here, "rev-parse", "HEAD")
        tracked = _git(here, "ls-files", "--error-unmatch", Path(__file__).name)
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return (head + ("-dirty" if changed else "")) if tracked else None


def _git(where: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

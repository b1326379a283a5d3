"""What the tests of pages share: the pages, their code blocks, and rows of Table 1 made up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from contextvars import Context
from io import StringIO
from pathlib import Path

import pytest
import torch

from eqprop import plugins

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "docs", ROOT / "docs" / "paper", ROOT / "docs" / "howto")
PAGES = [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted(folder.glob("*.md")))]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_here(folder: Path, *words: str) -> str:
    """What a command prints, run in this folder with this copy of the package; it must exit with 0."""
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "EQPROP_CACHE": str(folder)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def run_block(folder: Path, code: str) -> str:
    """What a block of a page prints, run in this folder with the engines a user gets, seeded."""
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]), redirect_stdout(StringIO()) as out:
        torch.manual_seed(0)
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(ROOT), *sys.path])
        patch.setattr(sys, "argv", list(sys.argv))
        patch.setattr(plugins, "_registered", {kind: {} for kind in plugins.KINDS})
        Context().run(exec, compile(code, "block", "exec"), {"__name__": "__main__"})
    return out.getvalue()

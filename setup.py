"""Compile the C engine into the wheel, for AVX2 and AVX-512; everything else stands in pyproject.toml.

Without a C compiler, on another processor, or with EQPROP_PURE_WHEEL=1 the wheel is pure, and the engine is compiled at
first use. Editable installs are pure too.
"""

from __future__ import annotations

import ast
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ENGINE = Path("eqprop/engines/cpu")


def literals(path: Path) -> dict[str, Any]:
    """The constants of a module that are literals, without importing it: that would need torch."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            with suppress(ValueError):
                found[target.id] = ast.literal_eval(node.value)
    return found


FLAGS = literals(Path(__file__).with_name("src") / ENGINE / "binding.py")


def compiler() -> str | None:
    wanted = platform.system() == "Linux" and platform.machine() == "x86_64" and not os.environ.get("EQPROP_PURE_WHEEL")
    return shutil.which(os.environ.get("CC", "cc")) if wanted else None


class Build(build_py):
    def run(self) -> None:
        super().run()
        command = compiler()
        if command is None or self.editable_mode:
            return
        folder = Path(self.build_lib) / ENGINE
        (folder / FLAGS["PREBUILT"]).mkdir(parents=True, exist_ok=True)
        for unit in FLAGS["UNITS"]:
            for precision, defines in FLAGS["PRECISIONS"].items():
                for level, tuning in FLAGS["LEVELS"].items():
                    target = folder / FLAGS["PREBUILT"] / f"{unit}-{precision}-{level}.so"
                    source = folder / "csrc" / f"{unit}.c"
                    options = [*tuning, *FLAGS["COMMON"], *defines]
                    subprocess.run([command, *options, str(source), "-o", str(target), "-lm"], check=True)


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """For every Python 3, and for one platform if machine code is inside."""
        _, _, system = super().get_tag()
        return ("py3", "none", system) if compiler() else ("py3", "none", "any")


class Package(Distribution):
    def has_ext_modules(self) -> bool:
        return compiler() is not None


commands: dict[str, Any] = {"build_py": Build, "bdist_wheel": Wheel}
setup(cmdclass=commands, distclass=Package)

"""How many functions and files of the package a reader meets who follows one call.

    python tests/guard/rooms.py                                 the four flows whose length is limited, a line each
    python tests/guard/rooms.py backward layered                the second `ep.backward`, by the eager engine
    python tests/guard/rooms.py backward energy                 the same of an energy of one's own, by any engine
    python tests/guard/rooms.py train P-1h --epochs 1           any command; a run gets a folder that is deleted

With `--names` first, the functions are printed file by file. With PYTHONPATH=OTHER/src another checkout is counted.

Counted is every function of the package that runs, once: methods, closures, lambdas and generator functions, and the
methods that dataclasses and named tuples generate (listed as "generated"). What runs
while the package is imported does not count, nor comprehensions, which are functions in Python 3.11 and none in 3.12,
nor functions of libraries, nor what runs in other processes or threads. Of the C sources the files given to the
compiler count as files, with their headers in parentheses; the cache is empty, so that they are compiled.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import eqprop

SOURCE = Path(eqprop.__file__).resolve().parent
INSIDE = f"{SOURCE}{os.sep}"
COMPREHENSIONS = ("<dictcomp>", "<listcomp>", "<setcomp>", "<genexpr>")
GENERATED = "generated"
FLOWS = (
    ["backward", "layered"],
    ["backward", "energy"],
    ["train", "P-1h", "--epochs", "1", "--samples", "200", "--quiet"],
    ["gdu", "toy"],
)


@dataclass
class Rooms:
    """The functions that ran, by file, and the C files compiled, with their headers."""

    functions: dict[str, dict[int, tuple[int, str]]] = field(default_factory=lambda: defaultdict(dict))
    compiled: set[str] = field(default_factory=set)
    headers: set[str] = field(default_factory=set)
    passed: dict[int, CodeType] = field(default_factory=dict)
    """Code that need not be looked at again; kept, so that no other takes its address."""

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or id(code) in self.passed:
            return
        if code.co_name in COMPREHENSIONS or not code.co_flags & inspect.CO_OPTIMIZED:
            self.passed[id(code)] = code
            return
        # By identity: generated functions of two classes may be equal.
        if code.co_filename.startswith(INSIDE):
            found = self.functions[str(Path(code.co_filename).relative_to(SOURCE))]
            if id(code) not in found and not importing(frame):
                found[id(code)] = (code.co_firstlineno, code.co_qualname)
                self.passed[id(code)] = code
        elif code.co_filename == "<string>" and id(code) not in self.functions[GENERATED]:
            name = generated_name(frame)
            if name is not None and not importing(frame):
                self.functions[GENERATED][id(code)] = (0, name)
                self.passed[id(code)] = code
        elif code.co_filename != "<string>":
            self.passed[id(code)] = code

    @property
    def files(self) -> int:
        return sum(1 for file, found in self.functions.items() if found and file != GENERATED)

    def __str__(self) -> str:
        total, made = sum(map(len, self.functions.values())), len(self.functions[GENERATED])
        said = f"{total} functions ({total - made} written, {made} generated) in {self.files} Python files"
        if self.compiled:
            said += f" and {len(self.compiled)} C files ({len(self.headers)} headers)"
        return said

    def names(self) -> str:
        """Every function by file, in the order of the source."""
        return "\n".join(
            f"{file} ({len(found)}): {', '.join(name for _, name in sorted(found.values()))}"
            for file, found in sorted(self.functions.items())
            if found
        )


def importing(frame: FrameType) -> bool:
    """Whether a module of the package that is being imported calls this."""
    at: FrameType | None = frame
    while at is not None:
        if at.f_code.co_name == "<module>" and at.f_code.co_filename.startswith(INSIDE):
            return True
        at = at.f_back
    return False


def generated_name(frame: FrameType) -> str | None:
    """What a generated function is called, with its class where that is known; None if it is not the package's."""
    module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
    of_tuple = module.removeprefix("namedtuple_")
    if of_tuple != module:  # a named tuple's __new__ knows only what its class is called
        return f"{of_tuple}.{name}" if any(hasattr(m, of_tuple) for m in modules()) else None
    if module.partition(".")[0] != "eqprop":
        return None
    first = next(iter(frame.f_locals.values()), None)
    owner = first if isinstance(first, type) else type(first)
    return f"{owner.__name__}.{name}"


def modules() -> list[object]:
    """The modules of the package that are loaded."""
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "eqprop"]


def backward(kind: str) -> Rooms:
    """What the second `ep.backward` on one mini-batch passes."""
    dtype = torch.float32
    ep = eqprop.EP(T=30, K=10, beta=0.1)
    source = torch.Generator().manual_seed(0)
    x, y = torch.rand((20, 784), generator=source, dtype=dtype), torch.eye(10, dtype=dtype)[torch.arange(20) % 10]
    options = {}
    if kind == "layered":
        model: eqprop.PrimitiveDynamics = eqprop.models.Layered((10, 512, 784), "prototypical", "sigmoid", seed=0)
        # Until `backward` takes an engine, its loop is the eager one.
        options = {"engine": "eager"} if "engine" in inspect.signature(ep.backward).parameters else {}
    else:
        model = runpy.run_path(str(Path(__file__).with_name("own_nets.py")))["energy"](0)
    cost = eqprop.SquaredError()
    ep.backward(model, cost, x, y, **options)
    with counting() as rooms:
        ep.backward(model, cost, x, y, **options)
    return rooms


@contextlib.contextmanager
def counting() -> Iterator[Rooms]:
    rooms = Rooms()
    sys.setprofile(rooms.profile)
    try:
        yield rooms
    finally:
        sys.setprofile(None)


def command(words: Sequence[str]) -> Rooms:
    """What a command passes that has run in this process before with an empty cache; what it prints is dropped."""
    from eqprop.cli import main

    calls: list[Sequence[object]] = []
    run, arguments = subprocess.run, sys.argv

    def watched(call: Sequence[object], *given: Any, **options: Any) -> Any:
        calls.append(call)
        return run(call, *given, **options)

    with tempfile.TemporaryDirectory() as scratch, counting() as rooms:
        where = ["--out", f"{scratch}/run"] if words[0] == "train" and "--out" not in words else []
        os.environ["EQPROP_CACHE"], subprocess.run, sys.argv = scratch, watched, ["eqprop", *words, *where]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                main()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            subprocess.run, sys.argv = run, arguments
    rooms.compiled, rooms.headers = compiled(calls)
    return rooms


def compiled(calls: Sequence[Sequence[object]]) -> tuple[set[str], set[str]]:
    """The C files that were given to a compiler, and the headers they include."""
    files = {Path(str(word)) for call in calls for word in call if str(word).endswith(".c")}
    headers: set[str] = set()
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        for name in re.findall(r'#include "([\w.]+)"', path.read_text()):
            if name not in headers:
                headers.add(name)
                waiting.append(path.with_name(name))
    return {path.name for path in files}, headers


def follow(words: Sequence[str]) -> Rooms:
    return backward((*words[1:], "layered")[0]) if words[0] == "backward" else command(words)


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--names"]
    named = len(words) < len(sys.argv) - 1
    for line in [words] if words else FLOWS:
        # A process each: what one flow has looked up and kept, another would not pass any more.
        if words:
            rooms = follow(line)
            print(rooms.names() if named else "", f"{' '.join(line)}: {rooms}", sep="\n" if named else "")
        else:
            again = [sys.executable, __file__, *(["--names"] if named else []), *line]
            print(subprocess.run(again, stdout=subprocess.PIPE, text=True, check=True).stdout, end="", flush=True)


if __name__ == "__main__":
    main()

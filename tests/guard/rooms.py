"""How many source files a reader meets who follows a command: those with a function entered, and the C files compiled.

    python tests/guard/rooms.py train P-1h --epochs 1 --samples 200 --out RUN
    python tests/guard/rooms.py gdu toy

`train` is followed by `report` of its run. Functions are counted, not the bodies of modules and classes, nor the
comprehensions in them, which Python 3.11 calls and 3.12 does not; of the C sources the files given to the compiler,
the headers beside them in parentheses.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "eqprop"
COMPREHENSIONS = ("<dictcomp>", "<listcomp>", "<setcomp>", "<genexpr>")
entered: set[str] = set()


def profile(frame: FrameType, event: str, argument: object) -> None:
    code: CodeType = frame.f_code
    if event != "call" or code.co_name in COMPREHENSIONS:
        return
    if code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(str(SOURCE)):
        entered.add(str(Path(code.co_filename).relative_to(SOURCE)))


def compiled(commands: list[list[str]]) -> tuple[set[str], set[str]]:
    """The C files that were given to a compiler, and the headers they include."""
    files = {Path(word) for command in commands for word in command if word.endswith(".c")}
    headers: set[str] = set()
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        for name in re.findall(r'#include "([\w.]+)"', path.read_text()):
            if name not in headers:
                headers.add(name)
                waiting.append(path.with_name(name))
    return {path.name for path in files}, headers


def main() -> None:
    words = sys.argv[1:]
    commands: list[list[str]] = []
    run = subprocess.run

    def watched(command: list[str], *given: object, **options: object) -> object:
        commands.append([str(word) for word in command])
        return run(command, *given, **options)  # type: ignore[call-overload]

    subprocess.run = watched  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as scratch:
        # An empty cache, so that the C code is compiled; a folder of its own, so that nothing is there already.
        import os

        os.environ["EQPROP_CACHE"] = scratch
        if words[0] == "train" and "--out" not in words:
            words += ["--out", f"{scratch}/run"]
        sys.setprofile(profile)
        from eqprop.cli import load_commands

        for line in (words, ["report", words[words.index("--out") + 1]] if words[0] == "train" else []):
            if line:
                load_commands(line)(line, standalone_mode=False)
        sys.setprofile(None)
    files, headers = compiled(commands)
    print(f"\n{len(entered)} Python files: {' '.join(sorted(entered))}")
    print(f"{len(files)} C files: {' '.join(sorted(files))} ({len(headers)} headers)")
    print(f"together {len(entered) + len(files)}")


if __name__ == "__main__":
    main()

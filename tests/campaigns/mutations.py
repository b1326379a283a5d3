"""Wrong signs, missing clips and shifted indices, one at a time: does the suite of the mathematics notice?

    python tests/campaigns/mutations.py --places 30 --seed 42 --out results/mutations.json

Places are drawn from core, estimators, models and gdu in turn. For each, a copy of the package with that one change is
tested by the suite of these packages, its own tests first, until one fails that passes without the change; what is not
noticed within so many seconds of CPU time counts as missed. `--tree` is another checkout, with its own tests;
`--part 2/5` takes every fifth place from the second on.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eqprop.provenance import provenance

ROOT = Path(__file__).resolve().parents[2]
CORE = ("state", "autodiff", "dynamics", "functional", "cost", "relax", "starts")
PACKAGES = ("core", "estimators", "models", "gdu")
PATIENCE = 3
"""By the clock a suite may take so many times its CPU seconds."""
TIMED = "no_slower"
"""In the names of tests that compare times: on a busy machine they fail without a change."""
CLIPS = ("clamp", "clamp_", "clamp_min", "clamp_max", "clip", "relu", "hardtanh", "min", "max")


@dataclass(frozen=True)
class Place:
    """Where and what is changed: the number of the node among those of its kind in the file."""

    package: str
    file: str
    line: int
    kind: str
    number: int


def opposite_sign(node: ast.AST) -> ast.AST | None:
    """a + b -> a - b and back; -a -> a."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        return node.operand
    if not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, ast.Add | ast.Sub):
        return None
    parts = [getattr(node, name, None) for name in ("left", "right", "value")]
    if any(isinstance(p, ast.JoinedStr | ast.Tuple | ast.List | ast.ListComp) or _is_text(p) for p in parts):
        return None
    node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
    return node


def without_clip(node: ast.AST) -> ast.AST | None:
    """x.clamp(...) -> x; min(a, b) -> a."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr in CLIPS[:-2]:
        owner = node.func.value
        of_torch = isinstance(owner, ast.Name) and owner.id in ("torch", "F")
        return (node.args[0] if node.args else None) if of_torch else owner
    two = isinstance(node.func, ast.Name) and node.func.id in CLIPS[-2:] and len(node.args) == 2
    return node.args[0] if two else None


def shifted_index(node: ast.AST) -> ast.AST | None:
    """x[1] -> x[2]; x[1:] -> x[2:]; range(n) -> range(n - 1)."""
    if isinstance(node, ast.Subscript):
        ends = [node.slice.lower, node.slice.upper] if isinstance(node.slice, ast.Slice) else [node.slice]
        for end in ends:
            if isinstance(end, ast.Constant) and type(end.value) is int:
                end.value += 1
                return node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        node.args[-1 if len(node.args) < 3 else 1] = ast.BinOp(node.args[-1], ast.Sub(), ast.Constant(1))
        return node
    return None


KINDS: dict[str, Callable[[ast.AST], ast.AST | None]] = {
    "sign": opposite_sign,
    "clip": without_clip,
    "index": shifted_index,
}


CHANGEABLE = (ast.UnaryOp, ast.BinOp, ast.AugAssign, ast.Call, ast.Subscript)


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


class Changer(ast.NodeTransformer):
    """Changes the nodes of one kind for which `chosen(number)` is true; notes the line of each."""

    def __init__(self, kind: str, chosen: Callable[[int], bool]) -> None:
        self.change, self.chosen, self.lines = KINDS[kind], chosen, []  # type: ignore[var-annotated]

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.AnnAssign):  # what a sentence says, and types
            return node
        self.generic_visit(node)
        found = self.change(copy.deepcopy(node)) if isinstance(node, CHANGEABLE) else None
        if found is None:
            return node
        self.lines.append(getattr(node, "lineno", 0))
        return found if self.chosen(len(self.lines) - 1) else node


def changed(source: str, kind: str, number: int | None) -> tuple[str, list[int]]:
    """The source with one change, or none; and the lines of all places of that kind."""
    changer = Changer(kind, lambda n: n == number)
    tree = ast.fix_missing_locations(changer.visit(ast.parse(source)))
    return ast.unparse(tree), changer.lines


def files(tree: Path) -> Iterator[tuple[str, Path]]:
    package = tree / "src" / "eqprop"
    yield from (("core", package / f"{name}.py") for name in CORE)
    for name in PACKAGES[1:]:
        yield from ((name, path) for path in sorted((package / name).glob("*.py")))


def places(tree: Path, count: int, seed: int) -> list[Place]:
    """Places drawn from each package in turn, of a kind drawn first, so that clips are not lost among signs."""
    there: dict[tuple[str, str], list[Place]] = {}
    for package, path in files(tree):
        for kind in KINDS:
            lines = changed(path.read_text(encoding="utf-8"), kind, None)[1]
            name = str(path.relative_to(tree))
            for n, line in enumerate(lines):
                there.setdefault((package, kind), []).append(Place(package, name, line, kind, n))
    draw, found = random.Random(seed), []
    while len(found) < count:
        of = PACKAGES[len(found) % len(PACKAGES)]
        place = draw.choice(there[of, draw.choice([kind for kind in KINDS if there.get((of, kind))])])
        if place not in found:
            found.append(place)
    return found


def run_tests(tree: Path, tests: Sequence[str], path: str, seconds: float) -> str:
    """What pytest says, until a test fails; "" where time ran out."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "-k", f"not {TIMED}", *tests]
    try:
        done = subprocess.run(
            words,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds))),
            timeout=PATIENCE * seconds,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode in (0, 1, 2) else ""


def first_failed(said: str) -> str | None:
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
    return found[1] if found else None


def noticed(tree: Path, place: Place | None, tests: Sequence[str], seconds: float) -> tuple[str, str | None]:
    """ "killed", "survived" or "time" of tests after a change, or after none; and the test that noticed it."""
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "eqprop"
        shutil.copytree(tree / "src" / "eqprop", package, ignore=shutil.ignore_patterns("__pycache__", "mnist"))
        (package / "data" / "mnist").symlink_to(ROOT / "src" / "eqprop" / "data" / "mnist")
        if place is not None:
            file = Path(scratch) / Path(place.file).relative_to("src")
            file.write_text(changed(file.read_text(encoding="utf-8"), place.kind, place.number)[0], encoding="utf-8")
        path = os.pathsep.join(filter(None, (scratch, os.environ.get("PYTHONPATH"))))
        said = run_tests(tree, tests, path, seconds)
    by = first_failed(said)
    return "time" if not said else "killed" if by else "survived", by


def outcome(tree: Path, place: Place, seconds: float, left_out: list[str]) -> dict[str, Any]:
    """What became of a change; a test that fails without it as well is left out, from then on."""
    order = [f"tests/{name}" for name in sorted(PACKAGES, key=lambda name: name != place.package)]
    while True:
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended, by = noticed(tree, place, [*(f"--deselect={test}" for test in left_out), *order], seconds)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        if by is not None and "::" in by and noticed(tree, None, [by], seconds)[0] == "killed":
            left_out.append(by)
            continue
        spent = round(used.ru_utime + used.ru_stime - began.ru_utime - began.ru_stime, 1)
        return {"outcome": ended, "by": by, "seconds": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--places", type=int, default=30)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--part", default="1/1", help="such as 2/5")
    parser.add_argument("--list", action="store_true", help="print the places and end")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tree = options.tree.resolve()
    part, parts = map(int, options.part.split("/"))
    chosen = places(tree, options.places, options.seed)[part - 1 :: parts]
    if options.list:
        print(*chosen, sep="\n")
        return
    found, left_out = [], list[str]()
    for place in chosen:
        one = outcome(tree, place, options.seconds, left_out)
        found.append(asdict(place) | one)
        print(
            f"{one['outcome']:8} {one['seconds']:5.1f} s  {place.kind:5} {place.file}:{place.line} {one['by']}",
            flush=True,
        )
        if options.out:  # after each, so that a campaign that is ended leaves what it found
            options.out.parent.mkdir(parents=True, exist_ok=True)
            content = {
                "seed": options.seed,
                "limit": options.seconds,
                "part": options.part,
                "left_out": left_out,
                "places": found,
                "provenance": provenance(),
            }
            options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    killed = sum(one["outcome"] == "killed" for one in found)
    print(f"{killed} of {len(found)} changes were noticed")


if __name__ == "__main__":
    main()

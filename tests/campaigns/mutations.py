"""Wrong signs, missing clips and shifted indices, one at a time: does the suite of the mathematics notice?

    python tests/campaigns/mutations.py --places 30 --seed 42 --out results/mutations.json

Places are drawn from core, estimators, models and gdu in turn. For each, a copy of the package with that one change is
tested by the suite of these packages, its own tests first, until one fails; what is not noticed within so many seconds
of CPU time counts as missed. `--tree` is another checkout, with its own tests; `--part 2/5` takes every fifth place
from the second on.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ("state", "autodiff", "dynamics", "functional", "cost", "relax", "starts")
PACKAGES = ("core", "estimators", "models", "gdu")
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


def outcome(tree: Path, place: Place, seconds: float) -> tuple[str, float]:
    """ "killed", "survived" or "time" of a change, and the CPU seconds it took."""
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "eqprop"
        shutil.copytree(tree / "src" / "eqprop", package, ignore=shutil.ignore_patterns("__pycache__", "mnist"))
        (package / "data" / "mnist").symlink_to(ROOT / "src" / "eqprop" / "data" / "mnist")
        path = Path(scratch) / Path(place.file).relative_to("src")
        path.write_text(changed(path.read_text(encoding="utf-8"), place.kind, place.number)[0], encoding="utf-8")
        order = sorted(PACKAGES, key=lambda name: name != place.package)
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
        environment = {**os.environ, "PYTHONPATH": scratch, "OMP_NUM_THREADS": "1"}
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        limit = int(seconds)
        done = subprocess.run(
            [*words, *(f"tests/{name}" for name in order)],
            cwd=tree,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
            check=False,
        )
        ended = {0: "survived", 1: "killed", 2: "killed"}.get(done.returncode, "time")
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended, round(used.ru_utime + used.ru_stime - began.ru_utime - began.ru_stime, 1)


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
    found = []
    for place in chosen:
        ended, seconds = outcome(tree, place, options.seconds)
        found.append({**asdict(place), "outcome": ended, "seconds": seconds})
        print(f"{ended:8} {seconds:5.1f} s  {place.kind:5} {place.file}:{place.line}", flush=True)
        if options.out:  # after each, so that a campaign that is ended leaves what it found
            options.out.parent.mkdir(parents=True, exist_ok=True)
            content = {"seed": options.seed, "limit": options.seconds, "part": options.part, "places": found}
            options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    killed = sum(one["outcome"] == "killed" for one in found)
    print(f"{killed} of {len(found)} changes were noticed")


if __name__ == "__main__":
    main()

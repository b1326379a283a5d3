"""The project's own promises: the direction of imports, a light `import eqprop`, tags that lead to the paper."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from docs.build.claims.pages import SECTIONS
from docs.build.claims.rules import rows

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "eqprop"

CORE = {"state", "autodiff", "dynamics", "functional", "cost", "relax", "estimators", "gdu", "optimizers"}
LIBRARY = CORE | {"models", "starts", "engines", "data", "physical", "echo"}
SHARED = {"files", "provenance", "messages", "plugins", "settings", "cache"}
SPEC = {"spec", "own", "published", "toml"}
"""Modules of run that say what to run: papers read them, and the rest of run reads papers."""

# What a module or subpackage of eqprop may import from the others. One that is not here yet may be missing; one
# that is not in this table is an error: it must be given its place first. "eqprop" is the package itself.
MAY_IMPORT: dict[str, set[str]] = {
    "files": set(),
    "provenance": set(),
    "messages": set(),
    "plugins": {"messages"},
    "settings": {"messages"},
    "cache": {"files"},
    "state": set(),
    "autodiff": set(),
    "dynamics": {"state", "autodiff"},
    "functional": {"state", "dynamics"},
    "optimizers": set(),
    "cost": {"state", "autodiff", "dynamics"},
    "relax": {"state", "autodiff", "dynamics", "cost"},
    "estimators": {"messages", "plugins", "settings", "state", "autodiff", "dynamics", "cost", "relax"},
    "gdu": {"messages", "state", "autodiff", "dynamics", "cost", "relax", "estimators"},
    "models": {"messages", "plugins", "settings", "state", "autodiff", "dynamics", "functional", "cost"},
    "physical": CORE | {"models", "settings", "messages", "plugins", "files"},
    "echo": {"state", "autodiff", "cost", "models"},
    "starts": {"state", "autodiff", "dynamics"},
    "engines": {
        *("files", "cache", "messages", "plugins", "state", "autodiff", "dynamics", "functional", "cost", "relax"),
        *("estimators", "models", "starts"),
    },
    "data": {"cache", "messages", "plugins", "settings"},
    "experiments": LIBRARY | SHARED,
    "run.spec": LIBRARY | SHARED,
    "papers": LIBRARY | SHARED | {"run.spec"},
    "run": LIBRARY | SHARED | {"experiments", "run.spec", "papers"},
    "classifier": LIBRARY,
    "report": LIBRARY | SHARED | {"experiments", "run.spec", "papers", "run"},
    "tuning": LIBRARY | SHARED | {"experiments", "run.spec", "papers", "run"},
    "zoo": {"cache", "files", "messages", "papers", "run"},
    "eqprop": LIBRARY
    | {"plugins", "provenance", "experiments", "run.spec", "papers", "run", "report", "classifier", "zoo"},
    "cli": LIBRARY | SHARED | {"experiments", "run.spec", "papers", "run", "report", "tuning", "eqprop"},
    "__main__": {"cli"},
}


def module_parts(path: Path, package: Path) -> tuple[str, ...]:
    """The dotted name of a source file below the package, () for the package itself."""
    parts = path.relative_to(package).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def layer(parts: tuple[str, ...]) -> str:
    if parts[:1] == ("run",) and parts[1:2] and parts[1] in SPEC:
        return "run.spec"
    return parts[0] if parts else "eqprop"


def imported(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and layer of every import of eqprop in a file, wherever it stands: also in functions and in
    `if TYPE_CHECKING`."""
    inside = module_parts(path, package)
    here = inside if path.name == "__init__.py" else inside[:-1]
    layers = {layer(module_parts(other, package)) for other in package.rglob("*.py")}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "eqprop":
                    yield node.lineno, layer(tuple(alias.name.split(".")[1:]))
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = here[: len(here) - (node.level - 1)] + module
            elif module[0] == "eqprop":
                base = module[1:]
            else:
                continue
            for alias in node.names:
                target = layer((*base, alias.name)) if alias.name in layers or base else "eqprop"
                yield node.lineno, target


def violations(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package.parent)
        own = layer(module_parts(path, package))
        if own not in MAY_IMPORT:
            found.append(f"{place}: {own} has no place in the table of layers")
            continue
        for line, target in imported(path, package):
            if target != own and target not in MAY_IMPORT[own]:
                found.append(f"{place}:{line}: {own} must not import {target}")
    return found


def test_imports_point_one_way() -> None:
    assert violations(SOURCE) == []


def test_the_table_of_layers_has_no_cycle() -> None:
    order = list(TopologicalSorter(MAY_IMPORT).static_order())
    assert set(order) == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("state.py", "from eqprop.dynamics import Dynamics", "state must not import dynamics"),
        ("state.py", "from .dynamics import Dynamics", "state must not import dynamics"),
        ("state.py", "from eqprop import dynamics", "state must not import dynamics"),
        ("state.py", "from . import dynamics", "state must not import dynamics"),
        ("state.py", "import eqprop.dynamics", "state must not import dynamics"),
        ("state.py", "from eqprop import Dynamics", "state must not import eqprop"),
        ("state.py", "import eqprop", "state must not import eqprop"),
        ("relax.py", "def f():\n    from eqprop.engines import graph", "relax must not import engines"),
        ("estimators/ep.py", "from ..models.layered import Toy", "estimators must not import models"),
        ("estimators/__init__.py", "from ..gdu import compare", "estimators must not import gdu"),
        ("data/images.py", "import eqprop.run.loop as loop", "data must not import run"),
        ("helpers.py", "", "helpers has no place in the table of layers"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    package = tmp_path / "eqprop"
    for name in ("__init__.py", "dynamics.py", "estimators/__init__.py", "estimators/base.py", file):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    (package / "estimators/base.py").write_text("from . import ep\nfrom ..dynamics import F\nimport torch")
    assert [v for v in violations(package) if file not in v] == []
    (package / file).write_text(text)
    found = violations(package)
    assert len(found) == 1
    assert found[0].endswith(complaint)


FLOWS = {"backward layered": (96, 12), "train P-1h --epochs 1 --samples 200 --quiet": (560, 50), "gdu toy": (380, 36)}
"""What each call passed when it was last looked at: fewer is better, and the aims are 45 in 8, 250 in 24, 150 in 16."""


LONG = ("gdu",)
"""Flows that take longer than the others together."""


@pytest.mark.parametrize(
    ("words", "most"),
    [
        pytest.param(*flow, id=flow[0].split()[0], marks=[pytest.mark.slow] if flow[0].split()[0] in LONG else [])
        for flow in FLOWS.items()
    ],
)
def test_a_reader_of_a_call_meets_few_functions_and_files(tmp_path: Path, words: str, most: tuple[int, int]) -> None:
    script = [sys.executable, str(ROOT / "tests" / "guard" / "rooms.py"), *words.split()]
    said = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+) functions .* in (\d+) Python files", said)
    assert found is not None
    assert all(int(n) <= limit for n, limit in zip(found.groups(), most, strict=True)), said


def test_importing_eqprop_loads_neither_figures_nor_kernel_compilers() -> None:
    heavy = ("matplotlib", "triton", "cupy", "numba", "torch._inductor", "typer", "jax")
    code = f"import sys, torch, eqprop; print([m for m in {heavy} if m in sys.modules])"
    # torch itself may load some of these; only what eqprop adds counts.
    without = f"import sys, torch; print([m for m in {heavy} if m in sys.modules])"
    with_eqprop, torch_alone = (
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True).stdout
        for c in (code, without)
    )
    assert with_eqprop == torch_alone
    assert "matplotlib" not in with_eqprop


def notation_rows() -> list[tuple[str, str, tuple[str, ...]]]:
    """(label, printed number, names in eqprop) of every labelled row on the paper's pages."""
    found = [row for page in SECTIONS for kind in ("label", "figure") for row in rows(page, kind)]
    return [(row.label, row.place, row.code) for row in found if row.label]


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def tags(text: str) -> list[str]:
    """Words in brackets that stand alone: `[eq:delta-ep]`, but not `x[i]`, `list[int]`, `[0, 1]` or code."""
    prose = re.sub(r"`[^`]*`", "", text)
    return re.findall(r"(?<![\w\])])\[([A-Za-z][\w:=*-]{2,})\](?![\w(\[])", prose)


def test_tags_are_told_from_other_brackets() -> None:
    text = "F  [eq:1st-phase], [lma2] ([sec:loss-L-L*]). list[int], x[t], [0, 1], `[code]`, [link](there), [K]"
    assert tags(text) == ["eq:1st-phase", "lma2", "sec:loss-L-L*"]


def test_every_tag_of_a_docstring_is_a_label_of_the_paper() -> None:
    labels = {label for label, _, _ in notation_rows()}
    used = {
        (str(path.relative_to(ROOT)), tag)
        for path in SOURCE.rglob("*.py")
        for text in docstrings(path)
        for tag in tags(text)
    }
    assert {(path, tag) for path, tag in used if tag not in labels} == set()
    assert used


def test_the_label_tables_are_complete_and_in_the_order_of_the_paper() -> None:
    rows = notation_rows()
    labels = [label for label, _, _ in rows]
    assert len(labels) == len(set(labels)) == 92
    for kind, count in ((r"\((\d+)\)", 49), (r"Figure (\d+)", 11), (r"Table (\d+)", 3), (r"Algorithm (\d+)", 2)):
        numbers = [int(m[1]) for _, printed, _ in rows if (m := re.fullmatch(kind, printed))]
        assert len(numbers) == count
        assert numbers == sorted(set(numbers))
    theorems = r"(?:Theorem|Proposition|Corollary|Lemma) (\d+)"
    numbers = [int(m[1]) for _, printed, _ in rows if (m := re.fullmatch(theorems, printed))]
    assert numbers == [1, 2, 3, 4, 5]


def test_names_in_the_label_tables_exist() -> None:
    names = {name for _, _, code in notation_rows() for name in code}
    assert names
    for name in names:
        part = name.split(".")[1]
        planned = part in MAY_IMPORT and not any((SOURCE / p).exists() for p in (part, f"{part}.py"))
        assert planned or exists(name), f"docs/build/claims names {name}, which does not exist"


def exists(name: str) -> bool:
    """Whether a dotted name is a module or something in one; a module wins over a function of the same name."""
    module, rest = "eqprop", name.split(".")[1:]
    folder = SOURCE
    while rest and ((folder / f"{rest[0]}.py").is_file() or (folder / rest[0] / "__init__.py").is_file()):
        folder /= rest[0]
        module = f"{module}.{rest.pop(0)}"
    value: object = importlib.import_module(module)
    for part in rest:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def test_a_name_that_does_not_exist_is_noticed() -> None:
    assert exists("eqprop.data.mnist")
    assert not exists("eqprop.data.nothing")


def test_the_version_is_the_same_everywhere() -> None:
    def stated(file: str, pattern: str) -> str:
        found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert found, f"no version in {file}"
        return found[1]

    version = stated("pyproject.toml", r'^version = "(.+)"$')
    assert stated("src/eqprop/provenance.py", r'^__version__ = "(.+)"$') == version
    assert stated("CITATION.cff", r"^version: (.+)$") == version


def test_a_long_test_names_itself(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(
        "import time\n\ndef test_quick(): pass\n\ndef test_long(): time.sleep(1.0)\n"
    )
    words = ["-n1", "-p", "helpers.long_tests", "-o", "long_test_seconds=0.25", "--rootdir", "."]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words, "-c", "/dev/null", "test_slow.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("still running")]
    assert len(lines) >= 2, done.stderr
    assert all(line.endswith("test_slow.py::test_long (1 tests done)") for line in lines)


UNTYPED = ("Asked", "Held", "Opened", "Given", "Described", "Turn", "Request", "Found", "Written", "Own")
"""Names that do not say what kind of thing they are."""


def test_every_class_has_a_name_of_its_own_that_says_its_kind() -> None:
    files = sorted((ROOT / "src" / "eqprop").rglob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name in names if names.count(name) > 1 or name.lstrip("_") in UNTYPED] == []

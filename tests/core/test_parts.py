"""A part of the field goes with its file, its TOML tables and a line of a table: nothing else imports or names it."""

import re
from pathlib import Path

import pytest

import eqprop
from eqprop.estimators.nudging import RULES

ROOT = Path(eqprop.__file__).parent
PARTS = {
    "estimators.asymmetric": {"estimators/named.py"},
    "estimators.dyadic": {"estimators/named.py"},
    "estimators.coupled": {"estimators/named.py"},
    "models.predictive": {"run/spec.py"},
    "physical.oscillators": {"run/spec.py", "models/readout.py"},
    "physical.spins": {"run/spec.py", "models/readout.py", "physical/ising.py"},
    "physical.ising": {"physical/settings.py"},
    "physical.resistive": {"run/spec.py", "physical/spice.py"},
    "physical.spice": {"__init__.py", "physical/settings.py"},
    "echo": set(),
}
"""By module, the files that may name it: a table each, and the machine that runs just this network."""


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}


def names(text: str, module: str) -> bool:
    """Whether a file imports a module of the package, or names it in a table."""
    folder, _, name = module.rpartition(".")
    within = rf"from eqprop{'.' * bool(folder)}{folder} import [^\n]*\b{name}\b"
    return re.search(rf'(from|import) eqprop\.{module}\b|{within}|"(eqprop\.)?{module}[:"]', text) is not None


@pytest.mark.parametrize("module", PARTS)
def test_a_part_is_named_by_its_table_alone(sources: dict[str, str], module: str) -> None:
    own = f"{module.replace('.', '/')}.py"
    assert own in sources
    assert {path for path, text in sources.items() if names(text, module)} - {own} == PARTS[module]


def test_nudging_rules_come_from_the_estimators() -> None:
    assert set(RULES) >= {"positive", "centered", "holomorphic", "clamped"}
    assert RULES["clamped"].__module__ == "eqprop.estimators.coupled"

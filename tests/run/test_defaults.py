"""Each default is defined once: help, `eqprop show`, the reference page and what is checked have the same."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from docs.site import settings
from eqprop import bind
from eqprop.cli import load_commands
from eqprop.estimators.named import ESTIMATORS
from eqprop.run.laboratory import find_problem
from eqprop.run.spec import Spec, declared
from eqprop.settings import Field

NOTHING = "[mine.model]\nkind = 'layered'\n"
"""An experiment that says nothing but what it is."""
DEFAULT: dict[str, Field] = {f.flat: f for f in declared(Spec(name="mine"))}


def written(value: Any) -> str:
    """A default as text, by rules of this test."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return ", ".join(str(v) if k == "*" else f"{k}={v}" for k, v in value.items())
    return ",".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)


def value_of(spec: Spec, field: Field) -> Any:
    return getattr(getattr(spec, field.section), field.leaf)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("shown") / "mine.toml"
    path.write_text(NOTHING)
    found = CliRunner().invoke(load_commands(["show"]), ["show", str(path)])
    assert found.exit_code == 0, found.output
    return tomllib.loads(found.output)["mine"]


@pytest.fixture(scope="module")
def helped() -> tuple[dict[str, str], str]:
    """The sentences of help by option, and what --help-all prints."""
    app = load_commands(["train"])
    commands = typer.main.get_command(app)
    train = commands.commands["train"]  # type: ignore[attr-defined]
    told = {option: p.help.replace("\\[", "[") for p in train.params for option in p.opts if getattr(p, "help", None)}
    return told, CliRunner().invoke(app, ["train", "--help-all"], env={"COLUMNS": "200"}).output


@pytest.fixture(scope="module")
def referred() -> dict[str, tuple[str, str]]:
    """Option and default by place, from the first row of the reference page that names it."""
    found: dict[str, tuple[str, str]] = {}
    for line in (settings.page() + settings.page(models=True)).splitlines():
        cells = [cell.strip().strip("`") for cell in line.split(" | ")]
        if line.startswith("| `"):
            found.setdefault(cells[0].removeprefix("| `"), (cells[1], cells[2].replace("–", "")))
    return found


@pytest.mark.parametrize("name", DEFAULT)
def test_a_default_is_the_same_everywhere(
    name: str,
    shown: dict[str, Any],
    helped: tuple[dict[str, str], str],
    referred: dict[str, tuple[str, str]],
) -> None:
    field = DEFAULT[name]
    default = value_of(Spec(name="mine"), field)
    told, page = helped
    assert field.flag in page
    mentioned = told[field.flag].partition("[default: ")[2].removesuffix("]").removesuffix(" in layered nets")
    assert mentioned == written(default)
    assert referred[field.place] == (field.flag, written(default))
    printed = shown.get(field.section, {}).get(field.leaf)
    plain = list(default) if isinstance(default, tuple) else dict(default) if isinstance(default, Mapping) else default
    assert printed == plain


def test_the_doctor_checks_the_defaults(tmp_path: Path) -> None:
    """What the doctor is given, without a word of its own, is the session that `train` would bind."""
    path = tmp_path / "mine.toml"
    path.write_text(NOTHING)
    subject, nothing = find_problem(str(path)), Spec(name="mine")
    for field in DEFAULT.values():
        if (default := value_of(nothing, field)) is not None:  # such as threads, which binding chooses
            assert value_of(subject.spec, field) == default, field.place
    assert subject.spec == bind(str(path)).spec
    phases = nothing.phases
    assert (subject.session.estimator.T, subject.session.estimator.K, subject.session.estimator.beta) == (
        phases.T,
        phases.K,
        phases.beta,
    )
    assert [group["lr"] for group in subject.session.optimizer.param_groups] == [nothing.optimizer.rates["*"]] * len(
        subject.session.optimizer.param_groups
    )
    assert len(subject.problem.x) == nothing.optimizer.batch


def test_the_reference_page_has_every_setting(referred: dict[str, tuple[str, str]]) -> None:
    assert {f.place for f in declared()} <= set(referred)
    assert {place for place in referred if place.startswith("estimator.")} >= {"estimator.kind", "estimator.form"}
    assert len(ESTIMATORS.built_in) > 5

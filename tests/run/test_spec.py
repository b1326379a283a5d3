"""A spec: declared once, checked however it is made, the same in TOML, JSON and flat options."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

import eqprop
from eqprop import papers, plugins
from eqprop.estimators import EP
from eqprop.models.layered import LayeredNet
from eqprop.run.published import PaperResult, reproduces
from eqprop.run.spec import SECTIONS, Spec, declared
from eqprop.run.toml import to_toml

EVERY = [(name, preset) for name in papers.names() for preset in papers.presets(name)]
SMALL = Spec.of("small", model=LayeredNet((10, 12, 784)), T=6, rates={"W01": 0.1, "W12": 0.2})


@pytest.mark.parametrize(("name", "preset"), EVERY)
def test_every_experiment_survives_toml_and_json(name: str, preset: str, tmp_path: Path) -> None:
    spec = papers.find(name, preset)
    (tmp_path / "mine.toml").write_text(to_toml(spec), encoding="utf-8")
    (tmp_path / "mine.json").write_text(json.dumps(spec.to_dict()), encoding="utf-8")
    assert papers.find(tmp_path / "mine.toml") == papers.find(tmp_path / "mine.json") == spec
    assert Spec(**json.loads(json.dumps(spec.to_dict()))) == spec


def test_an_edited_file_is_an_experiment_of_ones_own(tmp_path: Path) -> None:
    text = to_toml(papers.find("P-1h"))
    (tmp_path / "mine.toml").write_text(text.replace("T = 30", "T = 31"), encoding="utf-8")
    found = papers.find(tmp_path / "mine.toml")
    assert (found.preset, found.published, found.phases.T) == ("own", {}, 31)
    assert [str(change) for change in found.changes(papers.find("P-1h"))] == ["T 31 instead of 30"]


def test_a_file_starts_from_an_experiment_or_from_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "P-1h"\nT = 20\noptimizer = { rates = { W01 = 0.5 } }\n')
    found = papers.find(path)
    assert (found.name, found.phases.T, found.phases.K) == ("mine", 20, 10)
    assert found.optimizer.rates == {"W12": 0.08, "W01": 0.5}
    path.write_text('base = "P-1h"\npreset = "authors"\n')
    assert papers.find(path).model.init == "default"
    path.write_text("[mine]\nphases.T = 20\n[mine.longer]\nphases.T = 40\n[mine.longest]\nbase = 'longer'\nK = 30\n")
    assert papers.find(path) == Spec.of("mine", T=20)
    assert papers.find(path, "longest") == Spec.of("mine", preset="own", T=40, K=30)


def test_flat_settings_go_to_their_sections() -> None:
    found = SMALL.override(T=30, epochs=2, trials=2, threads=1, cost="cross-entropy", sizes=None)
    assert (found.phases.T, found.optimizer.epochs, found.run.trials, found.run.threads) == (30, 2, 2, 1)
    assert (found.cost.kind, found.model.sizes) == ("cross-entropy", (12, 784))
    assert found.optimizer.rates == {"W01": 0.2, "Wout": 0.1}, "the rates of the layers that stay, and the readout's"
    assert SMALL.override(phases={"T": 30}) == SMALL.override(T=30) != SMALL
    assert SMALL.override(rates={"*": 0.3}).optimizer.rates == {"*": 0.3}
    assert SMALL.override(rates={"W01": 0.3}).optimizer.rates == {"W01": 0.3, "W12": 0.2}


def test_flat_names_are_unique() -> None:
    for spec in [papers.find(name, preset) for name, preset in EVERY]:
        names = [field.flat for field in declared(spec)]
        assert len(set(names)) == len(names)
    assert all(field.help.endswith(".") for field in declared())


BAD = {
    "phases.T is -1; expected a whole number from 1 to 1000000.": {"T": -1},
    "phases.T is '3'; expected a whole number": {"T": "3"},
    "phases.T is True; expected a whole number": {"T": True},
    "phases.beta is nan; expected a number, finite.": {"beta": float("nan")},
    "phases.beta is inf": {"beta": float("inf")},
    "optimizer.rates.W01 is -1; expected a number, 0 or more.": {"rates": {"W01": -1}},
    "optimizer.clip_norm is 0; expected a number above 0.": {"clip_norm": 0},
    "optimizer.average is 1; expected a number from 0 to below 1.": {"average": 1},
    "phases.initialiser_rate is 2; expected a number above 0 and below 2.": {"initialiser_rate": 2},
    "Unknown phases.schedule 'sweps'; .*Did you mean 'sweeps'": {"schedule": "sweps"},
    "Unknown estimator 'bpt'; .*Did you mean 'bptt'": {"estimator": "bpt"},
    "Unknown option 'betta'; .*Did you mean 'beta'": {"betta": 1},
    "Unknown field of phases 'Tt'": {"phases": {"Tt": 1}},
    "Unknown model.kind 'graf'; .*Did you mean 'graph'": {"model": {"kind": "graf"}},
    "model.sizes is .*; expected a list, each a whole number above 0.": {"sizes": [10, 0]},
    "estimators is .* expected no duplicates": {"estimators": ["ep", "ep"]},
    "optimizer.options sets lr": {"optimizer_options": {"lr": 1}},
    "expected printable characters": {"name": "a\x1b[2J"},
    "continual EP moves the parameters itself": {"estimator": "ep-continual"},
}


@pytest.mark.parametrize(("message", "flat"), list(BAD.items()), ids=list(BAD))
def test_an_error_names_the_setting_and_what_is_expected(message: str, flat: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=message):
        SMALL.override(**flat)


def test_results_are_read_as_printed() -> None:
    assert PaperResult.parse("2.00 ± 0.13 (0.20)") == PaperResult(2.0, 0.13, 0.2)
    assert PaperResult.parse("~2.2") == PaperResult(2.2, about=True) != PaperResult.parse("2.2")
    for text in ("2,0", "two", "2.0 ± x", ""):
        with pytest.raises(ValueError, match="published result"):
            PaperResult.parse(text)
    paper = PaperResult(2.0, 0.1)
    assert reproduces(2.2, paper)
    assert not reproduces(2.21, paper)
    assert reproduces(1.8, paper)
    assert not reproduces(1.79, paper), "on both sides"
    about = PaperResult.parse("~2.2 (~0)")
    assert about == PaperResult(2.2, train=0.0, about=True)
    assert str(about) == "~2.2 (~0)"


def test_a_preset_names_what_there_is() -> None:
    with pytest.raises(ValueError, match="P-1h has no preset 'tuned'.*paper, authors, gdu"):
        papers.find("P-1h", "tuned")
    with pytest.raises(ValueError, match="Did you mean 'P-1h'"):
        papers.find("P-1")
    assert papers.find("p-1H") == papers.find("P-1h", "paper")
    assert papers.find("toy").preset == "gdu"


@dataclass(frozen=True)
class Strong(EP):
    strength: float = 0.5


def test_an_estimator_from_outside_declares_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {kind: {} for kind in plugins.KINDS})
    eqprop.register("estimator", "strong", Strong)
    spec = SMALL.override(estimator="strong", strength=0.7)
    assert msgspec.to_builtins(spec.estimator)["strength"] == 0.7
    assert "strength" in {field.flat for field in declared(spec)} - {field.flat for field in declared(SMALL)}
    with pytest.raises(ValueError, match="estimator.strength is 'x'; expected a number"):
        spec.override(strength="x")
    with pytest.raises(ValueError, match="Unknown option 'strength'"):
        SMALL.override(strength=0.7)
    assert set(SECTIONS) <= set(spec.to_dict())

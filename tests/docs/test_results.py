"""results/ holds JSON only, small, each document known by its fields; and it shows what the pages claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs.build import cifar10, table1
from docs.build.estimators import slope
from docs.build.gdu import BETAS, compared, errors, mean_error, traces
from docs.build.results import RESULTS, documents, flat
from docs.build.runs import trials
from eqprop import papers
from eqprop.run.metrics import stored_trials
from eqprop.run.spec import Spec

ORDERS = {"one-sided": 1, "random-sign": 1, "symmetric": 2, "holomorphic, 4 points": 4, "holomorphic, 8 points": 8}


def files() -> list[Path]:
    return [path for path in RESULTS.rglob("*") if path.is_file() and "figures" not in path.parts]


def test_results_are_json_and_small() -> None:
    assert [path for path in files() if path.suffix != ".json"] == []
    folders = [path for path in RESULTS.rglob("*") if path.is_dir()]
    assert sum(path.stat().st_size for path in [*files(), *folders, RESULTS]) < 4_000_000


def test_published_trials_are_read_with_their_schedule() -> None:
    found = {(t.spec.name, t.spec.preset, t.spec.phases.schedule) for t in stored_trials(RESULTS / "table1")}
    assert ("P-2h", "paper", "alternating") in found
    assert ("P-2h", "paper", "synchronous") in found
    assert ("P-2h", "tuned", "alternating") in found
    assert len(found) == len(documents("table1"))


def test_results_carry_no_path_of_a_machine() -> None:
    for topic in (RESULTS / "runs").glob("*.json"):
        for d in documents(f"runs/{topic.name}"):
            assert all(made["commit"] and "/" not in made["command"] for made in d["provenance"])
    for d in documents("cifar10"):
        sessions = [one["provenance"] for one in d["provenance"]] if "row" in d else [d["provenance"]]
        assert all(made["commit"] and "/" not in made["command"] for made in sessions)


def test_rows_of_cifar10_are_those_of_the_package_and_were_made_by_clean_commits() -> None:
    for name, d in cifar10.rows().items():
        row = papers.cifar_rows()[name]
        assert Spec(**d["experiment"]).changes(row.spec) == []
        assert list(d["estimators"]) == [row.estimator]
        assert d["data"]["set"] == "cifar10", "the published files, by checksum"
        trials = d["estimators"][row.estimator]["trials"]
        assert [t["seed"] for t in trials] == list(range(len(trials)))
        assert {one["seed"] for one in d["provenance"]} == {t["seed"] for t in trials}
        assert not any(one["provenance"]["commit"].endswith("-dirty") for one in d["provenance"])


def worst(name: str, **other: Any) -> float:
    d = compared(name, **other)
    return max(errors(d, "neurons") + errors(d, "synapses"))


def test_the_toy_model_has_the_gdu_property_in_proportion_to_beta() -> None:
    assert worst("toy") <= 2e-2
    assert worst("toy", beta=0.001) <= worst("toy") / 9.5


@pytest.mark.parametrize(("name", "limit"), [("EB-1h", 2e-2), ("EB-2h", 0.2), ("EB-3h", 0.2)])
def test_energy_based_nets_are_as_near_as_the_paper_says(name: str, limit: float) -> None:
    assert worst(name) <= limit


def test_the_convolutional_net_is_off_by_a_few_tenths() -> None:
    found = errors(compared("P-conv"), "synapses")
    assert min(found) >= 0.1
    assert max(found) < 1.0


def test_saw_teeth_are_in_prototypical_nets_alone() -> None:
    saw, smooth = (traces(name)["neurons"]["s0"] for name in ("P-1h", "EB-1h"))
    assert max(saw["rms_bptt"][1:10:2]) == 0.0
    assert 0.0 < max(saw["rms_ep"][1:10:2]) < 0.05 * max(saw["rms_ep"])
    assert min(smooth["rms_bptt"][1:10:2]) > 0.05 * max(smooth["rms_bptt"])


@pytest.mark.parametrize("name", ["P-1h", "P-2h"])
def test_inside_the_error_falls_with_beta_and_outside_it_stays(name: str) -> None:
    inside, outside = (
        [mean_error(compared(name, nudge_site=site, beta=beta)) for beta in BETAS] for site in ("inside", "outside")
    )
    assert inside[1] / inside[2] == pytest.approx(10.0, rel=0.3)
    assert outside[2] / outside[3] == pytest.approx(1.0, rel=0.1)
    last = compared(name, nudge_site="inside", beta=BETAS[-1])
    assert last["budget"]["parts"]["synapses"]["output_slope"] == 0.0


@pytest.mark.parametrize("at", range(3))
def test_the_measured_bias_has_the_order_it_should(at: int) -> None:
    found = documents("estimators/bias.json")[at]
    assert found["residual_max"] < 1e-12
    for form, order in ORDERS.items():
        assert slope(found, form) == pytest.approx(order, rel=0.1), form


def settings(found: dict[str, Any]) -> dict[str, Any]:
    """What a stored run was trained with, by the names of the settings."""
    experiment = flat(found["experiment"])
    more = {name: experiment[name] for name in ("name", "estimator", "cost", "data")}
    sections = [experiment[name] for name in ("model", "phases", "optimizer", "run")]
    return {**{k: v for section in sections for k, v in section.items()}, **more}


def test_runs_compared_for_the_nudge_site_differ_in_nothing_else() -> None:
    found = documents("runs/nudge-site.json")
    first, seeds = settings(found[0]), {d["experiment"]["run"]["seed"] for d in found}
    assert len(seeds) > 1
    for d in found:
        assert {k for k, v in settings(d).items() if first[k] != v} <= {"nudge_site", "seed"}
    assert sorted(t["seed"] for d in found for t in trials(d)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_runs_compared_for_their_start_differ_in_nothing_else() -> None:
    first = next(d for d in documents("runs/literature.json") if settings(d)["start"] == "initialised")
    others = documents("runs/starts.json")
    assert len(others) >= 2
    for d in others:
        differing = {k for k, v in settings(first).items() if settings(d)[k] != v}
        assert differing <= {"start", "T", "epochs", "evaluation_T"}
        assert d["data"]["sha256"] == first["data"]["sha256"]


def test_the_tuned_experiment_is_the_one_decided_and_trained() -> None:
    recipe = documents("tune/recipe.json")[0]
    experiment = Spec(**recipe["experiment"])
    for decision in recipe["decisions"]:
        assert settings(recipe)[decision["name"]] == decision["value"]
    assert settings(documents("runs/tuned.json")[0])["rates"] == experiment.optimizer.rates
    assert not recipe["provenance"]["commit"].endswith("-dirty")


def test_what_train_says_of_the_papers_cells_is_what_was_measured() -> None:
    judged = {
        (row.experiment.name, estimator, row.experiment.preset): row.reproduced(estimator)
        for row in table1.rows()
        if row.own_schedule
        for estimator in table1.ESTIMATORS
    }
    printed = {name: papers.find(name) for name in papers.of_paper()}
    missed = {(name, e) for name in printed for e in ("ep", "bptt") if papers.caution(printed[name], e)}
    assert missed == {(name, e) for (name, e, preset), same in judged.items() if preset == "paper" and not same}
    rows = {(row.experiment.name, row.experiment.preset): row for row in table1.rows() if row.own_schedule}
    for (name, preset), row in rows.items():
        for estimator, mean in papers.reached(name, preset).items():
            found = row.result(estimator)
            assert found is not None
            assert found["test_error_mean"] == pytest.approx(mean, abs=1e-3)

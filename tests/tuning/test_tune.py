"""eqprop tune: what is measured, how it is decided, and that the test set has no part in it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.nets import asymmetric, batch, convolutional, energy_based, pooled_net, prototypical, toy
from helpers.training_runs import SMALL, call_main, few_images, write_idx, write_small_toml

from eqprop import BPTT, Dynamics, Phase, SquaredError, from_primitive, papers, relax
from eqprop.data import Images
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.models.layered import LayeredNet
from eqprop.run import train
from eqprop.run.own import OwnNet
from eqprop.run.session import bind, build_model, make_estimator
from eqprop.run.spec import Spec
from eqprop.run.toml import to_toml
from eqprop.tuning import recipe as decide
from eqprop.tuning.effort import FAILED, Effort, Outcome, prepare_folder, short_training
from eqprop.tuning.probe import (
    Batches,
    BetaAgreement,
    Measurements,
    Residuals,
    Scales,
    Sizes,
    agreement,
    exact_gradients,
    gradients,
    residuals,
    weight_names,
)
from eqprop.tuning.recipe import Decision, Recipe, TuningResult, tune
from eqprop.tuning.search import space_around

WALL = ("seconds", "provenance")


def falling(start: float, factor: float, steps: int) -> tuple[float, ...]:
    return tuple(start * factor**t for t in range(steps))


def same(values: tuple[float, ...]) -> Residuals:
    return Residuals(values, values, values)


def test_T_is_where_the_residuals_stay_small_at_every_set_of_weights() -> None:
    fast, slow = falling(1.0, 0.5, 200), falling(1.0, 0.9, 200)
    assert decide.free_steps([same(fast)]).value == 10
    expected = math.ceil(math.log(decide.STILL_MOVING) / math.log(0.9))
    assert decide.free_steps([same(fast), same(slow)]).value == expected
    back = (*falling(1.0, 0.5, 30), *falling(1.0, 0.5, 30))
    assert decide.free_steps([same(back)]).value == 30 + 10


def test_T_with_samples_that_never_settle_follows_the_others_and_says_so() -> None:
    stuck = (0.5,) * 200
    half = decide.free_steps([Residuals(falling(1.0, 0.9, 200), stuck, stuck)])
    assert half.value == math.ceil(math.log(decide.STILL_MOVING) / math.log(0.9))
    assert "a tenth never do" in half.reason
    none = decide.free_steps([same(stuck)])
    assert none.value == decide.T_RANGE[1]
    assert "still 5.0e-01" in none.reason


def test_K_is_where_the_gradients_of_every_weight_have_died_out() -> None:
    # Every other step of a weight is zero in a prototypical net: that is not the end of its process.
    alternating = tuple(v if t % 2 else 0.0 for t, v in enumerate(falling(1.0, 0.8, 60)))
    sizes = Sizes({"W01": falling(1.0, 0.5, 60), "W12": alternating})
    found = decide.second_steps([sizes], T=100)
    assert found.value == next(t + 1 for t in range(59, -1, -1) if alternating[t] >= decide.DIED_OUT * max(alternating))
    capped = decide.second_steps([sizes], T=5)
    assert capped.value == 5
    assert "capped at T" in capped.reason
    assert "have not died out" in decide.second_steps([Sizes({"W": (1.0,) * 60})], T=100).reason


def test_beta_is_the_largest_that_agrees_about_as_well_as_the_best() -> None:
    def curve(*signs: float) -> BetaAgreement:
        return BetaAgreement(decide.BETAS, {"W": signs}, {"W": signs})

    peak = curve(0.7, 0.8, 0.9, 0.91, 0.905, 0.6, 0.3)
    assert decide.nudge([peak]).value == 0.2
    assert decide.nudge([peak, curve(0.9, 0.9, 0.9, 0.9, 0.5, 0.5, 0.5)]).value == 0.1
    assert decide.nudge([curve(*[0.9] * 7)]).value == 1.0


def test_smaller_gradients_get_larger_rates() -> None:
    wanted, _ = decide.relative_rates(Scales({"a": 2.0, "b": 2.0}, {"a": 4.0, "b": 1.0}), ["a", "b"], "SGD")
    assert wanted == {"a": 0.25, "b": 1.0}
    equal, why = decide.relative_rates(Scales({"a": 2.0, "b": 2.0}, {"a": 4.0, "b": 1.0}), ["a", "b"], "Adam")
    assert equal == {"a": 1.0, "b": 1.0}
    assert "Adam" in why
    with pytest.raises(ValueError, match="No weight has a gradient"):
        decide.relative_rates(Scales({"a": 1.0}, {"a": 0.0}), ["a"], "SGD")


@pytest.mark.parametrize("best", [0.0125, 0.05, 0.1, 0.2, 1.6])
def test_climbing_finds_the_valley_within_its_trials(best: float) -> None:
    calls: list[float] = []

    def error(c: float) -> float:
        calls.append(c)
        return abs(math.log(c / best))

    found, tried = decide.climb(error, 0.1)
    assert found == pytest.approx(best)
    assert len(calls) == len(set(calls)) == len(tried) <= 6


def outcome(experiment: Spec, train: float, diverged: bool) -> Outcome:
    found = FAILED if diverged else train
    rates = dict(experiment.optimizer.rates)
    return Outcome(
        "",
        experiment.phases.T,
        experiment.phases.K,
        experiment.phases.beta,
        rates,
        found,
        found,
        0.0,
        diverged,
        0.0,
        "",
    )


class OnTargets:
    """Trainings on targets: errors, in percent of their variance, may be above those of one that diverged."""

    effort = Effort(100, 2, 50, 1.0)

    def __init__(self, diverges: Any) -> None:
        self.diverges = diverges

    def run(self, experiment: Spec, stage: str) -> Outcome:
        return outcome(experiment, 150.0, self.diverges(experiment))

    def in_time(self) -> bool:
        return True


def test_T_and_K_do_not_shrink_to_those_that_diverge() -> None:
    recipe = Recipe(None, SMALL.override(T=20, K=10), print)  # type: ignore[arg-type]
    for name in ("T", "K"):
        recipe.decide(Decision(name, getattr(recipe.spec.phases, name), "measured"))
    decide._shrink(recipe, OnTargets(lambda e: e.phases.T < 14 or e.phases.K < 7))  # type: ignore[arg-type]
    assert (recipe.spec.phases.T, recipe.spec.phases.K) == (14, 7)
    assert "below that the training diverges" in recipe.decisions["T"].reason


def test_rates_that_diverge_are_not_the_best_of_those_tried() -> None:
    plan = bind(SMALL, few_images())
    recipe = Recipe(plan, SMALL, print)  # type: ignore[arg-type]
    sizes = Scales({"W12": 1.0, "W01": 1.0}, {"W12": 1.0, "W01": 2.0})
    recipe.looks.append(Measurements("", same((0.0,)), Sizes({}), BetaAgreement((), {}, {}), sizes))
    trainings = OnTargets(lambda e: e.optimizer.rates["W12"] > 0.15)
    chosen = decide._choose_rates(recipe, trainings, ["W12", "W01"])  # type: ignore[arg-type]
    assert not chosen.diverged
    assert recipe.spec.optimizer.rates["W12"] < 0.15
    assert "150.0 % at 0.1, diverged at 0.2" in recipe.decisions["rates"].reason

    never = OnTargets(lambda e: True)
    with pytest.raises(
        ArithmeticError, match=r"Every short training diverged, with largest rates from 0\.00625 to 0\.2"
    ):
        decide._choose_rates(recipe, never, ["W12", "W01"])  # type: ignore[arg-type]


NETS = {
    "toy": toy(),
    "energy-based": energy_based(2),
    "prototypical": prototypical(2),
    "convolutional": convolutional(),
    "own F": asymmetric(),
}


def looked_at(model: Dynamics) -> Batches:
    pairs = [batch(model, samples=4, seed=seed) for seed in (0, 10)]
    return Batches(tuple(x for x, _ in pairs), tuple(y for _, y in pairs))


@pytest.mark.parametrize("name", NETS)
def test_residuals_are_those_of_the_free_phase(name: str) -> None:
    model = NETS[name]
    x = looked_at(model).all_x()
    curve = residuals(model, x, "synchronous", 30)
    for t in (0, 1, 7, 30):
        there = relax(model, x, Phase(t)).residual
        if t < len(curve.worst):
            assert curve.worst[t] == pytest.approx(float(there.max()), rel=1e-12, abs=1e-15)
            assert curve.median[t] == pytest.approx(float(there.median()), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", NETS)
def test_exact_gradients_are_those_of_bptt(name: str) -> None:
    model = NETS[name]
    found = exact_gradients(model, SquaredError(), looked_at(model), 200, 40)
    x, y = looked_at(model).x[1], looked_at(model).y[1]
    _, grads = BPTT(200, 40).gradient(model, SquaredError(), x, y)
    for parameter, parameter_grad in model.named_parameters():
        expected = grads[parameter_grad]
        assert torch.allclose(found.gradients[1][parameter], expected, rtol=1e-9, atol=1e-12)
    assert set(found.sizes.norms) == set(weight_names(model))


def test_signs_agree_where_the_theorem_holds_and_not_where_it_does_not() -> None:
    """The check can fail: feedback weights of its own spoil the signs, so does a large beta."""
    experiment = SMALL.override(T=400, K=200)

    def signs(model: Dynamics, betas: tuple[float, ...]) -> tuple[float, ...]:
        batches = looked_at(model)
        exact = exact_gradients(model, SquaredError(), batches, 400, 200)
        return agreement(model, SquaredError(), batches, exact, experiment, betas).mean_sign()

    small, large = signs(energy_based(2), (1e-4, 5.0))
    assert small > 0.99
    assert large < small
    assert signs(asymmetric(3.0), (1e-4,))[0] < 0.9


def test_the_budget_is_counted_in_operations() -> None:
    plan = bind(SMALL, few_images(6000, 100))
    small, large = short_training(plan, 0.5), short_training(plan, 5.0)
    assert small.samples * small.epochs < large.samples * large.epochs
    assert small == short_training(plan, 0.5)
    assert large.samples + large.validation <= 6000
    assert large.samples % SMALL.optimizer.batch == 0
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="budget is"):
            short_training(plan, wrong)


def tuned_at(
    out: Path, spec: Spec = SMALL, images: Images | None = None, own: Any = None, **options: Any
) -> TuningResult:
    session = bind(spec, few_images(1200, 100) if images is None else images, model=own, trains=False)
    return tune(session, out, **{"budget": 0.2, "limit": math.inf} | options)


def test_no_training_begins_after_the_budget(tmp_path: Path) -> None:
    found = tuned_at(tmp_path, limit=0.0).document
    assert len(found["trainings"]) == 1, "without any, there is nothing to choose"
    reasons = {d["name"]: d["reason"] for d in found["decisions"]}
    assert all("the budget ended" in reasons[name] for name in ("T", "K", "beta"))
    assert len(tuned_at(tmp_path, limit=math.inf).document["trainings"]) > 3, "the same folder goes on"


def settings_of(tuned: TuningResult) -> dict[str, Any]:
    """The document without what the clock says."""
    document = {k: v for k, v in tuned.document.items() if k not in WALL}
    document["data"] = {k: v for k, v in document["data"].items() if k != "fingerprint"}  # also of the test set
    document["trainings"] = [{k: v for k, v in t.items() if k != "seconds"} for t in document["trainings"]]
    return json.loads(json.dumps(document))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> TuningResult:
    return tuned_at(tmp_path_factory.mktemp("tuned"))


def test_the_recipe_decides_everything_and_says_why(tuned: TuningResult) -> None:
    decisions = {d["name"]: d for d in tuned.document["decisions"]}
    assert set(decisions) == {"T", "K", "beta", "rates"}
    for name, decision in decisions.items():
        assert decision["value"] == (
            tuned.spec.optimizer.rates if name == "rates" else getattr(tuned.spec.phases, name)
        )
        assert decision["reason"]
    assert [look["weights"] for look in tuned.document["looks"]] == ["initial weights", "trained weights"]
    assert tuned.spec.phases.K <= tuned.spec.phases.T
    assert tuned.spec.phases.beta in decide.BETAS
    first, *rest = [t for t in tuned.document["trainings"] if not t["stage"].startswith("rates")]
    assert first["T"] >= tuned.spec.phases.T
    assert rest
    kept = next(
        t for t in tuned.document["trainings"] if (t["T"], t["K"]) == (tuned.spec.phases.T, tuned.spec.phases.K)
    )
    assert kept["train"] < 50.0


def test_the_recipe_is_deterministic_and_never_sees_the_test_set(tuned: TuningResult, tmp_path: Path) -> None:
    images = few_images(1200, 100)
    poisoned = replace(images, test_x=torch.full_like(images.test_x, math.nan), test_y=9 - images.test_y)
    again = tuned_at(tmp_path, images=poisoned)
    assert settings_of(again) == settings_of(tuned)


def test_a_recipe_that_was_stopped_goes_on(tuned: TuningResult, tmp_path: Path) -> None:
    stages = [t["stage"] for t in tuned.document["trainings"]]

    def stop(text: str) -> None:
        if text.startswith(f"training {stages[3]}"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned_at(tmp_path, tell=stop)
    kept = tmp_path / "trainings" / stages[2] / "metrics.jsonl"
    assert not (tmp_path / "trainings" / stages[3] / "metrics.jsonl").exists()
    written = kept.stat().st_mtime_ns
    assert settings_of(tuned_at(tmp_path)) == settings_of(tuned)
    assert kept.stat().st_mtime_ns == written, "a training that was done was done again"


def own_phi(seed: int) -> Dynamics:
    """A user's own Phi, whose parameters have names of their own."""
    source = torch.Generator().manual_seed(seed)
    parameters = {
        "inward": 0.05 * torch.randn(16, 784, generator=source),
        "outward": 0.3 * torch.randn(10, 16, generator=source),
        "offset": torch.zeros(16),
    }

    def phi(x: torch.Tensor, s: tuple[torch.Tensor, ...], theta: Any) -> torch.Tensor:
        drive = x @ theta["inward"].T + theta["offset"]
        return (s[0] * (s[1] @ theta["outward"].T)).sum(-1) + (drive * s[1]).sum(-1)

    return from_primitive(phi, parameters, layers=(10, 16), squash=torch.sigmoid)


KINDS: dict[str, tuple[Spec, dict[str, Any]]] = {
    "energy-based": (
        SMALL.override(model=LayeredNet((10, 12, 784), "energy-based", "sigmoid", eps=0.5, clip=True)),
        {},
    ),
    "convolutional": (
        SMALL.override(
            model=ConvolutionalNet(channels=(2,), kernel=9, pool=5, activation="sigmoid"),
            rates={"*": 0.1},
        ),
        {},
    ),
    "own Phi": (SMALL.override(model=OwnNet(function="own_phi"), rates={"*": 0.1}), {"own": own_phi}),
    "persistent states, random signs": (SMALL.override(start="persistent", estimator="ep-random-sign"), {}),
    "initialised, continual": (SMALL.override(start="initialised", estimator="ep-continual"), {}),
    "cross-entropy": (SMALL.override(cost="cross-entropy"), {}),
    "Adam": (SMALL.override(optimizer="Adam", rates={"*": 0.1}), {}),
}


QUICK = ("own Phi", "cross-entropy")


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_every_kind_of_network_is_tuned_and_its_record_trains(kind: str, tmp_path: Path) -> None:
    experiment, options = KINDS[kind]
    found = tuned_at(tmp_path, experiment, few_images(1200, 50), budget=0.01, **options)
    assert found.document["trainings"]
    path = tmp_path / "tuned.toml"
    path.write_text(to_toml(found.spec))
    assert papers.find(path) == found.spec
    model = build_model(found.spec, 0, own=options.get("own"))
    names = [*dict(model.named_parameters()), *found.spec.readout_names]
    assert all(rate > 0 for rate in found.spec.rates(names, model.layer_parameters).values())


def test_a_folder_takes_one_request(tmp_path: Path) -> None:
    asked = {"budget": 1.0, "experiment": {"T": 3}}
    assert not prepare_folder(tmp_path / "new", asked)
    assert prepare_folder(tmp_path / "new", asked)
    with pytest.raises(ValueError, match=r"other settings \(budget 2.0 instead of 1.0\)"):
        prepare_folder(tmp_path / "new", {**asked, "budget": 2.0})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="thesis.txt"):
        prepare_folder(tmp_path / "full", asked)
    with pytest.raises(NotADirectoryError, match="is a file"):
        prepare_folder(tmp_path / "full" / "thesis.txt", asked)


def test_the_command_writes_what_train_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, small = write_idx(tmp_path / "data", few_images(1200, 50)), write_small_toml(tmp_path / "small.toml", 2)
    out = tmp_path / "out"
    common = ("tune", small, "--data", data, "--out", out, "--threads", 1)
    assert call_main(monkeypatch, *common, "--budget", 0.05, "--json", tmp_path / "tune.json") == 0
    printed = capsys.readouterr()
    document = json.loads((out / "tune.json").read_text())
    assert json.loads((tmp_path / "tune.json").read_text()) == document
    for word in ("rates", "beta = ", "eqprop train"):
        assert word in printed.out
    assert "training" in printed.err
    for name in ("decisions.png", "decisions.pdf", "tuned.toml"):
        assert (out / name).stat().st_size > 100
    experiment = papers.find(out / "tuned.toml")
    assert (experiment.phases.T, experiment.phases.K, experiment.phases.beta) == tuple(
        document["experiment"]["phases"][name] for name in ("T", "K", "beta")
    )
    assert call_main(monkeypatch, "train", out / "tuned.toml", "--data", data, "--out", tmp_path / "run", "-q") == 0
    assert call_main(monkeypatch, *common, "--budget", 7) == 2
    assert "other settings (budget 7.0 instead of 0.05)" in capsys.readouterr().err


def test_a_network_that_only_diverges_is_told(tmp_path: Path) -> None:
    def explode(seed: int) -> Dynamics:
        model = own_phi(seed)
        with torch.no_grad():
            model.get_parameter("outward").fill_(math.nan)
        return model

    experiment = SMALL.override(model=OwnNet(function="explode"), rates={"*": 0.1})
    with pytest.raises(ArithmeticError, match="not finite"):
        tuned_at(tmp_path, experiment, own=explode)


@pytest.mark.parametrize("form", ["ep", "ep-symmetric", "ep-holomorphic", "ep-random-sign", "ep-continual"])
def test_ep_is_looked_at_in_the_form_it_is_trained(form: Any) -> None:
    """Random signs and continual EP, which have no single gradient before the rates are known, as one-sided EP."""
    model = energy_based(2)
    batches = looked_at(model)
    experiment = SMALL.override(T=60, K=20, beta=0.3, estimator=form)
    found = gradients(model, SquaredError(), batches, experiment)
    seen = "ep" if form in ("ep-random-sign", "ep-continual") else form
    estimator = make_estimator(experiment, seen)
    _, expected = estimator.gradient(model, SquaredError(), batches.x[0], batches.y[0])
    for name, p in model.named_parameters():
        assert torch.equal(found[0][name], expected[p])
    assert gradients(model, SquaredError(), batches, experiment)[1]["W01"].equal(found[1]["W01"])


def sweeping() -> Spec:
    """A pooled net with an implicit nudge, which is taken both ways."""
    return SMALL.override(
        model=pooled_net((1, 28, 28), 7),
        rates={"*": 0.05},
        schedule="sweeps-same",
        nudge_site="implicit",
        estimator="ep-symmetric",
        init="default",
    )


def test_a_net_that_sweeps_and_is_nudged_implicitly_is_tuned(tmp_path: Path) -> None:
    """At beta = 1 the nudge away from the target has no solution."""
    found = tuned_at(tmp_path / "out", sweeping(), validation=50)
    assert found.document["effort"]["validation"] == 50
    tried = found.document["looks"][0]["agreement"]["betas"]
    assert max(tried) == decide.LARGEST_IMPLICIT
    assert decide.largest_beta(SMALL) == 1.0 > space_around(sweeping(), ["W01"]).beta[1] == decide.LARGEST_IMPLICIT
    train(found.spec, tmp_path / "run", data=few_images(200, 50), epochs=1)

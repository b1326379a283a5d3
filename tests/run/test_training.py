"""The loop: same seed same bits, stacked as single, resume as if never stopped, what is measured and saved."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import SMALL, Asking, assert_same_bits, explosive_network, few_images, metrics, weights
from torch import Tensor

import eqprop
from eqprop import files
from eqprop.data import Images, split_validation
from eqprop.data.images import epoch_order, stacked_order
from eqprop.engines import Task, choose, engine_names
from eqprop.models.convolutional import ConvolutionalNet
from eqprop.models.layered import LayeredNet
from eqprop.run import Stopped, Watch, evaluate, load, predict, resume, train
from eqprop.run.checkpoint import join_tensors, split_tensors
from eqprop.run.description import read_description
from eqprop.run.folder import sessions
from eqprop.run.metrics import deviation
from eqprop.run.session import Leg, bind, build_model, make_estimator
from eqprop.run.spec import Spec
from eqprop.run.trainer import Trainer

NETS: dict[str, Spec] = {
    "prototypical": SMALL,
    "energy-based": SMALL.override(model=LayeredNet((10, 24, 784), "energy-based", "sigmoid", eps=0.2, clip=True)),
    "convolutional": SMALL.override(
        model=ConvolutionalNet(channels=(3, 2), kernel=5),
        # Small steps: where two pixels of a pool are nearly equal, rounding decides which one learns, and larger
        # steps make two runs out of that.
        rates={"*": 0.005},
        T=6,
    ),
}


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tmp_path: Path, images: Images) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(SMALL, tmp_path / name, data=images, seed=seed, estimators="ep,bptt", epochs=2)
    assert_same_bits(tmp_path / "a", tmp_path / "b", ("ep", "bptt"))
    assert not torch.equal(weights(tmp_path / "a")["0.W01"], weights(tmp_path / "c")["0.W01"])


def test_estimators_start_from_the_same_weights_and_see_the_same_batches(tmp_path: Path, images: Images) -> None:
    first: dict[str, dict[str, Tensor]] = {}

    class Starts(Watch):
        def begin_leg(self, leg: Leg, engine: str, epoch: int) -> None:
            first[leg.estimator] = weights(tmp_path / "run", leg.folder)

    train(SMALL, tmp_path / "run", data=images, estimators="ep,bptt,rbp", trials=2, epochs=1, watch=Starts())
    assert first.keys() == {"ep", "bptt", "rbp"}
    for name in first["ep"]:
        assert torch.equal(first["ep"][name], first["bptt"][name])
        assert torch.equal(first["ep"][name], first["rbp"][name])
    assert not torch.equal(first["ep"]["0.W01"], first["ep"]["1.W01"])
    assert not torch.equal(weights(tmp_path / "run", "ep")["0.W01"], weights(tmp_path / "run", "bptt")["0.W01"])
    plan = bind(SMALL, images, estimators=("ep", "bptt"), trials=2)
    orders = [Trainer(plan, leg)._batches(1) for leg in plan.legs()]
    assert torch.equal(orders[0], orders[1])


def test_every_sample_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    order = stacked_order([5, 6], epoch=2, samples=100, batch=20)
    assert order.shape == (5, 2, 20)
    for r, seed in enumerate((5, 6)):
        assert sorted(order[:, r].flatten().tolist()) == list(range(100))
        assert torch.equal(order[:, r], epoch_order(seed, 2, 100, 20))
    assert not torch.equal(epoch_order(5, 2, 100, 20), epoch_order(5, 3, 100, 20))
    assert epoch_order(5, 0, 110, 20).shape == (5, 20)
    # A seed means the same order for ever: this is the definition, computed by hand once.
    assert torch.equal(epoch_order(0, 0, 4, 4)[0], torch.randperm(4, generator=_generator("eqprop batches 0 0")))


def _generator(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) // 2)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("estimator", ["ep", "bptt"])
def test_a_stacked_run_equals_single_runs(tmp_path: Path, images: Images, net: str, estimator: str) -> None:
    """After 50 iterations, relative tolerance 1e-4: sums over the batch are grouped otherwise when stacked."""
    options: dict[str, Any] = {"data": images, "estimators": estimator, "epochs": 1, "batch": 8}
    assert len(images.train_x) // 8 == 50
    train(NETS[net], tmp_path / "stacked", trials=3, stacked=True, **options)
    together = weights(tmp_path / "stacked", estimator)
    for r in range(3):
        train(NETS[net], tmp_path / str(r), seed=r, **options)
        for name, value in weights(tmp_path / str(r), estimator).items():
            stacked = together[f"{r}{name[1:]}"]
            assert float((stacked - value).norm() / value.norm()) < 1e-4, (r, name)
        start = build_model(NETS[net], r).get_parameter(name[2:]).detach()
        assert float((value - start).norm() / value.norm()) > 1e-3, "the weights have moved by far more than that"


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """A way to set torch's threads that is undone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("engine", "number"), [*((n, 1) for n in engine_names() if n != "auto"), ("xla", 2)])
def test_counts_do_not_depend_on_how_iterations_are_cut_into_chunks(
    images: Images, engine: str, number: int, threads: Callable[[int], None]
) -> None:
    """Chunks follow the clock, so a resumed run cuts elsewhere; its bits must not depend on that."""
    threads(number)
    plan = bind(SMALL, images)
    try:
        choose(engine, Task(build_model(SMALL, 0), eqprop.SquaredError(), make_estimator(SMALL, "ep")))
    except ValueError as refusal:
        pytest.skip(str(refusal))
    results = []
    for cuts in ([20], [1, 2, 4, 8, 5], [7, 13]):
        trainer = Trainer(plan, plan.legs()[0], engine)
        for n in cuts:
            counts = trainer.advance(n)
        results.append((counts, trainer.checkpoint().weights))
    for counts, values in results[1:]:
        assert counts == results[0][0]
        assert all(torch.equal(values[name], results[0][1][name]) for name in values)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_run_stopped_anywhere_and_resumed_ends_with_the_same_bits(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch, stacked: bool, optimizer: str
) -> None:
    options: dict[str, Any] = {
        "data": images,
        "trials": 2,
        "stacked": stacked,
        "optimizer": optimizer,
        "optimizer_options": {"momentum": 0.9} if optimizer == "SGD" else {"betas": (0.8, 0.99)},
        "rates": {"*": 0.01},
    }
    train(SMALL, tmp_path / "whole", **options)
    legs = ("ep",) if stacked else ("ep-0", "ep-1")
    stops = 0
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="eqprop resume") as stopped:
        train(SMALL, tmp_path / "cut", watch=Asking(patch, 3), **options)
    assert stopped.value.exit_code == 130
    while True:
        try:
            with monkeypatch.context() as patch:
                resume(tmp_path / "cut", data=images, watch=Asking(patch, 2 + stops))
            break
        except Stopped:
            stops += 1
    assert stops >= 3
    assert_same_bits(tmp_path / "whole", tmp_path / "cut", legs)
    assert len(sessions(tmp_path / "cut")) == stops + 2
    # A finished run gives its result again and is not trained further.
    again = resume(tmp_path / "cut", data=images)
    assert again.summary["estimators"] == resume(tmp_path / "whole", data=images).summary["estimators"]
    assert_same_bits(tmp_path / "whole", tmp_path / "cut", legs)


class Crash(BaseException):
    """As if the process were gone: nothing catches it."""


def test_a_crash_at_any_file_operation_leaves_a_run_that_resumes_to_the_same_bits(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"data": images, "estimators": "ep,bptt", "epochs": 2, "batch": 100}
    train(SMALL, tmp_path / "whole", **options)
    crashes = 0
    for n in range(1, 100):
        calls = 0

        def or_crash(real: Any, *given: Any, at: int = n) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Crash
            real(*given)

        folder = tmp_path / str(n)
        with monkeypatch.context() as patch:
            for name in ("replace", "fsync"):
                patch.setattr(files.os, name, partial(or_crash, getattr(files.os, name)))
            try:
                train(SMALL, folder, **options)
                break
            except Crash:
                crashes += 1
        if (folder / "experiment.json").exists():
            resume(folder, data=images)
        else:
            train(SMALL, folder, **options)
        assert_same_bits(tmp_path / "whole", folder, ("ep", "bptt"))
    # experiment, environment, result, and for each estimator the start and two epochs, and lines of metrics.
    assert crashes > 20


def test_what_is_measured_is_what_the_weights_do(tmp_path: Path, images: Images) -> None:
    result = train(SMALL, tmp_path / "run", data=images, estimators="ep,bptt", trials=2, epochs=4, train_error_every=2)
    lines = metrics(tmp_path / "run")
    assert [(x["estimator"], x["epoch"], x["trial"]) for x in lines] == [
        (m, e, t) for m in ("ep", "bptt") for e in (1, 2, 3, 4) for t in (0, 1)
    ]
    for estimator in ("ep", "bptt"):
        for trial in (0, 1):
            model = load(tmp_path / "run", estimator, trial)
            test = 100 * float((predict(model, images.test_x) != images.test_y).double().mean())
            final = 100 * float((predict(model, images.train_x) != images.train_y).double().mean())
            summary = result.summary["estimators"][estimator]["trials"][trial]
            assert summary["test_error"][-1] == pytest.approx(test)
            assert summary["train_error_final"] == pytest.approx(final)
            own = [x for x in lines if (x["estimator"], x["trial"]) == (estimator, trial)]
            assert [x["train_error_measured"] is None for x in own] == [True, False, True, False]
            assert summary["test_error"] == [x["test_error"] for x in own]
            assert summary["train_error"] == [x["train_error"] for x in own]
    measured = evaluate(tmp_path / "run", data=images)
    for estimator, entry in result.summary["estimators"].items():
        last = [t["test_error"][-1] for t in entry["trials"]]
        assert [t["test_error"] for t in measured[estimator]] == last
        assert entry["test_error_mean"] == pytest.approx(sum(last) / 2)
        assert entry["test_error_std"] == pytest.approx(abs(last[0] - last[1]) / math.sqrt(2))


def test_the_running_counts_are_those_of_the_free_phases(images: Images) -> None:
    """Errors, loss and residuals of one epoch, counted by hand with the same weights before every step."""
    experiment = SMALL.override(epochs=1)
    plan = bind(experiment, images)
    trainer = Trainer(plan, plan.legs()[0])
    model = build_model(experiment, 0)
    estimator = make_estimator(experiment, "ep")
    rates = experiment.rates((n for n, _ in model.named_parameters()), model.layer_parameters)
    groups = [{"params": [p], "lr": rates[n]} for n, p in model.named_parameters()]
    optimizer = torch.optim.SGD(groups)
    wrong = loss = unsettled = worst = 0.0
    for rows in epoch_order(0, 0, 400, 20):
        x, y = images.train_x[rows], eqprop.data.one_hot(images.train_y[rows], 10)
        optimizer.zero_grad()
        free = estimator.backward(model, trainer.cost, x, y)
        optimizer.step()
        wrong += float((free.state[0].argmax(1) != images.train_y[rows]).sum())
        loss += float(0.5 * (free.state[0] - y).square().sum())
        unsettled += float((~free.settled).sum())
        worst = max(worst, float(free.residual.max()))
    trainer.advance(20)
    (line,) = trainer.end_epoch(lambda: None)
    assert line["train_error"] == pytest.approx(100 * wrong / 400)
    assert line["loss"] == pytest.approx(loss / 400, rel=1e-5)
    assert line["unsettled"] == pytest.approx(unsettled / 400)
    assert line["residual_worst"] == pytest.approx(worst, rel=1e-4)


def test_the_json_is_as_promised(tmp_path: Path, images: Images) -> None:
    summary = train(SMALL, tmp_path / "run", data=images, epochs=2).summary
    named = ["name", "preset", "model", "data", "changes_from_paper"]
    assert list(summary) == [*named, "engine", "device", "seconds", "estimators"]
    ep = summary["estimators"]["ep"]
    assert list(summary["estimators"]) == ["ep"]
    assert list(ep) == ["trials", "test_error_mean", "test_error_std", "train_error_mean"]
    assert list(ep["trials"][0]) == ["seed", "test_error", "train_error", "train_error_final", "diverged", "settling"]
    assert len(ep["trials"][0]["test_error"]) == len(ep["trials"][0]["train_error"]) == 2
    assert ep["test_error_std"] is None
    assert ep["train_error_mean"] == ep["trials"][0]["train_error"][-1]
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == summary
    assert deviation([1.0, 2.0, 3.0]) == 1.0


def test_what_ran_is_written_whole(tmp_path: Path, images: Images) -> None:
    train("P-1h", tmp_path / "run", data=images, epochs=1, T=5, K=2, rates={"W01": 0.2})
    described = read_description(tmp_path / "run")
    experiment = spec = described.spec
    assert (experiment.name, experiment.preset, experiment.phases.T, experiment.phases.K) == ("P-1h", "paper", 5, 2)
    assert experiment.optimizer.rates == {"W12": 0.08, "W01": 0.2}
    assert described.changes == described.content["changes_from_paper"]
    assert described.changes == [
        "T 5 instead of 30",
        "K 2 instead of 10",
        "rates W12=0.08, W01=0.2 instead of W12=0.08, W01=0.04",
        "epochs 1 instead of 30",
    ]
    assert spec.run.threads == torch.get_num_threads()
    assert spec.estimators == ("ep",)
    assert described.data["sha256"] == images.sha256
    assert described.data["directory"] is None
    (session,) = sessions(tmp_path / "run")
    assert session["provenance"]["torch"] == torch.__version__
    assert set(session["engines"]) == {"ep"}
    assert not list((tmp_path / "run").rglob("*.part")), "no temporary file is left"
    assert not [p for p in (tmp_path / "run").rglob("*") if p.suffix in (".pt", ".pkl", ".pth")]


def test_validation_holds_out_training_samples_and_never_sees_the_test_set(tmp_path: Path, images: Images) -> None:
    result = train(SMALL, tmp_path / "run", data=images, epochs=1, validation=100)
    model = load(tmp_path / "run")
    held = split_validation(images, 100)
    assert torch.equal(held.test_x, images.train_x[300:])
    error = 100 * float((predict(model, held.test_x) != held.test_y).double().mean())
    assert result.test_error("ep") == pytest.approx(error)
    assert read_description(tmp_path / "run").data["training_samples"] == 300


def test_any_optimizer_is_saved_without_pickle(tmp_path: Path, images: Images) -> None:
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Rprop"):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
        parameter.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()
        state = optimizer.state_dict()
        tensors, rest = split_tensors(state)
        back = join_tensors(tensors, json.loads(json.dumps(rest)))
        again = getattr(torch.optim, name)([parameter], lr=0.7)
        again.load_state_dict(back)
        assert again.state_dict()["param_groups"] == state["param_groups"]
        restored = again.state_dict()["state"]
        assert restored.keys() == state["state"].keys()
        for key, value in state["state"].get(0, {}).items():
            same = (
                value is None
                if restored[0][key] is None
                else torch.equal(torch.as_tensor(restored[0][key]), torch.as_tensor(value))
            )
            assert same, (name, key)
    with pytest.raises(TypeError, match="cannot be saved without pickle"):
        split_tensors({"state": {0: {"function": print}}})


class Warnings(Watch):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, message: str) -> None:
        self.texts.append(message)


@pytest.mark.parametrize(
    ("T", "word"),
    [(400, "Layer s0 .* not finite"), (40, "gradient of a is not finite; layer s0")],
)
def test_a_trial_that_diverges_is_stopped_and_keeps_its_last_good_weights(
    tmp_path: Path, images: Images, T: int, word: str
) -> None:
    watch = Warnings()
    options: dict[str, Any] = {"T": T, "rates": {"*": 50.0}, "keep_best": True}
    result = train(SMALL, tmp_path / "run", data=images, model=explosive_network, watch=watch, **options)
    (trial,) = result.summary["estimators"]["ep"]["trials"]
    assert trial["diverged"]
    assert result.test_error("ep") is None
    (line,) = [x for x in metrics(tmp_path / "run") if x["diverged"]]
    assert line["test_error"] is None
    (warning,) = [t for t in watch.texts if "was stopped" in t]
    assert "iteration" in warning
    assert "Its last good checkpoint is kept" in warning
    assert re.search(word, warning), warning
    saved = weights(tmp_path / "run")
    assert all(bool(torch.isfinite(v).all()) for v in saved.values())
    assert torch.equal(saved["0.a"], torch.tensor(0.5)), "the weights before the epoch it went wrong in"
    assert not (tmp_path / "run" / "ep" / "best").exists(), "no epoch has a test error"
    assert (
        resume(tmp_path / "run", data=images, model=explosive_network).summary["estimators"]
        == result.summary["estimators"]
    )


def test_a_state_that_explodes_but_is_finite_is_seen_too(tmp_path: Path, images: Images) -> None:
    def growing(seed: int) -> eqprop.Dynamics:
        model = explosive_network(seed)
        with torch.no_grad():
            model.get_parameter("a").fill_(3.0)
        return model

    watch = Warnings()
    train(SMALL, tmp_path / "run", data=images, model=growing, T=20, rates={"*": 0.0}, watch=watch)
    (warning,) = [t for t in watch.texts if "was stopped" in t]
    assert "The state explodes: layer s0 reaches" in warning


def test_other_trials_go_on_when_one_diverges(tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial 1 starts from weights that are not finite; trials 0 and 2 end as if it were not there."""
    train(SMALL, tmp_path / "whole", data=images, trials=3, stacked=True)
    build = build_model

    def broken(spec: Spec, trial: int, *rest: Any) -> eqprop.Dynamics:
        model = build(spec, trial, *rest)
        if trial == 1:
            with torch.no_grad():
                model.get_parameter("W12")[3, 5] = math.inf
        return model

    monkeypatch.setattr("eqprop.run.session.build_model", broken)
    watch = Warnings()
    result = train(SMALL, tmp_path / "run", data=images, trials=3, stacked=True, watch=watch)
    trials = result.summary["estimators"]["ep"]["trials"]
    assert [t["diverged"] for t in trials] == [False, True, False]
    whole, run = weights(tmp_path / "whole"), weights(tmp_path / "run")
    for name in whole:
        if not name.startswith("1."):
            assert torch.equal(whole[name], run[name]), name
    good = [t["test_error"][-1] for t in (trials[0], trials[2])]
    assert result.test_error("ep") == pytest.approx(sum(good) / 2)
    (warning,) = [t for t in watch.texts if "was stopped" in t]
    assert "trial 1 was stopped at epoch 1, iteration 0: The parameter W12 is not finite" in warning


def test_a_run_far_from_rest_points_to_the_doctor_once(tmp_path: Path, images: Images) -> None:
    watch = Warnings()
    train(SMALL, tmp_path / "short", data=images, T=1, K=1, epochs=4, watch=watch, estimators="ep")
    (text,) = watch.texts
    assert "of the free phases end away from rest" in text
    assert f"eqprop doctor {tmp_path / 'short'}" in text
    quiet = Warnings()
    train(SMALL, tmp_path / "long", data=images, T=300, epochs=2, init="default", watch=quiet)
    assert quiet.texts == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"estimatros": "ep"}, "Unknown option 'estimatros'.*Did you mean 'estimators'"),
        ({"estimators": "ep,bpt"}, "Unknown estimator 'bpt'.*Did you mean 'bptt'"),
        ({"estimators": "ep,ep"}, "no duplicates"),
        ({"engine": "eagr"}, "Unknown engine 'eagr'.*Did you mean 'eager'"),
        ({"trials": 0}, "trials is 0"),
        ({"validation": 400}, "Cannot hold out 400"),
        ({"samples": 500}, "samples is 500"),
        ({"batch": 401}, "mini-batch of 401"),
        ({"device": "nonsense"}, "nonsense"),
        ({"optimizer_options": {"momentun": 1}}, "does not take the options"),
        ({"optimizer": "Adam", "optimizer_options": {"betas": [0.9]}}, "does not take the options"),
        ({"rates": {"W99": 1.0}}, "for no known parameter"),
        ({"checkpoint_every": 0.0}, "checkpoint_every"),
        ({"model": LayeredNet((10, 24, 100))}, "784 pixels"),
        ({"model": LayeredNet((7, 24, 784))}, "7 outputs"),
        ({"estimators": "bptt", "T": 2, "K": 4}, "cannot unroll K=4"),
        ({"schedule": "alternating", "model": NETS["energy-based"].model}, "cannot alternate"),
    ],
)
def test_wrong_options_are_told_before_anything_is_written(
    tmp_path: Path, images: Images, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=complaint):
        train(SMALL, tmp_path / "run", data=images, **options)
    assert not (tmp_path / "run").exists()


def test_only_the_machine_may_change_on_a_resume(tmp_path: Path, images: Images) -> None:
    train(SMALL, tmp_path / "run", data=images, epochs=1)
    with pytest.raises(ValueError, match="T cannot be changed on resume"):
        resume(tmp_path / "run", data=images, T=5)
    with pytest.raises(ValueError, match="was trained on other data: sha256"):
        resume(tmp_path / "run", data=few_images(300))
    experiment = tmp_path / "run" / "experiment.json"
    content = json.loads(experiment.read_text())
    content["experiment"]["phases"]["T"] = 9
    experiment.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="does not match experiment.json"):
        resume(tmp_path / "run", data=images)


@pytest.mark.gpu
@pytest.mark.parametrize("estimator", ["ep", "bptt"])
def test_a_run_on_the_gpu_follows_the_cpu_and_resumes(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch, estimator: str
) -> None:
    """A seed means the same weights and batches on every device; 20 iterations differ by rounding only."""
    options: dict[str, Any] = {"data": images, "estimators": estimator, "trials": 2, "epochs": 1}
    train(SMALL, tmp_path / "cpu", device="cpu", **options)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        train(SMALL, tmp_path / "gpu", device="cuda", watch=Asking(patch, 2), **options)
    resume(tmp_path / "gpu", data=images)
    for name, value in weights(tmp_path / "cpu", estimator).items():
        other = weights(tmp_path / "gpu", estimator)[name]
        assert float((other - value).norm() / value.norm()) < 1e-3, name
    elsewhere = evaluate(tmp_path / "gpu", data=images, device="cpu")
    here = evaluate(tmp_path / "gpu", data=images)
    assert elsewhere[estimator][0]["test_error"] == pytest.approx(here[estimator][0]["test_error"], abs=1.0)

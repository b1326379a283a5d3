"""Graphs from files: read, written back, trained, resumed; states carried from one mini-batch to the next."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.nets import F64, batch, prototypical
from helpers.training_runs import Asking, assert_same_bits, few_images, write_idx
from torch.testing import assert_close

from eqprop import load, papers, relax
from eqprop.data import Images
from eqprop.models import Network
from eqprop.models.network import GraphNet
from eqprop.report.page import write_report
from eqprop.run import Stopped, resume, train
from eqprop.run.checkpoint import read_checkpoint
from eqprop.run.laboratory import compare, find_problem
from eqprop.run.session import build_model
from eqprop.run.spec import Spec
from eqprop.run.watch import Lines
from eqprop.starts import Carried

TOML = """
T = 12
K = 6
beta = 0.2
epochs = 1
schedule = "sweeps"
nudge_site = "implicit"
init = "default"
start = "carried"
estimator = "ep-symmetric"
batch = 30

[optimizer.rates]
"*" = 0.05
W_out_h2 = 0.02

[model]
kind = "graph"
input_shape = [1, 28, 28]
activation = { out = "identity", "*" = "hard-sigmoid" }
connections = [
    { kind = "conv", pre = "x", post = "h1", kernel = 5, padding = 2, stride = 2, pool = 2, gain = 0.5 },
    { kind = "conv", pre = "h1", post = "h2", kernel = 3, padding = 1 },
    { kind = "skip", pre = "h1", post = "h2", name = "skip" },
    { kind = "dense", pre = "h2", post = "out" },
]

[model.layers]
out = 10
h2 = [4, 7, 7]
h1 = [4, 7, 7]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_net.toml"
    path.write_text(TOML, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images(100, 40)


def test_a_graph_from_a_file(file: Path) -> None:
    experiment = papers.find(file)
    assert isinstance(experiment.model, GraphNet)
    net = build_model(experiment, 0, F64)
    assert isinstance(net, Network)
    assert net.names == ("out", "h2", "h1")
    assert [sigma.name for sigma in net.activations] == ["identity", "hard-sigmoid", "hard-sigmoid"]
    assert net.nudge_site == "implicit"
    assert [name for name, _ in net.named_parameters()] == [
        *("W_out_h2", "b_out", "W_h2_h1", "skip", "b_h2", "W_h1_x", "b_h1")
    ]
    assert str(experiment.model) == "graph 4-4-10, 4 connections"
    rates = experiment.rates([name for name, _ in net.named_parameters()], net.layer_parameters)
    assert (rates["b_out"], rates["skip"]) == (0.02, 0.05)


def test_a_run_counts_updates_and_sweeps(file: Path, images: Images, tmp_path: Path) -> None:
    said = io.StringIO()
    train(file, tmp_path / "run", data=images, watch=Lines(said))
    assert "T 12 (6 sweeps), K 6 (3 sweeps)" in said.getvalue()
    train(file, tmp_path / "all", data=images, watch=Lines(said := io.StringIO()), schedule="synchronous")
    assert "sweeps" not in said.getvalue()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "skip"', 'kind = "skipp"', "Unknown kind of connection 'skipp'.*Did you mean 'skip'"),
        ("kernel = 5", "kernal = 5", "A connection of kind conv: Unknown field 'kernal'.*Did you mean 'kernel'"),
        ('pre = "h2", post', "post", "A connection of kind dense lacks pre, the names"),
        ("T = 12", 'schedules = "x"\nT = 12', "Unknown option 'schedules'"),
    ],
)
def test_a_bad_file_is_refused_in_words(file: Path, old: str, new: str, message: str) -> None:
    assert old in TOML
    file.write_text(TOML.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"my_net.toml.*{message}"):
        papers.find(file)


@pytest.mark.parametrize("trials", [1, 2])
def test_a_graph_is_trained_and_resumed_to_the_same_bits(
    file: Path, tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch, trials: int
) -> None:
    """100 samples in mini-batches of 30: the last has 10, and its states are carried too."""
    experiment = papers.find(file).override(epochs=2)
    options: dict[str, Any] = {"data": images, "trials": trials}
    train(experiment, tmp_path / "whole", **options)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        train(experiment, tmp_path / "cut", watch=Asking(patch, 3), **options)
    resume(tmp_path / "cut", data=images)
    leg = "ep-symmetric"
    assert_same_bits(tmp_path / "whole", tmp_path / "cut", (leg,))
    states = [read_checkpoint(tmp_path / name / leg).start for name in ("whole", "cut")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert states[0]["0.s0"].shape == (30, 10)
    assert float(states[0]["0.s0"].abs().max()) > 0.0
    found = load(tmp_path / "whole", leg)
    assert isinstance(found.model, Network)
    written = write_report(tmp_path / "whole", with_curves=False)
    assert str(found.model.draw()) in written.page.read_text(encoding="utf-8")


def test_states_are_carried_by_place_in_the_mini_batch() -> None:
    net = prototypical(2)
    x, _ = batch(net, 7)
    start = Carried(net, x, batch=3)
    rows = torch.arange(7)
    first = start.begin(x[:3], rows[:3])
    assert all(float(v.abs().max()) == 0.0 for v in first)
    reached = relax(net, x[:3], 20, first).state
    start.end(x[:3], rows[:3], first, reached)
    assert_close(start.begin(x[3:6], rows[3:6]), reached)
    smaller = start.begin(x[6:], rows[6:])
    assert_close(smaller, tuple(v[:1] for v in reached))
    last = relax(net, x[6:], 20, smaller).state
    start.end(x[6:], rows[6:], smaller, last)
    mixed = start.begin(x[:3], rows[:3])
    assert_close(mixed, tuple(torch.cat([a, b[1:]]) for a, b in zip(last, reached, strict=True)))
    broken = tuple(torch.full_like(v, torch.nan) for v in reached)
    start.end(x[:3], rows[:3], mixed, broken)
    assert_close(start.begin(x[:3], rows[:3]), mixed)


def test_an_experiment_in_python(images: Images, tmp_path: Path) -> None:
    net = GraphNet(
        input_shape=(1, 28, 28),
        layers={"out": 10, "h": 20},
        connections=(
            {"pre": "x", "post": "h"},
            {"pre": "h", "post": "out"},
            {"kind": "lateral", "pre": "h", "gain": 0.3},
        ),
        groups=(("h",), ("out",)),
    )
    experiment = Spec.of(
        "own", model=net, optimizer="SGD", estimator="ep", T=10, K=4, epochs=2, rates={"*": 0.1}, init="default"
    )
    result = train(experiment, tmp_path / "run", data=images)
    assert result is not None
    assert (tmp_path / "run" / "experiment.json").is_file()


def test_gdu_takes_the_file(file: Path, images: Images, tmp_path: Path) -> None:
    data = write_idx(tmp_path / "idx", images)
    options = {"T": 400, "K": 8, "beta": 1e-5, "batch": 3, "data": str(data)}
    found = find_problem(str(file), settings=options, dtype=F64, trains=False)
    assert (found.spec.phases.schedule, found.spec.name, found.spec.model.init) == ("sweeps", "my_net", "default")
    document, _ = compare(found)
    assert document["nudge_site"] == "implicit"
    assert max(group["rmse"] for group in document["synapses"].values()) < 1e-2
    assert document["budget"]["outcome"] == "holds"

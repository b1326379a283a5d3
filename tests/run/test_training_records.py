"""Experiments: the paper's table as data, presets as named changes, a user's own from TOML."""

from __future__ import annotations

import pytest
import torch
from helpers.training_runs import SMALL

from eqprop import papers
from eqprop.models import Network
from eqprop.run.session import build_model
from eqprop.run.spec import Spec

# The paper's table of training hyper-parameters as it is printed: rates from the input side to the output side.
PRINTED = {
    "EB-1h": ("sigmoid", 100, 12, 0.5, 0.2, 30, "0.1-0.05"),
    "EB-2h": ("sigmoid", 500, 40, 0.8, 0.2, 50, "0.4-0.1-0.01"),
    "P-1h": ("sigmoid", 30, 10, 0.1, None, 30, "0.08-0.04"),
    "P-2h": ("sigmoid", 100, 20, 0.5, None, 50, "0.2-0.05-0.005"),
    "P-3h": ("sigmoid", 180, 20, 0.5, None, 100, "0.2-0.05-0.01-0.002"),
    "P-conv": ("hard-sigmoid", 200, 10, 0.4, None, 40, "0.15-0.035-0.015"),
}
ALL = [
    papers.find(name, preset)
    for name in papers.names()
    for preset in papers.presets(name)
    if preset not in papers.COMPARED
]


@pytest.mark.parametrize("name", PRINTED)
def test_the_paper_preset_is_the_printed_table(name: str) -> None:
    experiment = papers.find(name)
    eps = getattr(experiment.model, "eps", None)
    printed = (
        experiment.model.activation,
        experiment.phases.T,
        experiment.phases.K,
        experiment.phases.beta,
        eps,
        experiment.optimizer.epochs,
    )  # type: ignore[union-attr]
    assert printed == PRINTED[name][:-1]
    assert (
        experiment.optimizer.batch,
        experiment.model.init,
        experiment.optimizer.kind,
        experiment.phases.schedule,
    ) == (
        20,
        "glorot",
        "SGD",
        "synchronous",
    )
    weights = [n for n, p in build_model(experiment, 0).named_parameters() if p.dim() > 1]
    # Parameters are numbered from the output, so the order of the table is theirs backwards.
    assert "-".join(str(experiment.rates(weights)[n]) for n in reversed(weights)) == PRINTED[name][-1]


OWN_BIAS_RATES = ("drn-3h", "ising-1h", "binary-1h")
"""Whose authors give biases rates of their own."""


@pytest.mark.parametrize("experiment", ALL, ids=lambda r: f"{r.preset}-{r.name}")
def test_every_parameter_has_a_rate_and_a_bias_that_of_its_weight(experiment: Spec) -> None:
    model = build_model(experiment, 0)
    names = [*(n for n, _ in model.named_parameters()), *experiment.readout_names]
    rates = experiment.rates(names, model.layer_parameters)
    assert rates.keys() == set(names)
    for name in names:
        if name.startswith("b") and name != "bout" and experiment.name not in OWN_BIAS_RATES:
            kind, n = name[1:-1], int(name[-1])
            weight = f"W{kind}{n}{n + 1}"
            assert rates[name] == rates[weight if weight in rates else f"W{n}x"]


@pytest.mark.parametrize(
    ("name", "parameters", "operations", "neurons"),
    [
        ("cifar10-laborieux-2021", 3_838_720, 642e6, 128 * 256 + 256 * 64 + 512 * 16 + 512),
        ("cifar10-laborieux-2021-mse", 3_843_850, 642e6, 128 * 256 + 256 * 64 + 512 * 16 + 512 + 10),
        ("cifar10-scellier-2023", 3_859_210, 755e6, 128 * 256 + 256 * 64 + 512 * 16 + 512 * 4 + 10),
    ],
)
def test_the_nets_for_cifar10_have_their_published_sizes(
    name: str, parameters: int, operations: float, neurons: int
) -> None:
    net = build_model(papers.find(name), 0)
    assert isinstance(net, Network)
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert net.operations() == pytest.approx(operations, rel=1e-3)
    assert sum(layer.numel() for layer in net.init_state(torch.zeros(1, 3, 32, 32))) == neurons


def test_a_seed_builds_the_same_network_and_trials_differ() -> None:
    def first(trial: int) -> list[float]:
        return build_model(SMALL, trial).get_parameter("W01").flatten()[:5].tolist()

    assert first(0) == first(0) != first(1)
    assert build_model(SMALL.override(seed=1), 0).get_parameter("W01").flatten()[:5].tolist() == first(1)


def test_the_nudge_site_is_a_field_of_the_experiment_and_reaches_the_network() -> None:
    inside = papers.find("P-1h").override(nudge_site="inside")
    assert [str(change) for change in inside.changes(papers.find("P-1h"))] == ["nudge_site inside instead of outside"]
    assert build_model(inside, 0).nudge_site == "inside"
    assert build_model(papers.find("P-1h"), 0).nudge_site == "outside"
    assert Spec(**inside.to_dict()) == inside
    with pytest.raises(ValueError, match="no sigma around dPhi/ds"):
        build_model(papers.find("EB-1h").override(nudge_site="inside"), 0)
    with pytest.raises(ValueError, match="Unknown model.nudge_site 'insid'.*Did you mean 'inside'"):
        papers.find("P-1h").override(nudge_site="insid")


@pytest.mark.parametrize(
    ("name", "weight", "bias"), [("EB-1h", "W01", "b0"), ("P-2h", "W01", "b0"), ("P-conv", "Wfc01", "bfc0")]
)
def test_outputs_begin_where_the_experiment_says_and_nothing_else_moves(name: str, weight: str, bias: str) -> None:
    drawn = dict(build_model(papers.find(name, "authors"), 3).named_parameters())
    begun = dict(build_model(papers.find(name, "authors").override(output_bias=0.25), 3).named_parameters())
    assert begun[bias].tolist() == [0.25] * 10
    assert [k for k in drawn if not torch.equal(drawn[k], begun[k])] == [bias]
    scaled = dict(build_model(papers.find(name, "authors").override(output_scale=0.25), 3).named_parameters())
    assert torch.equal(scaled[weight], 0.25 * drawn[weight])
    assert [k for k in drawn if not torch.equal(drawn[k], scaled[k])] == [weight]

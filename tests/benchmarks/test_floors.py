"""The two floors of a row: the count of operations against torch's own counter, the length of the chain."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.floors import Work, dependent_steps, floors, work
from eqprop import papers
from eqprop.models import Convolutional
from eqprop.run.session import build_model
from eqprop.run.spec import Spec

SAMPLES = 3


def counted(run: object) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        run()  # type: ignore[operator]
    return int(counter.get_total_flops())


@pytest.mark.parametrize("experiment", papers.paper_rows().values(), ids=lambda r: r.name)
def test_a_step_counts_what_torch_counts(experiment: Spec) -> None:
    """But for the way back through an unpooled map, where torch multiplies its zeros as well."""
    model = build_model(experiment, 0)
    assert model.input_shape is not None
    x = torch.rand(SAMPLES, *model.input_shape)
    drive, s, own = model.drive(x), model.init_state(x), work(experiment)
    assert counted(lambda: model.drive(x)) == SAMPLES * own.drive
    zeros = 0
    if isinstance(model, Convolutional):
        dense = 2 * 64 * 32 * 25 * 8 * 8
        zeros = dense - dense // 4
    assert counted(lambda: model.step(drive, s)) == SAMPLES * (own.step + zeros)


@pytest.mark.parametrize("name", ["P-1h", "P-3h", "EB-2h"])
def test_the_contrast_counts_what_torch_counts(name: str) -> None:
    model = build_model(papers.find(name), 0)
    x = torch.rand(SAMPLES, 784)
    # Two states: a connection whose input is one and the same object on both sides is spared a product.
    s, moved = model.init_state(x), model.init_state(x)
    assert counted(lambda: model.contrast(x, moved, s)) == SAMPLES * work(papers.find(name)).contrast  # type: ignore[operator]


def test_an_iteration_adds_up() -> None:
    own = Work(drive=7, step=4, contrast=11, unrolled=2)
    experiment = papers.find("P-1h").override(T=30, K=10, batch=20)
    assert own.flops(experiment, "ep", 5) == 5 * 20 * (7 + 40 * 4 + 11)
    # T steps forward, K back; the gradient of the input's weights once, as much as the drive.
    assert own.flops(experiment, "bptt", 5) == 5 * 20 * (7 + 40 * 4 + 10 * 2 + 7)
    alternating = experiment.override(schedule="alternating")
    assert own.flops(alternating, "ep", 1) == 20 * (7 + 15 * 4 + 10 * 4 + 11)
    assert own.flops(alternating, "bptt", 1) == 20 * (7 + 10 * 4 + 20 * 4 + 10 * 2 + 7)


def test_the_floors_of_a_machine() -> None:
    experiment = papers.find("P-2h")
    peaks = {"float32_flops": 1e12, "half_flops": 9e12, "block_step_us": 0.1, "exchange_us": 0.4}
    found = floors(experiment, "ep", 5, peaks)
    assert found.arithmetic == pytest.approx(work(experiment).flops(experiment, "ep", 5) / 3e6)
    assert found.latency == pytest.approx(0.4 * 120)
    assert found.higher == max(found.arithmetic, 0.4 * 120)
    assert floors(papers.find("P-1h"), "ep", 5, peaks).latency == pytest.approx(
        0.1 * dependent_steps(papers.find("P-1h"))
    )
    cpu = floors(experiment, "ep", 1, {"float32_flops": 1e11, "exchange_us": None})
    assert cpu.latency is None
    assert cpu.higher == cpu.arithmetic == pytest.approx(work(experiment).flops(experiment, "ep", 1) / 1e5)

"""Controls of settling during training: off they change nothing, on they act, and a resumed run goes on with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_runs import SMALL, few_images, metrics, start_of_whole_and_cut, weights

import eqprop
from eqprop.data import Images
from eqprop.run import train
from eqprop.run.log import read_metrics
from eqprop.run.spec import Spec

ONE = SMALL.override(trials=1, estimators=("ep",), epochs=3, engine="eager")
EVERYTHING: dict[str, Any] = {"every": 3, "radius": 0.2, "longest": 40, "slower": True, "residual": 1e-7}


@pytest.fixture(scope="module")
def images() -> Images:
    return few_images()


def test_a_healthy_net_that_is_watched_keeps_every_bit(tmp_path: Path, images: Images) -> None:
    train(ONE, data=images, out=tmp_path / "alone")
    calm = {"every": 2, "radius": 5.0, "longest": 99, "slower": True, "residual": 1.0}
    train(ONE.override(keep_at_rest=calm), data=images, out=tmp_path / "watched")
    alone, lines = metrics(tmp_path / "alone"), metrics(tmp_path / "watched")
    assert alone == [{name: line[name] for name in alone[0]} for line in lines]
    one, other = (weights(tmp_path / name) for name in ("alone", "watched"))
    assert all(torch.equal(other[name], v) for name, v in one.items())
    assert all(0.0 < line["radius"] < 5.0 and line["T"] == ONE.phases.T for line in lines)


def test_controls_act_and_a_resumed_run_goes_on_with_them(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ONE.override(keep_at_rest=EVERYTHING)
    start_of_whole_and_cut(spec, tmp_path, monkeypatch, images)
    last = read_metrics(tmp_path / "whole")[-1]
    assert last["T"] > ONE.phases.T
    assert last["rate_factor"] < 1.0


def test_a_led_beta_is_chosen_anew_each_epoch(tmp_path: Path, images: Images) -> None:
    spec = ONE.override(beta="auto", epochs=2)
    assert spec.phases.beta_led
    train(spec, data=images, out=tmp_path / "whole")
    betas = [line["beta"] for line in read_metrics(tmp_path / "whole")]
    assert all(1e-5 < beta < 1.0 for beta in betas)
    assert weights(tmp_path / "whole")


def test_they_look_at_one_network_at_a_time() -> None:
    with pytest.raises(ValueError, match="one network at a time"):
        eqprop.bind(SMALL.override(trials=2, stacked=True, keep_at_rest={}), data=few_images())
    with pytest.raises(ValueError, match="radius"):
        Spec.of(keep_at_rest={"radius": -1.0})

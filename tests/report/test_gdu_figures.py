"""Figures of the GDU property from plain values, and the experiments they are made of."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from helpers.nets import batch, prototypical, toy
from matplotlib import image

from eqprop import SquaredError, gdu, papers
from eqprop.estimators.named import ESTIMATORS
from eqprop.report.figures import COLOURS, Panel, error_curves, save
from eqprop.report.gdu import processes, rmse_panels, rmse_single, shown_rmse, symbol
from eqprop.report.runs import Point
from eqprop.report.schematics import saw_teeth
from eqprop.run.laboratory import FORMAT, is_same

K = 6


@pytest.fixture(scope="module")
def compared() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Document and traces of a small net of each kind."""
    found = {}
    for name, model in (("toy", toy()), ("P-1h", prototypical(2, "sigmoid"))):
        x, y = batch(model)
        report = gdu.compare(model, SquaredError(), x, y, 300, K, 0.01)
        found[name] = ({"name": name, **report.to_dict()}, {"name": name, **report.traces_to_dict()})
    return found


def test_processes_draw_every_group_dashed_against_solid(compared: Any) -> None:
    figure = processes(*compared["toy"])
    panels = figure.axes
    assert [ax.get_title() for ax in panels] == [
        rf"$\Delta_{{{symbol(n)}}}^{{\rm EP}}$,  $-\nabla_{{{symbol(n)}}}^{{\rm BPTT}}$"
        for n in ("s0", "s1", "W01", "W0x", "W1x")
    ]
    trace = compared["toy"][1]["neurons"]["s1"]
    lines = panels[1].get_lines()
    solid, dashed = lines[0::2], lines[1::2]
    assert len(solid) == len(dashed) == 5
    for k, (bptt, ep) in enumerate(zip(solid, dashed, strict=True)):
        assert (bptt.is_dashed(), ep.is_dashed()) == (False, True)
        assert bptt.get_color() == ep.get_color() == COLOURS[k]
        assert list(bptt.get_ydata()) == trace["bptt"][k]
        assert list(ep.get_ydata()) == trace["ep"][k]


def bar_heights(ax: Any) -> list[float]:
    return [float(p.get_height()) for p in ax.patches]


def test_bars_are_the_rmse(compared: Any) -> None:
    found = compared["P-1h"][0]
    figure = rmse_single(found)
    expected = [m["rmse"] for kind in ("neurons", "synapses") for m in found[kind].values()]
    assert bar_heights(figure.axes[0]) == expected
    authors = copy.deepcopy(found)
    authors["convention"]["synapses_shown"] = "rmse_cumulative"
    assert shown_rmse(authors, "neurons", "s0") == found["neurons"]["s0"]["rmse"]
    assert shown_rmse(authors, "synapses", "W01") == found["synapses"]["W01"]["rmse_cumulative"]


def test_a_group_without_a_signal_is_not_drawn_as_a_match(compared: Any) -> None:
    found = copy.deepcopy(compared["P-1h"][0])
    found["synapses"]["W01"]["rmse"] = None
    texts = [text.get_text() for text in rmse_single(found).axes[0].texts]
    assert texts[list(found["neurons"]).__len__() + list(found["synapses"]).index("W01")] == "–"
    assert "0" not in texts


def test_files_are_a_picture_and_a_document(compared: Any) -> None:
    files = save(rmse_single(compared["toy"][0]))
    assert set(files) == {"png", "pdf"}
    assert files["pdf"].startswith(b"%PDF")
    assert b"/CreationDate" not in files["pdf"]
    pixels = image.imread(io.BytesIO(files["png"]))
    assert pixels.shape[0] > 400
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 2
    assert files == save(rmse_single(compared["toy"][0])), "equal figures are equal files"


def test_colours_can_be_told_apart_in_grey_and_by_the_colour_blind() -> None:
    okabe_ito = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
    assert set(COLOURS) <= okabe_ito
    assert len(set(COLOURS)) == len(COLOURS)


def test_curves_of_every_estimator_have_a_colour_or_a_mark_of_their_own() -> None:
    points = [Point(1, 5.0, None, 1), Point(2, 4.0, None, 1)]
    (ax,) = error_curves([Panel("all", {(name, "test"): points for name in ESTIMATORS}, {})]).axes
    assert len({(line.get_color(), line.get_marker()) for line in ax.get_lines()}) == len(ESTIMATORS)


def test_a_comparison_is_used_again_only_with_every_setting_the_same() -> None:
    spec = papers.find("toy", "gdu")
    base = {"spec": spec.to_dict(), "dtype": "float64", "drop_unsettled": False, "format": FORMAT}
    assert is_same(base, spec, torch.float64)
    for name, other in (("T", 1), ("beta", 0.5), ("seed", 9), ("init", "glorot"), ("batch", 20)):
        assert not is_same(base, spec.override(**{name: other}), torch.float64), name
    for name, other in (("format", 0), ("drop_unsettled", True)):
        assert not is_same({**base, name: other}, spec, torch.float64)
    assert not is_same(base, spec, torch.float32)


def test_panels_show_a_net_with_and_without_its_unsettled_samples(compared: Any) -> None:
    found = compared["P-1h"][0]
    nets = [{**found, "name": f"net {n}"} for n in range(6)]
    settled = copy.deepcopy({kind: found[kind] for kind in ("neurons", "synapses")})
    settled["neurons"]["s0"]["rmse"] = 0.123
    nets[5]["settled"] = settled
    figure = rmse_panels(nets)
    assert [ax.get_title().split(":")[0] for ax in figure.axes] == [n["name"] for n in nets]
    plain, both = bar_heights(figure.axes[0]), bar_heights(figure.axes[5])
    assert both[0::2] == plain
    assert both[1] == 0.123


def test_saw_teeth_draws_what_was_measured(compared: Any) -> None:
    figure = saw_teeth(compared["P-1h"][1], compared["toy"][1])
    _, saw, smooth, *_ = figure.axes
    teeth, leak = ([line.get_ydata() for line in ax.get_lines()] for ax in (saw, smooth))
    # BPTT of s0, on the prototypical net zero at every odd t; the leak of the energy-based one leaves no zero.
    assert not any(teeth[0][1::2])
    assert all(v > 0 for v in teeth[0][0::2])
    assert all(v > 0 for v in leak[0])

"""Sweeps over imperfections: axes as they are written, points that are trained once, errors and gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import eqprop
from eqprop.report.sweep import sweep_figure
from eqprop.run.sweep import values_of

TOML = """
[small]
model = { sizes = [3, 12, 8] }
phases = { T = 30, K = 8, beta = 0.2 }
estimator = "ep-symmetric"
optimizer = { kind = "SGD", rates = { "*" = 0.2 }, batch = 4, epochs = 1 }
"""


@pytest.fixture
def small(tmp_path: Path) -> dict[str, str]:
    """An experiment and its data."""
    g = np.random.default_rng(0)
    y = np.arange(48) % 3
    x = (g.random((48, 8)) + 0.5 * np.eye(8)[y]).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x[:36], y=y[:36], x_test=x[36:], y_test=y[36:])
    (tmp_path / "small.toml").write_text(TOML)
    return {"experiment": str(tmp_path / "small.toml"), "data": str(tmp_path / "data.npz")}


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("state_noise", "0:0.1:5", [0.0, 0.025, 0.05, 0.075, 0.1]),
        ("weight_bits", "4,6,none", [4, 6, None]),
        ("weight_bits", "2:6:3", [2, 4, 6]),
        ("missing", "0.5", [0.5]),
    ],
)
def test_axes_are_read(name: str, text: str, values: list[float | None]) -> None:
    assert values_of(name, text) == values


@pytest.mark.parametrize("text", ["0:0.1", "0:0.1:1", "a,b", "", "1,1", "0:1:2:3", "1.5,2"])
def test_axes_that_are_none_are_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"^weight_bits is .* expected FIRST:LAST:COUNT") as error:
        values_of("weight_bits", text)
    assert "\n" not in str(error.value)


def test_a_sweep_shows_what_noise_does(small: dict[str, str], tmp_path: Path) -> None:
    axes, out = {"state_noise": [0.0, 0.3], "weight_bits": [2, None]}, tmp_path / "out"
    found = eqprop.sweep(axes=axes, out=out, jobs=1, **small)
    points = {tuple(p["at"].values()): p for p in found["points"]}
    assert list(points) == [(0.0, 2), (0.0, None), (0.3, 2), (0.3, None)]
    alone = eqprop.train(small["experiment"], tmp_path / "alone", data=small["data"], engine="eager")
    assert points[0.0, None]["errors"] == [alone.test_error("ep-symmetric")]
    cosines = {at: p["cosines"][0]["all"] for at, p in points.items()}
    assert cosines[0.0, None] > 0.95
    assert cosines[0.0, 2] < cosines[0.0, None] - 0.01
    assert cosines[0.3, None] < 0.9
    assert set(points[0.0, 2]["cosines"][0]) == {"W01", "b0", "W12", "b1", "all"}
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}
    assert len(kept) == 4
    again = eqprop.sweep(axes=axes, out=out, jobs=1, **small)
    assert again["points"] == found["points"]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    for axes_shown in (axes, {"state_noise": [0.0, 0.3]}):
        shown = {**found, "axes": axes_shown, "points": found["points"][: 4 if len(axes_shown) == 2 else 2]}
        assert len(sweep_figure(shown).axes) == 2


@pytest.mark.slow
def test_points_are_trained_side_by_side(small: dict[str, str], tmp_path: Path) -> None:
    found = [
        eqprop.sweep(axes={"mismatch": [0.0, 0.2]}, out=tmp_path / str(jobs), jobs=jobs, **small) for jobs in (1, 2)
    ]
    errors, cosines = ([[p[key] for p in one["points"]] for one in found] for key in ("errors", "cosines"))
    assert errors[0] == errors[1]
    assert cosines[0] == cosines[1]

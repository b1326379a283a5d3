"""eqprop reproduce field: rows beside their yardsticks, a seed by itself, held-out epochs, the test set read once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.commands import Call

from eqprop import papers
from eqprop.report.field import field_cells, paired


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(monkeypatch, capsys)


@pytest.mark.slow
def test_a_row_is_trained_measured_and_set_beside_its_yardstick(call: Call, tmp_path: Path) -> None:
    rows = ("feedback-0-backprop", "feedback-0-asym-ep")
    words = ("--rows", ",".join(rows), "--seed", 1, "--epochs", 1, "--samples", 200, "--validation", 100)
    code, out, err = call("reproduce", "field", *words, "--out", tmp_path)
    assert code == 0, err
    assert "+0.00" in out
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in rows}
    checks = found[rows[1]]["checks"]["seed-1"]
    assert list(found[rows[1]]["checks"]) == ["seed-1"]
    assert min(checks["before"]["cosines"].values()) > 0.9999
    assert 0.0 < checks["test_error"] < 100.0  # of the whole test set; the epochs have that of what was held out
    assert checks["test_error"] != found[rows[1]]["estimators"]["asym-ep"]["trials"][0]["test_error"][-1]
    assert paired(found[rows[1]], found[rows[0]]) == [pytest.approx(0.0, abs=0.02)]
    cells = field_cells(papers.field_rows()[rows[1]], found)
    assert cells[1] == f"{checks['test_error']:.2f}"
    assert cells[5] == "1 of 3"
    known = checks["cpu_minutes"]
    code, _, err = call("reproduce", "field", *words, "--out", tmp_path, "--quiet")
    assert code == 0, err
    assert json.loads((tmp_path / f"{rows[1]}.json").read_text())["checks"]["seed-1"]["cpu_minutes"] == known


def test_what_is_not_trained_says_so_with_its_time() -> None:
    for row in papers.field_rows().values():
        cells = field_cells(row, {})
        assert cells[1] == "not trained yet"
        assert cells[-1] == f"about {row.minutes:g}"
        assert row.beside is None or row.beside in papers.field_rows()


def test_an_unknown_row_is_named(call: Call, tmp_path: Path) -> None:
    code, _, err = call("reproduce", "field", "--rows", "pc-2", "--out", tmp_path)
    assert code == 2
    assert "Did you mean 'pc-2h'" in err

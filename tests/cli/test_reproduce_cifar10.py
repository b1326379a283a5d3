"""eqprop reproduce cifar10 on generated images: pieces, seeds, the files of the rows, and the check against them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Call
from helpers.nets import pooled_net
from helpers.training_runs import assert_same_bits, write_cifar

from eqprop import papers
from eqprop.cli.rows import UNFINISHED
from eqprop.report.runs import published_cells
from eqprop.run.spec import Spec

TINY = papers.find("cifar10-small").override(
    samples=50, test_samples=40, output_bias=0.1, model=pooled_net((3, 32, 32), 8), T=4, K=2, batch=10, epochs=2
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cifar(tmp_path_factory.mktemp("cifar"), train=50)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The rows of the small net, smaller still."""
    every = papers.cifar_rows()
    rows = {row.name: row._replace(spec=_tiny(row)) for row in every.values() if row.name.startswith("small")}
    monkeypatch.setattr(papers, "cifar_rows", lambda: every | rows)
    return Call(monkeypatch, capsys)


def _tiny(row: papers.PublishedRow) -> Spec:
    return TINY.override(precision=row.spec.run.precision)


def published(out: Path, row: str) -> dict[str, Any]:
    return dict(json.loads((out / f"{row}.json").read_text()))


def test_a_row_goes_in_pieces_and_ends_as_if_it_had_not(call: Call, data: Path, tmp_path: Path) -> None:
    def words(out: str, rows: str) -> tuple[object, ...]:
        return "reproduce", "cifar10", "--rows", rows, "--data", data, "--threads", 1, "--out", tmp_path / out

    code, text, err = call(*words("pieces", "small,small-twin"), "--minutes", 1e-5)
    assert code == UNFINISHED, err
    assert "not trained yet" in text
    assert "minutes are over and everything is saved. The same command continues." in err
    pieces = 1
    while call(*words("pieces", "small"), "--seeds", 1, "--minutes", 5e-4, "--quiet")[0] == UNFINISHED:
        pieces += 1
    assert 1 < pieces < 50
    code, text, err = call(*words("whole", "small"), "--seeds", 1)
    assert code == 0, err
    assert "(1 of 1 seeds)" not in text
    assert_same_bits(tmp_path / "pieces/small/seed-0", tmp_path / "whole/small/seed-0", ("ep-symmetric",))
    found = published(tmp_path / "pieces", "small")
    (trial,) = found["estimators"]["ep-symmetric"]["trials"]
    assert (
        trial["test_error"]
        == published(tmp_path / "whole", "small")["estimators"]["ep-symmetric"]["trials"][0]["test_error"]
    )
    assert len(found["provenance"]) > 1, "a session per piece"


def test_seeds_are_added_and_a_row_that_is_short_says_so(call: Call, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("reproduce", "cifar10", "--out", out, "--data", data, "--threads", 1, "--quiet", "--rows")
    note = ("--note", "one thread, shared with other work")
    assert call(*words, "small-float16,small-twin", "--seeds", 1, *note)[0] == 0
    assert call(*words, "small-twin", "--seeds", 2)[0] == 0
    found = published(out, "small-twin")
    own = found["estimators"]["backprop"]
    assert [trial["seed"] for trial in own["trials"]] == [0, 1]
    errors = [trial["test_error"][-1] for trial in own["trials"]]
    assert own["test_error_mean"] == pytest.approx(sum(errors) / 2)
    assert found["note"] == note[1], "kept by a later piece"
    assert found["settings"] == {"samples": 50, "test_samples": 40, "validation": 0}
    for one in found["provenance"]:
        assert one["provenance"]["commit"]
        assert "/" not in one["provenance"]["command"]
    row = papers.cifar_rows()["small-twin"]
    cells = published_cells(row, found)
    assert "(2 of 3 seeds)" in cells[1]
    assert cells[4].endswith("s, busy")
    assert published_cells(row, None)[1] == "not trained yet"
    short = {**found, "epochs": 9}
    assert published_cells(row, short)[3] == "2 of 9"
    assert published_cells(row, short)[5] == "–", "no run is whole"
    guard = published(out, "small-float16")["estimators"]["ep-symmetric"]["trials"][0]["cosines_with_float32"]
    assert len(guard) == 2
    assert all(0.9 < value <= 1.0001 for epoch in guard for value in epoch.values())
    assert "cosines_with_float32" not in own["trials"][0]


def test_a_published_seed_is_trained_anew(call: Call, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    common = ("--data", data, "--threads", 1, "--quiet")
    code, _, err = call("reproduce", "cifar10", "--out", out, "--rows", "small,small-bptt", "--seeds", 1, *common)
    assert code == 0, err
    check = ("reproduce", "cifar10", "--check", out, *common)
    code, text, err = call(*check)
    assert code == 2
    assert "one seed has no spread to lie within" in err
    assert text == "", "nothing is trained"
    assert call("reproduce", "cifar10", "--out", out, "--rows", "small", "--seeds", 2, *common)[0] == 0
    code, text, err = call(*check)
    assert code == 0, err
    assert "Yes: " in text
    code, _, err = call(*check, "--rows", "small-bptt")
    assert code == 2
    assert "bptt, seed 0 is the only finished seed" in err
    unfinished = published(out, "small") | {"row": "fast", "epochs": 9}
    (out / "fast.json").write_text(json.dumps(unfinished))
    assert "small.json" in call(*check)[1], "no seed of fast has ended"
    (out / "fast.json").write_text(json.dumps(unfinished | {"epochs": 2}))
    assert "fast.json" in call(*check)[1], "comes first"
    (out / "fast.json").unlink()
    other = write_cifar(tmp_path / "other", train=50, seed=1)
    code, _, err = call("reproduce", "cifar10", "--check", out, "--data", other, "--quiet")
    assert code == 2
    assert "small.json was trained on other data: its sha256 is" in err
    found = published(out, "small")
    for trial in found["estimators"]["ep-symmetric"]["trials"]:
        trial["test_error"][-1] = 0.0
    (out / "small.json").write_text(json.dumps(found))
    code, text, _ = call(*check)
    assert code == 1
    assert "No: " in text

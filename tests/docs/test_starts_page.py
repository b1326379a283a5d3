"""docs/starts.md says what results/beyond holds, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from helpers.pages import page_maker


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return page_maker("make_starts_page")


def test_the_page_is_what_the_results_say(maker: ModuleType) -> None:
    maker.write_or_check(maker.PAGE, maker.BLOCKS, check=True)
    page = maker.PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- begin {name} -->\n|" in page for name in maker.BLOCKS)


def test_runs_compared_for_their_start_differ_in_nothing_else(maker: ModuleType) -> None:
    first, *others = [maker.documents("initialised-ep-*.json")[0], *maker.documents("start-*.json")]
    assert len(others) >= 2
    for other in others:
        differing = {name for name, value in first["experiment"].items() if other["experiment"][name] != value}
        assert differing <= {"start", "T", "epochs", "evaluation_T"}
        assert other["data"]["sha256"] == first["data"]["sha256"]


def test_results_carry_no_path_of_a_machine(maker: ModuleType) -> None:
    for name in ("initialised-ep-*", "scellier-bengio-2017-*", "start-*", "literal-*"):
        for document in maker.documents(f"{name}.json"):
            assert document["provenance"][0]["provenance"]["commit"]
            assert all("/" not in session["provenance"]["command"] for session in document["provenance"])


def test_a_run_is_collected_as_one_file(maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.training_runs import SMALL, few_images

    from eqprop.training import train

    train(SMALL, tmp_path / "small", data=few_images(100, 50), epochs=2)
    monkeypatch.setattr(maker, "BEYOND", tmp_path)
    maker.collect([str(tmp_path / "small")])
    found = json.loads((tmp_path / "small.json").read_text())
    assert [line["epoch"] for line in found["epochs"]] == [1, 2]
    assert found["experiment"]["name"] == "small"

"""docs/tune.md says what results/tune says, and the experiment it is about is one that train takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from helpers.pages import page_maker

from eqprop.experiments.io import find_experiment

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tune.md"
RESULTS = ROOT / "results" / "tune"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return page_maker("make_tune_page")


def test_the_page_is_what_the_results_say(maker: ModuleType) -> None:
    maker.write_or_check(maker.PAGE, maker.BLOCKS, check=True)


def test_the_published_record_is_the_one_decided_and_trained() -> None:
    document = json.loads((RESULTS / "p-1h.json").read_text(encoding="utf-8"))
    experiment = find_experiment(RESULTS / "p-1h.toml")
    for decision in document["decisions"]:
        assert getattr(experiment, decision["name"]) == decision["value"]
    for name in ("p-1h.json", "p-1h-trained.json", "p-1h-search.json"):
        provenance = json.loads((RESULTS / name).read_text(encoding="utf-8"))["provenance"]
        assert provenance["commit"]
        assert not provenance["commit"].endswith("-dirty")
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / picture).resolve().is_file()

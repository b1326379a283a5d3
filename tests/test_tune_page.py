"""docs/tune.md says what results/tune says, and the record it is about is one that train takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from pages import page_maker

from eqprop.experiments.plain import find_record

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tune.md"
RESULTS = ROOT / "results" / "tune"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return page_maker("make_tune_page")


def test_the_page_is_what_the_results_say(maker: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert maker.filled(page) == page
    assert set(re.findall(r"<!-- (?!end)([a-z ]+) -->", page)) == set(maker.BLOCKS)


def test_a_block_that_nobody_fills_is_noticed(maker: ModuleType) -> None:
    with pytest.raises(ValueError, match="has a block 'no such block'"):
        maker.filled("<!-- no such block -->\n<!-- end -->")


def test_the_published_record_is_the_one_decided_and_trained() -> None:
    document = json.loads((RESULTS / "p-1h.json").read_text(encoding="utf-8"))
    record = find_record(RESULTS / "p-1h.toml")
    for decision in document["decisions"]:
        assert getattr(record, decision["name"]) == decision["value"]
    for name in ("p-1h.json", "p-1h-trained.json", "p-1h-search.json"):
        provenance = json.loads((RESULTS / name).read_text(encoding="utf-8"))["provenance"]
        assert provenance["commit"]
        assert not provenance["commit"].endswith("-dirty")
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / picture).resolve().is_file()

"""docs/beyond.md says what results/beyond and results/gdu/inside say, and they say what is claimed."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from helpers.pages import page_maker

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "beyond.md"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return page_maker("make_beyond_page")


def test_the_page_is_what_the_results_say(maker: ModuleType) -> None:
    maker.write_or_check(maker.PAGE, maker.BLOCKS, check=True)


def test_every_picture_is_there() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(pictures) == 2
    for picture in pictures:
        path = (PAGE.parent / picture).resolve()
        assert path.is_file()
        assert path.with_suffix(".pdf").is_file()


def test_inside_the_error_goes_with_beta_and_outside_it_stays(maker: ModuleType) -> None:
    for net in maker.NETS:
        inside, outside = (
            [maker.synapses(maker.compared(net, nudge, beta)) for beta in maker.BETAS]
            for nudge in ("inside", "outside")
        )
        assert inside[1] / inside[2] == pytest.approx(10.0, rel=0.3)
        assert outside[2] / outside[3] == pytest.approx(1.0, rel=0.1)
        assert maker.compared(net, "inside", maker.BETAS[-1])["budget"]["parts"]["synapses"]["output_slope"] == 0.0


def test_runs_differ_in_nothing_but_what_they_say(maker: ModuleType) -> None:
    outside, inside, bptt = maker.trained()
    assert {tuple(d["changes_from_paper"]) for d in inside.documents} == {("nudge inside instead of outside",)}
    new = [d for d in (*outside.documents, *inside.documents, *bptt.documents) if "experiment" in d]
    assert len({d["data"]["sha256"] for d in new}) == 1
    for name in ("T", "K", "beta", "learning_rates", "batch", "init", "optimizer"):
        assert all(d["experiment"][name] == new[0]["experiment"][name] for d in new)
    assert {t["seed"] for t in inside.trials} <= {t["seed"] for t in outside.trials}

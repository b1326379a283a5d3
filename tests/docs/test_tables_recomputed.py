"""Tables 1 of the README and the pages, recomputed from results/table1 by nothing of the package: json and statistics.

The paper's numbers stand here once more, as printed; a cell is bold if this file finds it reproduced, and only then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRINTED = {
    "EB-1h": ((2.06, 0.17, 0.13), (2.11, 0.09, 0.46), 100, 12, 30),
    "EB-2h": ((2.01, 0.21, 0.11), (2.02, 0.12, 0.29), 500, 40, 50),
    "P-1h": ((2.00, 0.13, 0.20), (2.00, 0.12, 0.55), 30, 10, 30),
    "P-2h": ((1.95, 0.10, 0.14), (2.09, 0.12, 0.37), 100, 20, 50),
    "P-3h": ((2.01, 0.18, 0.10), (2.30, 0.17, 0.32), 180, 20, 100),
    "P-conv": ((1.02, 0.04, 0.54), (0.88, 0.06, 0.12), 200, 10, 40),
}
"""Test error, deviation and train error by EP and by BPTT, then T, K and epochs."""
CHANGED = {("EB-1h", "tuned"): (200, 24), ("P-conv", "tuned"): (400, 10)}
"""T and K where a preset of the tables has others than the paper."""
SHOWN = re.compile(r"(\*\*)?(\d+\.\d\d) ± (\d+\.\d\d)(?: \((\d+\.\d\d)\))?(?:\*\*)?(†)?(?:, epoch (\d+) of (\d+))?")


class Cell(NamedTuple):
    """What a table says of one network by one estimator."""

    bold: bool
    test: str
    deviation: str
    train: str | None
    marked: bool
    stopped: tuple[int, int] | None


def shown(text: str) -> Cell:
    found = SHOWN.fullmatch(text)
    assert found, text
    bold, test, deviation, train, mark, epoch, whole = found.groups()
    return Cell(bool(bold), test, deviation, train, bool(mark), (int(epoch), int(whole)) if epoch else None)


def recomputed(trials: list[dict[str, Any]], printed: tuple[float, float, float], epochs: int) -> Cell:
    last, train = [t["test_error"][-1] for t in trials], [t["train_error"][-1] for t in trials]
    trained = min(len(t["test_error"]) for t in trials)
    test, deviation, paper_train = printed
    inside = test - 2 * deviation - 1e-9 <= mean(last) <= test + 2 * deviation + 1e-9
    return Cell(
        bold=inside and trained == epochs and len(trials) == 5,
        test=f"{mean(last):.2f}",
        deviation=f"{stdev(last):.2f}",
        train=f"{mean(train):.2f}",
        marked=abs(mean(train) - paper_train) > 3 * stdev(train),
        stopped=(trained, epochs) if trained < epochs else None,
    )


def lines(page: str, block: str) -> Iterator[list[str]]:
    """The rows of the first table of a block, without its heads."""
    text = (ROOT / page).read_text(encoding="utf-8")
    inside = text.split(f"<!-- begin {block} -->\n")[1].split(f"<!-- end {block} -->")[0]
    rows = [line for line in inside.split("\n\n")[0].strip().splitlines() if line.startswith("|")]
    for row in rows[2:]:
        yield [cell.strip() for cell in row.strip().strip("|").split("|")]


def stored(name: str, preset: str, schedule: str) -> dict[str, Any]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "results/table1").glob("*/*.json")]
    (row,) = (d for d in found if (d["name"], d["preset"], d["schedule"]) == (name, preset, schedule))
    return dict(row["estimators"])


TABLES = [("README.md", "summary"), ("docs/table1.md", "full"), ("docs/table1.md", "printed")]


@pytest.mark.parametrize(("page", "block"), TABLES)
def test_a_table_of_both_estimators_is_what_results_say(page: str, block: str) -> None:
    found = list(lines(page, block))
    assert [row[0] for row in found] == list(PRINTED)
    for name, preset, schedule, T, K, ep, paper_ep, bptt, paper_bptt, *_ in found:
        preset = preset.strip("`")
        printed_ep, printed_bptt, *printed_steps, epochs = PRINTED[name]
        assert (int(T), int(K)) == CHANGED.get((name, preset), tuple(printed_steps))
        trials = stored(name, preset, schedule)
        own = zip((ep, bptt), (paper_ep, paper_bptt), (printed_ep, printed_bptt), ("ep", "bptt"), strict=True)
        for text, beside, printed, estimator in own:
            whole = recomputed(trials[estimator]["trials"], printed, epochs)
            short = whole._replace(train=None, marked=False)
            assert shown(text) == (short if block == "summary" else whole), (name, estimator)
            train = "" if block == "summary" else f" ({printed[2]:.2f})"
            assert beside == f"{printed[0]:.2f} ± {printed[1]:.2f}{train}"


def test_the_table_of_all_presets_is_what_results_say() -> None:
    found = list(lines("docs/table1-notes.md", "results"))
    assert len(found) == len(list((ROOT / "results/table1").glob("*/*.json")))
    for name, label, *cells in found:
        preset, _, schedule = label.partition(", ")
        alternating = schedule or ("alternating" if (name, preset) in ALTERNATING else "synchronous")
        trials = stored(name, preset.strip("`"), alternating)
        for text, printed, estimator in zip(cells, PRINTED[name][:2], ("ep", "bptt"), strict=True):
            if text == "–":
                assert not any(t["test_error"] for t in trials.get(estimator, {"trials": []})["trials"])
            else:
                assert shown(text) == recomputed(trials[estimator]["trials"], printed, PRINTED[name][-1]), (name, label)


ALTERNATING = {("P-2h", "`tuned`"), ("P-3h", "`tuned`"), ("P-conv", "`tuned`")}
"""Presets that have alternating steps."""


def test_train_errors_that_differ_are_named_below_the_table() -> None:
    text = (ROOT / "docs/table1.md").read_text(encoding="utf-8")
    below = next(line for line in text.splitlines() if line.startswith("† Train errors"))
    named = set(re.findall(r"([\w-]+) by (\w+) (\d\.\d\d) ± (\d\.\d\d) \(paper (\d\.\d\d)\)", below))
    expected = set()
    for name, preset, schedule, *_ in lines("docs/table1.md", "full"):
        for estimator, printed in zip(("ep", "bptt"), PRINTED[name][:2], strict=True):
            train = [t["train_error"][-1] for t in stored(name, preset.strip("`"), schedule)[estimator]["trials"]]
            if abs(mean(train) - printed[2]) > 3 * stdev(train):
                numbers = (f"{number:.2f}" for number in (mean(train), stdev(train), printed[2]))
                expected.add((name, estimator.upper(), *numbers))
    assert named == expected


def test_one_start_and_batch_for_both_estimators_of_a_row() -> None:
    for name, preset, schedule, *_ in lines("docs/table1.md", "full"):
        trials = stored(name, preset.strip("`"), schedule)
        seeds = [[t["seed"] for t in trials[estimator]["trials"]] for estimator in ("ep", "bptt")]
        assert seeds == [[0, 1, 2, 3, 4]] * 2

"""The zoo: every experiment with its source, the paper's result, ours, time, hardware and command."""

from __future__ import annotations

from docs.build import table1
from docs.build.text import duration, table
from eqprop.experiments.experiment import Experiment, PaperResult, label
from eqprop.experiments.paper import BEYOND, PAPER

BEYOND_HEADINGS = ("experiment", "T, K, beta", "estimator", "paper", "command")
INTRODUCTION = """# Zoo

Every experiment that comes with the package: what the paper reports, what came out here, how long it took and on what,
and the command that trains it. Test errors in percent, mean and deviation of five trials. A dash means that a number is
not known. All of it is read from the files under `results/`, which hold seeds, versions and commits.
"""


def page() -> str:
    rows = [row for name in PAPER for row in _trained(name)]
    headings = ("experiment", "preset", "estimator", "ours", "paper", "time", "hardware", "command")
    parts = [INTRODUCTION, "## Table 1 of the paper\n", table(headings, rows, words=8)]
    parts += ["\n## Beyond the paper\n", table(BEYOND_HEADINGS, _beyond(), words=5)]
    return "\n".join(parts) + "\n"


def _trained(name: str) -> list[list[str]]:
    rows = []
    for row in table1.rows():
        if row.experiment.name != name or not row.own_schedule:
            continue
        for estimator in table1.ESTIMATORS:
            found = row.result(estimator)
            if found is None:
                continue
            preset = row.experiment.preset
            rows.append(
                [
                    name,
                    f"`{preset}`",
                    label(estimator),
                    _error(found["test_error_mean"], found["test_error_std"]),
                    _paper(row.experiment.paper_results.get(estimator)),
                    duration(row.seconds(estimator)),
                    row.found["provenance"][0]["provenance"]["device"],
                    f"`eqprop train {name} --preset {preset} --estimator {estimator} --trials 5`",
                ]
            )
    return rows


def _beyond() -> list[list[str]]:
    return [
        [name, _phases(e), f"`{e.estimator}`", _paper(e.paper_results.get(e.estimator)), f"`eqprop train {name}`"]
        for name, e in BEYOND.items()
    ]


def _phases(e: Experiment) -> str:
    return f"{e.T}, {e.K}, {e.beta:g}"


def _paper(result: PaperResult | None) -> str:
    return "–" if result is None else _error(result.test, result.test_std)


def _error(mean: float, deviation: float | None) -> str:
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"

"""Table 1, ours beside the paper's, as rows, CSV and LaTeX  [table-results]."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Literal

from eqprop.experiments.record import Reported
from eqprop.report.collect import Point, Run

Verdict = Literal["yes", "no", "unfinished", "other settings", "none"]
WITHIN = 2.0
"""A row counts as reproduced within so many of the paper's standard deviations of the paper's mean, or better."""
USUAL_STD = 0.1
"""The deviation taken for a published error that has none: the paper's own rows have 0.04 to 0.21."""


@dataclass(frozen=True)
class Row:
    """One run and one method: what came out, and what the paper has."""

    run: Run
    method: str
    test: Point | None
    train: Point | None
    reported: Reported | None
    diverged: int

    @property
    def verdict(self) -> Verdict:
        """Whether the paper's number was reached, by full training under a preset as it is."""
        if self.reported is None:
            return "none"
        record = self.run.record
        if self.test is None or self.test.epoch < record.epochs:
            return "unfinished"
        if self.run.settings.validation or self.run.settings.samples or _deviates(self.run):
            return "other settings"
        deviation = USUAL_STD if self.reported.test_std is None else self.reported.test_std
        return "yes" if self.test.mean <= self.reported.test + WITHIN * deviation else "no"


def _deviates(run: Run) -> bool:
    """Whether a setting was changed beyond what its preset names."""
    from eqprop.experiments.training_records import RECORDS

    preset = RECORDS.get(run.record.preset, {}).get(run.record.name)
    return preset is None or bool(run.record.changes(preset))


def rows(runs: list[Run]) -> list[Row]:
    return [
        Row(
            run,
            method,
            run.last(method, "test"),
            run.last(method, "train"),
            run.reported.get(method),
            len({line["trial"] for line in run.diverged(method)}),
        )
        for run in runs
        for method in run.settings.methods
    ]


HEADINGS = (
    "name",
    "preset",
    "method",
    "estimator",
    "test_error_mean",
    "test_error_std",
    "train_error_mean",
    "trials",
    "diverged",
    "epoch",
    "epochs",
    "paper_test_error_mean",
    "paper_test_error_std",
    "paper_train_error_mean",
    "reproduced",
    "T",
    "K",
    "beta",
    "schedule",
    "changes_from_paper",
)


def to_csv(table: list[Row]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADINGS)
    for row in table:
        record, test, train, paper = row.run.record, row.test, row.train, row.reported
        writer.writerow(
            [
                record.name,
                record.preset,
                row.method,
                record.estimator if row.method == "ep" else "",
                *(["", ""] if test is None else [test.mean, "" if test.std is None else test.std]),
                "" if train is None else train.mean,
                0 if test is None else test.trials,
                row.diverged,
                0 if test is None else test.epoch,
                record.epochs,
                *(["", "", ""] if paper is None else [_or_empty(v) for v in (paper.test, paper.test_std, paper.train)]),
                row.verdict,
                record.T,
                record.K,
                record.beta,
                record.schedule,
                "; ".join(row.run.changes),
            ]
        )
    return out.getvalue()


def to_latex(table: list[Row]) -> str:
    """A table in the form of the paper's: test mean and deviation, train error in parentheses."""
    lines = [
        r"\begin{tabular}{@{}llccccccc@{}} \toprule",
        r"& & \multicolumn{2}{c}{ours (error \%)} & \multicolumn{2}{c}{paper (error \%)} & $T$ & $K$ & Epochs \\",
        r"\cmidrule(r){3-4}\cmidrule(r){5-6}",
        r"& & Test & Train & Test & Train & & & \\ \midrule",
    ]
    for row in table:
        record, paper = row.run.record, row.reported
        cells = [
            _escape(f"{record.name} ({record.preset})"),
            _escape(record.label(row.method)),
            _spread(row.test),
            "--" if row.train is None else f"$({row.train.mean:.2f})$",
            "--" if paper is None else _number(paper.test, paper.test_std),
            "--" if paper is None or paper.train is None else f"$({paper.train:.2f})$",
            str(record.T),
            str(record.K),
            str(row.test.epoch if row.test else 0),
        ]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _spread(point: Point | None) -> str:
    if point is None:
        return "--"
    return _number(point.mean, point.std)


def _number(mean: float, std: float | None) -> str:
    return f"${mean:.2f}$" if std is None else rf"${mean:.2f} \pm {std:.2f}$"


def _or_empty(value: float | None) -> float | str:
    return "" if value is None else value


def _escape(text: str) -> str:
    return "".join(f"\\{c}" if c in "#$%&_{}" else c for c in text)

"""Parts of the page about a run: what changed between epochs, what its curves show, how it differs from other runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from eqprop.estimators.named import label
from eqprop.report.runs import KINDS, Point, RunFolder
from eqprop.run.log import Line
from eqprop.run.spec import SECTIONS

MOST_EPOCHS = 12
"""Epochs in the table of what changed; of more, the first, the best, the last and some between."""
MEASURED = {
    "train_error": ("train error, %", ".2f"),
    "loss": ("loss", ".4g"),
    "residual_mean": ("residual", ".1e"),
    "unsettled": ("not settled, %", ".3g"),
    "seconds": ("time, s", ".1f"),
}
"""Fields of the metrics beside the test error: their headings and how their numbers are written."""
CHANGED_ON_THE_WAY = {name: (name, ".3g") for name in ("T", "beta", "radius")} | {"rate_factor": ("rates ×", ".3g")}
"""The same of fields that only runs which are kept at rest have."""


class EpochRow(NamedTuple):
    """One epoch: whether its test error is the lowest, and the cells under the headings of the table."""

    epoch: int
    best: bool
    cells: list[str]


class EpochTable(NamedTuple):
    """What changed between epochs."""

    headings: list[str]
    rows: list[EpochRow]


def epochs_table(run: RunFolder, estimator: str) -> EpochTable:
    """Errors, loss and settling of some epochs, means over trials, each error with its change since the row above."""
    lines = [line for line in run.lines if line["estimator"] == estimator and not line["diverged"]]
    by_epoch: dict[int, list[Line]] = {}
    for line in lines:
        by_epoch.setdefault(line["epoch"], []).append(line)
    measured = {e: m for e, own in by_epoch.items() if (m := _mean(own, "test_error")) is not None}
    best = min(measured, key=measured.__getitem__) if measured else None
    fields = MEASURED | {n: about for n, about in CHANGED_ON_THE_WAY.items() if any(n in line for line in lines)}
    rows, before = [], None
    for epoch in _some(sorted(by_epoch), best):
        test, own = measured.get(epoch), by_epoch[epoch]
        change = "" if test is None or before is None else f"{test - before:+.2f}".replace("-", "−")
        cells = [_number(_mean(own, name), form, name) for name, (_, form) in fields.items()]
        rows.append(EpochRow(epoch, epoch == best and len(by_epoch) > 1, [_number(test, ".2f"), change, *cells]))
        before = test if test is not None else before
    return EpochTable(["test error, %", "change", *(heading for heading, _ in fields.values())], rows)


def _some(epochs: Sequence[int], best: int | None) -> list[int]:
    """The first and the last, the best, and epochs between them at even distances."""
    if len(epochs) <= MOST_EPOCHS:
        return list(epochs)
    places = [round(n * (len(epochs) - 1) / (MOST_EPOCHS - 2)) for n in range(MOST_EPOCHS - 1)]
    return sorted({*(epochs[n] for n in places), *([] if best is None else [best])})


def _mean(lines: Sequence[Line], name: str) -> float | None:
    found = [float(line[name]) for line in lines if isinstance(line.get(name), int | float)]
    return fmean(found) if found else None


def _number(value: float | None, form: str, name: str = "") -> str:
    """Shares are written in percent."""
    return "–" if value is None else f"{100.0 * value if name == 'unsettled' else value:{form}}"


def what_is_seen(run: RunFolder) -> str:
    """A sentence per estimator about its curves: where the test error begins, its lowest, its end."""
    said = []
    for estimator in run.spec.estimators:
        curve = run.curve(estimator, "test")
        if not curve:
            continue
        lowest = min(curve, key=lambda p: p.mean)
        text = f"{label(estimator)}: {_course(curve)}"
        if lowest.epoch not in (curve[0].epoch, curve[-1].epoch):
            text += f", lowest at epoch {lowest.epoch} ({lowest.mean:.2f} %)"
        train = run.curve(estimator, "train")
        said.append(text + (f"; train error {train[-1].mean:.2f} %" if train else ""))
    return ". ".join(said) + "." if said else ""


def _course(curve: Sequence[Point]) -> str:
    """Where a curve of test errors begins and ends, in words."""
    first, last = curve[0], curve[-1]
    if first is last:
        return f"test error {last.mean:.2f} % after epoch {last.epoch}"
    word = "falls" if last.mean < first.mean else "rises" if last.mean > first.mean else "stays"
    return f"test error {word} from {first.mean:.2f} % to {last.mean:.2f} % at epoch {last.epoch}"


class ComparedRow(NamedTuple):
    """A line of the runs side by side: a value per run, and the place of the best if one is."""

    name: str
    values: list[str]
    best: int | None = None


def compared(runs: Sequence[RunFolder]) -> list[ComparedRow]:
    """Several runs side by side: the errors of each at its end, and every setting in which they differ."""
    if len(runs) < 2:
        return []
    rows = [ComparedRow("network", [run.title for run in runs])]
    for estimator in dict.fromkeys(name for run in runs for name in run.spec.estimators):
        for kind in KINDS:
            ends = [run.last(estimator, kind) for run in runs]
            if any(ends):
                numbers = [math.inf if end is None else end.mean for end in ends]
                several = kind == "test" and sum(end is not None for end in ends) > 1
                best = numbers.index(min(numbers)) if several else None
                values = ["–" if end is None else str(end) for end in ends]
                rows.append(ComparedRow(f"{label(estimator)} {kind} error, %", values, best))
    return rows + [ComparedRow(name, values) for name, values in differing(runs)]


def differing(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs, with the value of each run; the data is one of them."""
    settings = [_flat(run) for run in runs]
    names = dict.fromkeys(name for own in settings for name in own)
    rows = [(name, [own.get(name, "–") for own in settings]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _flat(run: RunFolder) -> dict[str, str]:
    """Every setting of a run and its data as words, by name."""
    found = {"preset": run.spec.preset, "data": run.data} | settings_of(run)
    found.pop("run: estimators", None)
    found["estimators"] = ", ".join(run.spec.estimators)
    return {name: in_words(value) for name, value in found.items()}


def settings_of(run: RunFolder) -> dict[str, object]:
    """The settings of a run by section and name."""
    content = run.spec.to_dict()
    return {f"{section}: {k}": v for section in SECTIONS for k, v in content[section].items() if v is not None}


def in_words(value: object) -> str:
    """A value in words: tables and lists without brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

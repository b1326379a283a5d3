"""Reads the runs below a folder, and makes Table 1 from them as rows, CSV and LaTeX  [table-results]."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from eqprop import papers
from eqprop.data.cifar import CIFAR10
from eqprop.data.images import MNIST_DIGEST
from eqprop.estimators.named import BACKPROP, label
from eqprop.files import read_bytes
from eqprop.models.readout import OWN_COST
from eqprop.run.dataset import TARGETS, data_name
from eqprop.run.description import Description, read_description
from eqprop.run.folder import EXPERIMENT, sessions
from eqprop.run.log import Line, read_metrics
from eqprop.run.metrics import deviation, mean
from eqprop.run.published import PaperResult, reproduces
from eqprop.run.spec import Spec
from eqprop.run.watch import duration

KINDS = {"test": "test_error", "train": "train_error"}
"""Kind of curve -> field of the metrics."""


@dataclass(frozen=True)
class Point:
    """One epoch of a curve: mean over trials, standard deviation (ddof 1; None for one trial), number of trials."""

    epoch: int
    mean: float
    std: float | None
    trials: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")


@dataclass(frozen=True)
class RunFolder:
    """The content of a run folder."""

    folder: Path
    described: Description
    lines: list[Line]
    sessions: list[dict[str, Any]]

    @property
    def spec(self) -> Spec:
        return self.described.spec

    @property
    def title(self) -> str:
        """The experiment and its preset; what it does otherwise, and the data if it is not MNIST."""
        other = [] if is_paper_data(self.described.data, self.spec) else [self.data]
        return f"{self.spec.name} ({', '.join([*self._kind(), *other])})"

    @property
    def heading(self) -> str:
        """The title with the data, whatever it is."""
        return f"{self.spec.name} ({', '.join(self._kind())}) on {self.data}"

    def _kind(self) -> list[str]:
        """The preset, and what it does otherwise in a word."""
        spec = self.spec
        said: list[str] = [spec.preset]
        said += [] if spec.phases.schedule == "synchronous" else [spec.phases.schedule]
        said += [] if spec.model.nudge_site == "outside" else [f"nudge {spec.model.nudge_site}"]
        cost = "own cost" if spec.cost.kind == OWN_COST else spec.cost.kind
        said += [] if cost == "squared-error" else [cost]
        preset = _preset_of(spec)
        named = ("schedule", "nudge_site", "cost")
        said += ["changed"] if preset and any(c.field not in named for c in spec.changes(preset)) else []
        return said

    @property
    def data(self) -> str:
        """What the data is called."""
        return data_name(self.described.data)

    @property
    def model(self) -> str:
        return str(self.spec.model)

    @property
    def paper_results(self) -> dict[str, PaperResult]:
        """What the paper reports for this run, by estimator; nothing unless it is the paper's in everything."""
        printed = papers.printed(self.spec)
        return {} if printed is None or not self.is_papers else printed.results

    @property
    def is_papers(self) -> bool:
        return is_papers(self.spec, self.described.data)

    @property
    def changes(self) -> list[str]:
        """Everything that is not as printed: settings, data, number of samples."""
        cut, data = self.spec.data, self.described.data
        found = list(self.described.changes)
        if papers.printed(self.spec) is not None and not is_paper_data(data, self.spec):
            found.append(f"data {self.data} instead of {published_set(self.spec).name}")
        if self.described.earlier_epochs:
            found.append(f"epochs raised on resume from {', '.join(map(str, self.described.earlier_epochs))}")
        if data.get(TARGETS):
            found.append("errors are the share of the targets' variance that is not explained")
        if cut.validation:
            found.append(f"tested on {cut.validation} held-out training samples")
        trained, tested = data.get("training_samples"), data.get("test_samples")
        if cut.samples or trained != published_set(self.spec).samples - cut.validation:
            found.append(f"trained on {trained} samples")
        if tested != papers.TEST_SAMPLES and not cut.validation:
            found.append(f"tested on {tested} samples")
        return found

    def curve(self, estimator: str, kind: str) -> list[Point]:
        """Mean and deviation per epoch, over the trials that did not diverge."""
        lost = {line["trial"] for line in self.lines if line["estimator"] == estimator and line["diverged"]}
        epochs: dict[int, list[float]] = {}
        for line in self.lines:
            if line["estimator"] == estimator and line["trial"] not in lost and line[KINDS[kind]] is not None:
                epochs.setdefault(line["epoch"], []).append(line[KINDS[kind]])
        return [Point(e, _mean(values), deviation(values), len(values)) for e, values in sorted(epochs.items())]

    def last(self, estimator: str, kind: str) -> Point | None:
        curve = self.curve(estimator, kind)
        return curve[-1] if curve else None

    def diverged(self, estimator: str) -> list[Line]:
        return [line for line in self.lines if line["estimator"] == estimator and line["diverged"]]

    def seconds(self, estimator: str) -> float:
        """Wall time: stacked trials share it, sequential trials add up."""
        own = [line for line in self.lines if line["estimator"] == estimator]
        by_trial = [sum(line["seconds"] for line in own if line["trial"] == t) for t in {x["trial"] for x in own}]
        return max(by_trial, default=0.0) if self.spec.run.stacked else sum(by_trial)


def is_papers(spec: Spec, data: Mapping[str, Any]) -> bool:
    """Whether data, architecture, sample counts, epochs and settings are exactly those of one of the paper's presets.

    `data` is described as in experiment.json. Only then does a paper's number stand beside a run.
    """
    samples = published_set(spec).samples
    whole = (data.get("training_samples"), data.get("test_samples")) == (samples, papers.TEST_SAMPLES)
    part = spec.data.validation or spec.data.samples not in (None, samples)
    preset = _preset_of(spec)
    same = is_paper_data(data, spec)
    return same and whole and not part and preset is not None and not spec.changes(preset)


class PublishedSet(NamedTuple):
    """A data set of the papers: its name here, its checksum and its training samples."""

    name: str
    sha256: str
    samples: int


def published_set(spec: Spec) -> PublishedSet:
    """The data set an experiment is for."""
    if spec.data.set == CIFAR10.name:
        return PublishedSet(CIFAR10.name, CIFAR10.sha256, papers.CIFAR_SAMPLES)
    return PublishedSet("mnist", MNIST_DIGEST, papers.TRAINING_SAMPLES)


def is_paper_data(data: Mapping[str, Any], spec: Spec) -> bool:
    """Whether data as described in experiment.json is the experiment's, by a checksum that the package took itself."""
    expected = published_set(spec)
    by_package = "set" not in data or data["set"] == expected.name or bool(data.get("directory"))
    return by_package and data.get("sha256") == expected.sha256


def _preset_of(spec: Spec) -> Spec | None:
    """The preset that an experiment says it is of, unchanged; None for a user's."""
    return papers.of_preset(spec.name, spec.preset)


@dataclass(frozen=True)
class Picture:
    """A figure of a GDU comparison."""

    caption: str
    png: bytes
    comparison: str = ""
    verdict: str = ""

    @property
    def source(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class Contents:
    """Everything a page shows, and why runs were left out."""

    folder: Path
    runs: list[RunFolder]
    pictures: list[Picture]
    left_out: list[str] = field(default_factory=list)


def collect(folder: Path) -> Contents:
    """The runs and figures in a folder and below it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}. Give a run folder, or a folder of run folders.")
    read, left_out = _read_all([path.parent for path in folder.rglob(EXPERIMENT)])
    runs, pictures = sorted(read, key=_order), _pictures(folder)
    if left_out and not runs and not pictures:
        raise ValueError(left_out[0])
    if not runs and not pictures:
        raise FileNotFoundError(
            f"{folder} holds neither runs nor figures. Train something first: eqprop train P-1h --out {folder}/p-1h."
        )
    return Contents(folder, runs, pictures, left_out)


def collect_all(folders: Sequence[Path]) -> Contents:
    """The runs and figures of several folders; of several, files and folders that hold neither are passed over."""
    if len(folders) == 1:
        return collect(folders[0])
    parts, nothing = [], []
    for folder in dict.fromkeys(folders):
        try:
            parts.append(collect(folder))
        except FileNotFoundError as error:
            nothing.append(str(error))
    if not parts:
        raise FileNotFoundError(nothing[0] if nothing else "Give a run folder, or several.")
    runs = {run.folder.resolve(): run for part in parts for run in part.runs}
    together = Path(os.path.commonpath([part.folder.resolve() for part in parts]))
    return Contents(
        together,
        sorted((replace(run, folder=place) for place, run in runs.items()), key=_order),
        [picture for part in parts for picture in part.pictures],
        [reason for part in parts for reason in part.left_out],
    )


def _read_all(folders: Sequence[Path]) -> tuple[list[RunFolder], list[str]]:
    """The runs that can be read, and what is wrong with the others: one damaged run must not hide the rest."""
    runs, left_out = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
            left_out.append(str(error) if str(folder) in str(error) else f"{folder}: {error}")
    return runs, left_out


def read_run(folder: Path) -> RunFolder:
    """Read a run, finished or not."""
    return RunFolder(folder, read_description(folder), read_metrics(folder), sessions(folder))


def _order(run: RunFolder) -> tuple[int, int, str, str]:
    """Sort as in the paper's table, then by preset; the user's own come last, by name."""
    place = papers.place_of(run.spec.name)
    presets, preset = papers.PRESETS, run.spec.preset
    order = presets.index(preset) if preset in presets else len(presets)
    return place, order, run.spec.name, str(run.folder)


def _pictures(folder: Path) -> list[Picture]:
    return [_picture(path, folder) for path in sorted(folder.rglob("figures/*.png")) if path.is_file()]


def _picture(path: Path, folder: Path) -> Picture:
    """The figure, what it shows and, if known, the name and the verdict of its comparison."""
    place = path.parent.parent
    what = path.stem.replace("-", " ")
    try:
        content = json.loads(read_bytes(place / "gdu.json"))
        name, budget = content.get("name"), content.get("budget")
    except (OSError, ValueError, AttributeError, RecursionError):
        name = budget = None
    verdict = budget.get("verdict") if isinstance(budget, dict) else None
    if name is None and place != folder:
        name = str(place.relative_to(folder))
    caption = f"{what}, {name}" if name else what
    return Picture(caption, path.read_bytes(), str(name or what), verdict if isinstance(verdict, str) else "")


def _mean(values: Sequence[float]) -> float:
    found = mean(values)
    assert found is not None, "at least one value"
    return found


Verdict = Literal["yes", "lower", "no", "unfinished", "other data", "other settings", "none"]


@dataclass(frozen=True)
class Row:
    """One run and one estimator: our result and the paper's."""

    run: RunFolder
    estimator: str
    test: Point | None
    train: Point | None
    paper_result: PaperResult | None
    diverged: int

    @property
    def phases(self) -> tuple[int, int] | None:
        """T and K; None for backprop, which has no phases."""
        return None if self.estimator == BACKPROP else (self.run.spec.phases.T, self.run.spec.phases.K)

    @property
    def shown(self) -> str:
        """Mean and deviation of the test error, and the train error in parentheses."""
        if self.test is None:
            return "–"
        return str(self.test) + ("" if self.train is None else f" ({self.train.mean:.2f})")

    @property
    def top5(self) -> float | None:
        """Mean test error among the five largest outputs after the last epoch, over the trials of `test`."""
        lost = {line["trial"] for line in self.run.diverged(self.estimator)}
        own = [x for x in self.run.lines if x["estimator"] == self.estimator and x["trial"] not in lost]
        last = max((line["epoch"] for line in own), default=0)
        return mean([e for x in own if x["epoch"] == last and (e := x.get("test_error_top5")) is not None])

    @property
    def verdict(self) -> Verdict:
        """Whether full training of every trial with an unchanged preset reached the paper's number."""
        printed = papers.printed(self.run.spec)
        if printed is None or self.estimator not in printed.published:
            return "none"
        if self.paper_result is None:
            return "other settings" if is_paper_data(self.run.described.data, self.run.spec) else "other data"
        if self.test is None or self.test.epoch < self.run.spec.optimizer.epochs:
            return "unfinished"
        if self.test.trials + self.diverged < self.run.spec.run.trials:
            return "unfinished"
        if self.diverged:
            return "no"
        if reproduces(self.test.mean, self.paper_result):
            return "yes"
        return "lower" if self.test.mean < self.paper_result.test else "no"


def rows(runs: list[RunFolder]) -> list[Row]:
    """A row for each run and estimator, in the order of the runs."""
    return [
        Row(
            run,
            estimator,
            run.last(estimator, "test"),
            run.last(estimator, "train"),
            run.paper_results.get(estimator),
            len({line["trial"] for line in run.diverged(estimator)}),
        )
        for run in runs
        for estimator in run.spec.estimators
    ]


def points(trials: Sequence[Mapping[str, Any]], kind: str) -> list[Point]:
    """The curve of published trials: mean and deviation per epoch, over those that did not diverge."""
    by_epoch = zip(*(trial[KINDS[kind]] for trial in trials if not trial["diverged"]), strict=False)
    return [Point(n, _mean(values), deviation(values), len(values)) for n, values in enumerate(by_epoch, start=1)]


def machine(made: Mapping[str, Any]) -> str:
    """The device of a provenance, or the processor and how many of its threads."""
    if made["device"] != "cpu":
        return str(made["device"])
    return f"{made['processor']}, {made['threads']} thread{'s' * (made['threads'] != 1)}"


CIFAR_HEADINGS = ("row", "test error, %", "seeds", "epochs", "per epoch", "per run", "where")
BUSY = "shared with other work"
"""What the note of a row says whose times do not measure speed."""


def counted_trials(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The trials of a published row that its mean counts: with all epochs, while there are any, and not diverged."""
    (own,) = found["estimators"].values()
    return [t for t in own["trials"] if not t["diverged"] and len(t["test_error"]) >= found["epochs_reached"]]


def published_cells(row: papers.PublishedRow, found: Mapping[str, Any] | None) -> list[str]:
    """A row of the published results on CIFAR-10; what is less than planned says so."""
    if found is None:
        return [row.name, "not trained yet", f"0 of {row.seeds}", f"0 of {row.spec.optimizer.epochs}", *"–––"]
    (own,) = found["estimators"].values()
    counted = counted_trials(found)
    std = "" if own["test_error_std"] is None else f" ± {own['test_error_std']:.2f}"
    error = "diverged" if own["test_error_mean"] is None else f"{own['test_error_mean']:.2f}{std}"
    fewer = f" ({len(counted)} of {row.seeds} seeds)" if len(counted) < row.seeds else ""
    reached, planned = found["epochs_reached"], found["epochs"]
    busy = ", busy" if BUSY in found.get("note", "") else ""
    whole = [sum(t["seconds"]) for t in counted if len(t["seconds"]) == planned]
    each = mean([s for t in counted for s in t["seconds"]])
    return [
        row.name,
        error + fewer,
        str(len(counted)),
        f"{reached}" if reached == planned else f"{reached} of {planned}",
        "–" if each is None else f"{each:.1f} s{busy}",
        "–" if not whole else duration(_mean(whole)) + busy,
        ", ".join(dict.fromkeys(machine(one["provenance"]) for one in found["provenance"])),
    ]


def to_csv(table: list[Row]) -> str:
    """A line per run and estimator, under the names of its fields."""
    out = io.StringIO()
    for n, fields in enumerate(map(_fields, table)):
        writer = csv.DictWriter(out, fields, lineterminator="\n")
        if n == 0:
            writer.writeheader()
        writer.writerow({name: "" if value is None else value for name, value in fields.items()})
    return out.getvalue()


def _fields(row: Row) -> dict[str, Any]:
    """The columns of table.csv by name; None where a run has no such number."""
    run, spec, described = row.run, row.run.spec, row.run.described.data
    test, train, paper = row.test, row.train, row.paper_result
    T, K = row.phases or (None, None)
    return {
        "name": _cell(spec.name),
        "preset": spec.preset,
        "estimator": row.estimator,
        "model": _cell(run.model),
        "data": _cell(run.data),
        "training_samples": described.get("training_samples"),
        "test_samples": described.get("test_samples"),
        "test_error_mean": test and test.mean,
        "test_error_std": test and test.std,
        "train_error_mean": train and train.mean,
        "trials": test.trials if test else 0,
        "diverged": row.diverged,
        "epoch": test.epoch if test else 0,
        "epochs": spec.optimizer.epochs,
        "paper_test_error_mean": paper and paper.test,
        "paper_test_error_std": paper and paper.test_std,
        "paper_train_error_mean": paper and paper.train,
        "reproduced": row.verdict,
        "T": T,
        "K": K,
        "beta": row.phases and spec.phases.beta,
        "schedule": row.phases and spec.phases.schedule,
        "changes_from_paper": _cell("; ".join(run.changes)),
        "test_error_top5_mean": row.top5,
    }


def to_latex(table: list[Row]) -> str:
    """A table like the paper's: test mean and deviation, train error in parentheses."""
    lines = [
        r"\begin{tabular}{@{}lllccccccc@{}} \toprule",
        r"& & & \multicolumn{2}{c}{ours (error \%)} & \multicolumn{2}{c}{paper (error \%)} & $T$ & $K$ & Epochs \\",
        r"\cmidrule(r){4-5}\cmidrule(r){6-7}",
        r"& Data & & Test & Train & Test & Train & & & \\ \midrule",
    ]
    for row in table:
        paper = row.paper_result
        cells = [
            _escape(row.run.title),
            _escape(row.run.data),
            _escape(label(row.estimator)),
            _spread(row.test),
            "--" if row.train is None else f"$({row.train.mean:.2f})$",
            "--" if paper is None else _number(paper.test, paper.test_std),
            "--" if paper is None or paper.train is None else f"$({paper.train:.2f})$",
            *map(str, row.phases or ("--", "--")),
            str(row.test.epoch if row.test else 0),
        ]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, *_latex_notes(table), r"\bottomrule", r"\end{tabular}", ""])


def _latex_notes(table: list[Row]) -> list[str]:
    """The model of each run and what is not as printed, below the numbers."""
    runs = {id(row.run): row.run for row in table}.values()
    notes = ["; ".join([f"{run.title}: {run.model}", *run.changes]) for run in runs]
    start = [r"\midrule"] if notes else []
    return start + [rf"\multicolumn{{10}}{{@{{}}l@{{}}}}{{\footnotesize {_escape(note)}}} \\" for note in notes]


def _spread(point: Point | None) -> str:
    if point is None:
        return "--"
    return _number(point.mean, point.std)


def _number(mean: float, std: float | None) -> str:
    return f"${mean:.2f}$" if std is None else rf"${mean:.2f} \pm {std:.2f}$"


def _cell(text: str) -> str:
    """Text for a CSV cell; a spreadsheet would run one that begins like a formula, so a quote comes first."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


LATEX_NAMES = {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}


def _escape(text: str) -> str:
    """Text for LaTeX."""
    return "".join(f"\\{c}" if c in "#$%&_{}" else LATEX_NAMES.get(c, c) for c in text)

"""Results of a run: metrics.jsonl, the summary, and published results to check a new run against."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eqprop.experiments.experiment import Experiment
from eqprop.experiments.io import from_dict
from eqprop.experiments.paper import TEST_SAMPLES, named_experiment
from eqprop.files import open_lock, read_bytes, take_lock, write_text
from eqprop.messages import command
from eqprop.run.checkpoint import has_checkpoint, read_checkpoint, read_head
from eqprop.run.folder import METRICS, TURNS
from eqprop.run.plan import Leg, Plan, identity, read_description

Line = dict[str, Any]
"""estimator, trial, seed, epoch, test_error, test_error_top5 (if the experiment counts it), train_error,
train_error_measured (percent), loss, residual_mean,
residual_worst, unsettled (share of samples), seconds, repeated (skipped, as it would repeat the epoch before),
diverged (None, or where and why); below float32 also precision: how far the update of the epoch's first mini-batch
agrees with float32's, and after the first epoch how far float32's agrees with float64's."""

RESERVED = ("method", "precision", "test_error_top5")
"""Names that only some lines have, now or in version 0.1.0: no metric of one's own may take them."""

WALL_TIME = "seconds"
"""The only field of a line that differs between two runs of the same experiment."""


class Metrics:
    """The lines of a run folder.

    writes      whether this process writes them, or only keeps them in memory
    shared      whether other processes write lines of other legs meanwhile
    """

    def __init__(self, folder: Path, writes: bool = True, shared: bool = False) -> None:
        self.path, self.writes, self.shared = folder / METRICS, writes, shared
        self.lines: list[Line] = read_metrics(folder)

    def append(self, lines: Iterable[Line]) -> None:
        with self._alone():
            self.lines.extend(lines)
            self._write()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from writing, with their lines read again."""
        if not self.shared:
            yield
            return
        path = self.path.with_name(TURNS)
        handle = open_lock(path)
        try:
            take_lock(handle, path, wait=True)
            self.lines = read_metrics(self.path.parent)
            yield
        finally:
            os.close(handle)

    def replace(self, lines: list[Line]) -> None:
        if lines != self.lines:
            self.lines = lines
            self._write()

    def put_in_order(self, legs: Sequence[Leg]) -> None:
        """Sort the lines as one process would have written them."""
        order = {(leg.estimator, trial): n for n, leg in enumerate(legs) for trial in leg.trials}
        last = len(order)
        self.replace(
            sorted(self.lines, key=lambda v: (order.get((v["estimator"], v["trial"]), last), v["epoch"], v["trial"]))
        )

    def drop(self, leg: Leg, after: int) -> None:
        """Remove a leg's lines of later epochs."""
        with self._alone():
            kept = [line for line in self.lines if not belongs(line, leg) or line["epoch"] <= after]
            self.replace(kept)

    def of(self, leg: Leg, until: int) -> list[Line]:
        """A leg's lines up to this epoch."""
        return [line for line in self.lines if belongs(line, leg) and line["epoch"] <= until]

    def _write(self) -> None:
        if self.writes:
            write_text(self.path, "".join(to_text(line) + "\n" for line in self.lines), parents=False)


def to_text(line: Line) -> str:
    return json.dumps(line)


def belongs(line: Line, leg: Leg) -> bool:
    return line["estimator"] == leg.estimator and line["trial"] in leg.trials


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


NUMBERS = (
    "test_error",
    "train_error",
    "train_error_measured",
    "loss",
    "residual_mean",
    "residual_worst",
    "unsettled",
    "seconds",
)


def _wrong_field(line: Any) -> str | None:
    """The first field of a line that is missing or has another type than it should; None if all are right."""
    if not isinstance(line, dict):
        return "the object"
    if not isinstance(line.get("estimator", line.get("method")), str):
        return "estimator"
    for name in ("trial", "seed", "epoch"):
        if not isinstance(line.get(name), int) or isinstance(line[name], bool):
            return name
    for name in NUMBERS:
        if name not in line or not _is_number(line[name]):
            return name
    if not _is_number(line.get("test_error_top5")):
        return "test_error_top5"
    if not isinstance(line.get("precision", {}), dict):
        return "precision"
    stopped = line.get("diverged", "")
    return None if stopped is None or isinstance(stopped, dict) else "diverged"


def cosines(line: Line, what: str) -> dict[str, float]:
    """How far updates agree, whole and by parameter; empty if unknown. `what`: with_float32, float32_with_float64."""
    found = line.get("precision", {}).get(what)
    if not isinstance(found, dict) or not isinstance(found.get("parameters"), dict):
        return {}
    parts = {"whole": found.get("whole"), **found["parameters"]}
    return {k: v["cosine"] for k, v in parts.items() if isinstance(v, dict) and isinstance(v.get("cosine"), float)}


def parse_line(text: str, where: str) -> Line:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged ({error}); expected JSON. Remove that line.") from error
    wrong = _wrong_field(line)
    if wrong is not None:
        raise ValueError(f"{where} is damaged: {wrong} is missing or not as expected in a line of metrics. Remove it.")
    return dict(line)


def read_metrics(folder: Path) -> list[Line]:
    path = folder / METRICS
    if not path.exists():
        return []
    try:
        texts = read_bytes(path).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); expected JSON lines. Restore it from a copy.") from error
    lines = [parse_line(text, f"{path}, line {number},") for number, text in enumerate(texts, start=1)]
    if any("method" in line for line in lines):
        names = _old_estimators(folder)
        lines = [_renamed(line, names, path) if "method" in line else line for line in lines]
    return lines


def _renamed(line: Line, names: Mapping[str, str], path: Path) -> Line:
    old = line.pop("method")
    if old not in names:
        raise ValueError(f"{path} has a line of {old!r}, which this run did not train. Remove that line.")
    return {"estimator": names[old], **line}


def expected_epochs(trial: int, head: Mapping[str, Any]) -> range:
    """The epochs of which a trial has a line, given its checkpoint: all, or those until it diverged."""
    reached = int(head["position"]["epoch"])
    stopped = head["diverged"].get(str(trial))
    return range(1, 1 + (reached if stopped is None else min(reached, stopped["epoch"])))


def compare_lines(found: Sequence[Line], leg: Leg, head: Mapping[str, Any]) -> list[str]:
    """What is wrong with a leg's lines up to its checkpoint, in words; empty if nothing is."""
    counts = Counter((line["trial"], line["epoch"]) for line in found)
    expected = {(trial, epoch) for trial in leg.trials for epoch in expected_epochs(trial, head)}
    missing, extra = sum(1 for key in expected if not counts[key]), sum(1 for key in counts if key not in expected)
    twice = sum(1 for n in counts.values() if n > 1)
    wrong = [f"{n} {what}" for n, what in ((missing, "missing"), (twice, "duplicated"), (extra, "too many")) if n]
    if wrong or head.get("lines") is None:
        return wrong
    saved = set(head["lines"])
    changed = sum(1 for line in found if to_text(line) not in saved)
    return [f"{changed} changed"] if changed else []


def check_lines(folder: Path) -> None:
    """Raise unless metrics.jsonl holds exactly the lines of each estimator and trial that its checkpoints count.

    Without a checkpoint of this experiment there is nothing to compare with.
    """
    described = read_description(folder)
    heads = {leg: read_head(folder / leg.folder) for leg in described.legs() if has_checkpoint(folder / leg.folder)}
    # After the checkpoints: a run in progress writes its lines first.
    lines = Metrics(folder)
    for leg, head in heads.items():
        wrong = compare_lines(lines.of(leg, head["position"]["epoch"]), leg, head)
        if wrong and head["run"] == identity(described.content):
            raise ValueError(
                f"{lines.path} does not match the checkpoint in {leg.folder}: lines of {leg.estimator}: "
                f"{', '.join(wrong)}. Restore it from a copy, or repair it with: {command('resume', folder)}"
            )


def _old_estimators(folder: Path) -> dict[str, str]:
    """Map version 0.1.0's names for estimators to today's."""
    described = read_description(folder)
    return {name.partition("-")[0]: name for name in described.settings.estimators}


def free_phases(lines: Iterable[Line]) -> dict[str, list[dict[str, Any]]]:
    """How the free phases ended, per estimator, trial and epoch, to three digits.

    residual_mean  mean over samples of max |F(s) - s| after T steps
    unsettled      share of samples that had not settled
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for line in lines:
        if line["diverged"] is None:
            trials = found.setdefault(line["estimator"], {})
            trial = trials.setdefault(line["trial"], {"seed": line["seed"], "residual_mean": [], "unsettled": []})
            for name in ("residual_mean", "unsettled"):
                trial[name].append(float(f"{line[name]:.3g}"))
    return {estimator: [trials[n] for n in sorted(trials)] for estimator, trials in found.items()}


@dataclass(frozen=True)
class Result:
    """What `train` returns: the folder, and the summary also found in result.json and `--json`."""

    folder: Path
    summary: Mapping[str, Any]

    def __repr__(self) -> str:
        said = []
        for name, found in self.summary["estimators"].items():
            mean, spread = found["test_error_mean"], found["test_error_std"]
            error = "no result" if mean is None else f"{mean:.2f}{'' if spread is None else f' ± {spread:.2f}'} %"
            said.append(f"{name} {error}")
        return f"Result({self.folder}: test error {', '.join(said)})"

    def test_error(self, estimator: str) -> float | None:
        """The mean test error in percent at the last epoch, over the trials that did not diverge."""
        mean: float | None = self.summary["estimators"][estimator]["test_error_mean"]
        return mean


def summarise(plan: Plan, folder: Path) -> dict[str, Any]:
    """The JSON of `train --json`: errors per epoch in percent; mean and standard deviation over trials at the end."""
    lines = read_metrics(folder)
    seconds, engines = 0.0, {}
    for leg in plan.legs():
        if has_checkpoint(folder / leg.folder):
            checkpoint = read_checkpoint(folder / leg.folder)
            seconds += checkpoint.seconds
            engines[leg.estimator] = checkpoint.engine
    return {
        "name": plan.experiment.name,
        "preset": plan.experiment.preset,
        "model": str(plan.experiment.architecture),
        "data": {key: value for key, value in plan.data.items() if key != "directory"},
        "changes_from_paper": plan.changes_from_paper,
        "engine": name_engines(engines),
        "device": plan.settings.device,
        "seconds": round(seconds, 3),
        "estimators": {
            estimator: _summary([line for line in lines if line["estimator"] == estimator], plan)
            for estimator in plan.settings.estimators
        },
    }


def name_engines(engines: Mapping[str, str]) -> str:
    """One name, or one per estimator if they differ."""
    names = set(engines.values())
    return names.pop() if len(names) == 1 else ", ".join(f"{estimator}: {name}" for estimator, name in engines.items())


def _summary(lines: Sequence[Line], plan: Plan) -> dict[str, Any]:
    return summarise_trials(
        [
            trial_of([x for x in lines if x["trial"] == t], plan.experiment.seed + t, plan.experiment.top5)
            for t in range(plan.settings.trials)
        ]
    )


def summarise_trials(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Trials, and their errors at the end: mean and deviation over those that did not diverge."""
    good = [t for t in trials if not t["diverged"] and t["test_error"]]
    return {
        "trials": trials,
        "test_error_mean": mean([t["test_error"][-1] for t in good]),
        "test_error_std": deviation([t["test_error"][-1] for t in good]),
        "train_error_mean": mean([t["train_error"][-1] for t in good]),
        **(
            {"test_error_top5_mean": mean([e for t in good if (e := t["test_error_top5"][-1]) is not None])}
            if trials and "test_error_top5" in trials[0]
            else {}
        ),
    }


def trial_of(lines: Sequence[Line], seed: int, top5: bool) -> dict[str, Any]:
    """One trial of a summary, from its lines."""
    good = [line for line in lines if line["diverged"] is None]
    return {
        "seed": seed,
        "test_error": [line["test_error"] for line in good],
        "train_error": [line["train_error"] for line in good],
        "train_error_final": good[-1]["train_error_measured"] if good else None,
        "diverged": any(line["diverged"] is not None for line in lines),
        **({"test_error_top5": [line.get("test_error_top5") for line in good]} if top5 else {}),
    }


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation over trials, ddof 1; None for fewer than two."""
    if len(values) < 2:
        return None
    centre = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


@dataclass(frozen=True)
class StoredTrial:
    """One network of a published row: its file, its experiment and its test error in percent.

    errors      test errors of all trials of the row at the last epoch, including this one
    data        the data as it was described; empty if it was not
    settings    settings of the run that select samples
    """

    path: Path
    experiment: Experiment
    estimator: str
    seed: int
    error: float
    errors: tuple[float, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        """Two standard deviations: the spread over trials combined with the sampling error of the test set."""
        share = (mean(self.errors) or 0.0) / 100.0
        counting = 100.0 * math.sqrt(share * (1.0 - share) / self.data.get("test_samples", TEST_SAMPLES))
        return 2.0 * math.hypot(deviation(self.errors) or 0.0, counting)

    def holds(self, error: float) -> bool:
        """Whether a test error in percent lies within the published spread."""
        return abs(error - (mean(self.errors) or 0.0)) <= self.tolerance


class Published(NamedTuple):
    """Where a command publishes its rows: pattern of the files, one of them, and the command."""

    pattern: str
    example: str
    command: str


TABLE1 = Published("*/*.json", "paper/P-1h.json", "eqprop reproduce table1 --out")


def stored_trials(
    folder: Path, rows: Collection[str] | None = None, published: Published = TABLE1
) -> list[StoredTrial]:
    """Every finished trial of the published rows in a folder, or of the given rows only."""
    wanted = None if rows is None else {row.strip().lower() for row in rows}
    found = []
    for path in sorted(folder.glob(published.pattern)):
        stored = _read(path)
        if wanted is None or str(stored.get("row", stored.get("name"))).lower() in wanted:
            found += _trials(path, stored)
    if not found:
        which = "" if rows is None else f" for {', '.join(rows)}"
        raise FileNotFoundError(
            f"{folder} holds no published results{which}; expected files such as {published.example}. Write "
            f"them with `{published.command}`."
        )
    return found


def draw(trials: list[StoredTrial], seed: int | None) -> StoredTrial:
    """Pick one at random."""
    return random.Random(seed).choice(trials)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(by_estimator(found), dict):
            raise TypeError("estimators")
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a result of `eqprop train --json`: {type(error).__name__} {error}.") from error
    return found


def by_estimator(result: Mapping[str, Any]) -> Any:
    """The results of a summary by estimator; version 0.1.0 called them methods."""
    return result["estimators"] if "estimators" in result else result["methods"]


def _trials(path: Path, found: Mapping[str, Any]) -> list[StoredTrial]:
    out = []
    for estimator, result in by_estimator(found).items():
        good = [trial for trial in result["trials"] if trial["test_error"] and not trial["diverged"]]
        good = [trial for trial in good if len(trial["test_error"]) >= found.get("epochs", 0)]
        errors = tuple(float(trial["test_error"][-1]) for trial in good)
        for trial, error in zip(good, errors, strict=True):
            experiment = _experiment(path, found).override(
                epochs=len(trial["test_error"]), seed=int(trial["seed"]), schedule=found.get("schedule")
            )
            data, settings = found.get("data", {}), found.get("settings", {})
            out.append(StoredTrial(path, experiment, estimator, int(trial["seed"]), error, errors, data, settings))
    return out


def _experiment(path: Path, found: Mapping[str, Any]) -> Experiment:
    """As it was published; where that is not stored, as it is now."""
    if "experiment" in found:
        return from_dict(found["experiment"], str(path))
    return named_experiment(found["name"], found["preset"])

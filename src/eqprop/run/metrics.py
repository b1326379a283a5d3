"""Results of a run: the summary, and published results to check a new run against."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eqprop import papers
from eqprop.run.checkpoint import Head
from eqprop.run.log import Line, read_metrics
from eqprop.run.session import Leg, Session
from eqprop.run.spec import Spec


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
    """What `train` returns.

    folder      the run folder
    summary     what result.json and `--json` have: errors per epoch in percent, by estimator and trial
    """

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

    def to_frame(self) -> Any:
        """The lines of metrics.jsonl as a pandas DataFrame: one row per estimator, trial and epoch."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_frame needs pandas. Install it: pip install 'eqprop[pandas]'.") from error
        return pandas.DataFrame(read_metrics(self.folder))


def summarise(session: Session, lines: Sequence[Line], reached: Mapping[Leg, Head]) -> dict[str, Any]:
    """The JSON of `train --json`: errors per epoch in percent; mean and standard deviation over trials at the end.

    reached     where each leg that was begun has come to
    """
    engines = {leg.estimator: reached[leg].engine for leg in session.legs() if leg in reached}
    settling: dict[str, dict[int, Any]] = {estimator: {} for estimator in session.spec.estimators}
    for leg, head in reached.items():
        settling[leg.estimator] |= head.settling
    seconds = math.fsum(head.seconds for head in reached.values())
    return {
        "name": session.spec.name,
        "preset": session.spec.preset,
        "model": str(session.spec.model),
        "data": {key: value for key, value in session.data.items() if key != "directory"},
        "changes_from_paper": session.changes_from_paper,
        "engine": name_engines(engines),
        "device": session.spec.run.device,
        "seconds": round(seconds, 3),
        "estimators": {
            name: _summary([line for line in lines if line["estimator"] == name], session, settling[name])
            for name in session.spec.estimators
        },
    }


def name_engines(engines: Mapping[str, str]) -> str:
    """One name, or one per estimator if they differ."""
    names = set(engines.values())
    return names.pop() if len(names) == 1 else ", ".join(f"{estimator}: {name}" for estimator, name in engines.items())


def _summary(lines: Sequence[Line], session: Session, settling: Mapping[int, Any]) -> dict[str, Any]:
    trials = []
    for t in range(session.spec.run.trials):
        own = [line for line in lines if line["trial"] == t]
        rest = {"settling": settling[t]} if t in settling else {}
        trials.append({**trial_of(own, session.spec.run.seed + t, session.spec.data.top5), **rest})
    return summarise_trials(trials)


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
        **({"work": lines[-1]["work"]} if lines and lines[-1].get("work") else {}),
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
    """One network of a published row: its file, its spec and its test error in percent.

    errors      test errors of all trials of the row at the last epoch, including this one
    data        the data as it was described; empty if it was not
    """

    path: Path
    spec: Spec
    estimator: str
    seed: int
    error: float
    errors: tuple[float, ...]
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        """Two standard deviations: the spread over trials combined with the sampling error of the test set."""
        share = (mean(self.errors) or 0.0) / 100.0
        counting = 100.0 * math.sqrt(share * (1.0 - share) / self.data.get("test_samples", papers.TEST_SAMPLES))
        return 2.0 * math.hypot(deviation(self.errors) or 0.0, counting)

    def holds(self, error: float) -> bool:
        """Whether a test error in percent lies within the published spread."""
        return abs(error - (mean(self.errors) or 0.0)) <= self.tolerance


class PublishedRows(NamedTuple):
    """Where a command publishes its rows: pattern of the files, one of them, and the command."""

    pattern: str
    example: str
    command: str


TABLE1 = PublishedRows("*/*.json", "paper/P-1h.json", "eqprop reproduce table1 --out")


def stored_trials(
    folder: Path, rows: Collection[str] | None = None, published: PublishedRows = TABLE1
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


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found["estimators"], dict):
            raise TypeError("estimators")
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a result of `eqprop train --json`: {type(error).__name__} {error}.") from error
    return found


def _trials(path: Path, found: Mapping[str, Any]) -> list[StoredTrial]:
    out = []
    for estimator, result in found["estimators"].items():
        good = [trial for trial in result["trials"] if trial["test_error"] and not trial["diverged"]]
        good = [trial for trial in good if len(trial["test_error"]) >= found.get("epochs", 0)]
        errors = tuple(float(trial["test_error"][-1]) for trial in good)
        for trial, error in zip(good, errors, strict=True):
            changed = {
                "epochs": len(trial["test_error"]),
                "seed": int(trial["seed"]),
                "schedule": found.get("schedule"),
            }
            spec = _spec(path, found).override(**changed, **found.get("settings", {}))
            out.append(StoredTrial(path, spec, estimator, int(trial["seed"]), error, errors, found.get("data", {})))
    return out


def _spec(path: Path, found: Mapping[str, Any]) -> Spec:
    """As it was published; where that is not stored, as it is now."""
    if "experiment" not in found:
        return papers.find(found["name"], found["preset"])
    try:
        return Spec(**found["experiment"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error

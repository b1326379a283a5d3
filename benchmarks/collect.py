"""results/ from what commands leave behind: run folders collected by topic, JSON in a compact form.

python -m benchmarks.collect nudge-site runs/a runs/b    append the runs to results/runs/nudge-site.json
python -m benchmarks.collect                             rewrite every file of results/ in its compact form
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from eqprop.files import write_text
from eqprop.run.folder import EXPERIMENT, read_json, sessions
from eqprop.run.log import read_metrics

RESULTS = Path(__file__).resolve().parents[1] / "results"
TRACES = "traces.json"
COLUMNS = ("test_error", "train_error", "residual_mean", "unsettled", "seconds")
"""What a run keeps of every epoch."""
WIDTH = 118

Document = dict[str, Any]


def compact(value: Any, indent: int = 0) -> str:
    """JSON with a line per entry, and lists of numbers and whatever else fits on one line."""
    flat = json.dumps(value)
    nested = isinstance(value, dict | list) and any(isinstance(v, dict | list) for v in _values(value))
    if not isinstance(value, dict | list) or len(flat) + indent <= WIDTH or (isinstance(value, list) and not nested):
        return flat
    pad = " " * (indent + 1)
    keys = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    parts = [f"{pad}{key}{compact(v, indent + 1)}" for key, v in zip(keys, _values(value), strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([opening, ",\n".join(parts), " " * indent + closing])


def _values(value: Document | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def rounded(value: Any, digits: int = 4) -> Any:
    """Every number to so many significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(v, digits) for key, v in value.items()}
    return [rounded(v, digits) for v in value] if isinstance(value, list) else value


def write_compact(path: Path, content: Any) -> None:
    write_text(path, compact(content) + "\n")


def tidy(root: Path = RESULTS) -> None:
    """Every file in its compact form, traces at four digits."""
    for path in root.rglob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        write_compact(path, rounded(content) if path.name == TRACES else content)


def collect(topic: str, folders: list[str]) -> None:
    """Append run folders to results/runs/TOPIC.json: experiment, data, provenance, and a list per epoch column."""
    path = RESULTS / "runs" / f"{topic}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    write_compact(path, [*kept, *(run_document(Path(folder)) for folder in folders)])


def run_document(folder: Path) -> Document:
    described = read_json(folder / EXPERIMENT, "the experiment of the run")
    trials: dict[str, dict[int, Document]] = {}
    for line in read_metrics(folder):
        own = trials.setdefault(line["estimator"], {})
        trial = own.setdefault(line["trial"], {"seed": line["seed"], **{name: [] for name in COLUMNS}})
        for name in COLUMNS:
            trial[name].append(line[name])
        if work := line.get("work"):
            trial["work"] = work
        if guard := line.get("precision"):
            trial.setdefault("cosine_with_float32", []).append(guard["with_float32"]["whole"]["cosine"])
    ran = sessions(folder)
    # Strip local paths.
    made = [{**s["provenance"], "command": re.sub(r"\S*/", "", s["provenance"]["command"])} for s in ran]
    return {
        "experiment": described["experiment"],
        "changes_from_paper": described["changes_from_paper"],
        "data": {key: value for key, value in described["data"].items() if key != "directory"},
        "engines": ran[-1]["engines"],
        "estimators": {name: {"trials": list(own.values())} for name, own in trials.items()},
        "provenance": made,
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        collect(sys.argv[1], sys.argv[2:])
    else:
        tidy()

"""Fill the measured blocks of docs/starts.md from results/beyond: no number on it is typed.

python docs/make_starts_page.py --collect RUN...    run folders, finished or not, into results/beyond, a file each
python docs/make_starts_page.py                     rewrite the marked blocks
python docs/make_starts_page.py --check             say whether they are up to date
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blocks import write_or_check

from eqprop.experiments.experiment import PaperResult
from eqprop.files import write_json
from eqprop.training.folder import EXPERIMENT, read_json, sessions
from eqprop.training.metrics import read_metrics
from eqprop.training.watch import duration

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "starts.md"
BEYOND = ROOT / "results" / "beyond"
EPOCHS = (1, 2, 5, 10)

Document = dict[str, Any]


def collect(folders: list[str]) -> None:
    """A run as one file: every line of its metrics, experiment, data, and who wrote it."""
    for folder in map(Path, folders):
        plain = read_json(folder / EXPERIMENT, "the experiment of the run")
        data = {key: value for key, value in plain["data"].items() if key != "directory"}
        content = {
            "experiment": plain["experiment"],
            "changes_from_paper": plain["changes_from_paper"],
            "settings": plain["settings"],
            "data": data,
            "epochs": read_metrics(folder),
            "provenance": [_without_paths(session) for session in sessions(folder)],
        }
        write_json(BEYOND / f"{folder.name}.json", content)
        print(BEYOND / f"{folder.name}.json")


def _without_paths(session: Document) -> Document:
    """The command without the folders of the machine it ran on."""
    made = session["provenance"]
    return {**session, "provenance": {**made, "command": re.sub(r"\S*/", "", made["command"])}}


def documents(pattern: str) -> list[Document]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(BEYOND.glob(pattern))]


def runs_block() -> str:
    """The two experiments, a line a trial, at the last epoch they have come to."""
    head = [
        "| experiment | T | K | epochs | seed | test error, % | running train error, % | published | engine | time |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    rows = []
    for d in (*documents("scellier-bengio-2017-*.json"), *documents("initialised-ep-*.json")):
        experiment, session = d["experiment"], d["provenance"][-1]
        said = PaperResult(**experiment["paper_results"]["ep"])
        for trial in sorted({line["trial"] for line in d["epochs"]}):
            lines = [line for line in d["epochs"] if line["trial"] == trial]
            last, seconds = lines[-1], sum(line["seconds"] for line in lines)
            made = session["provenance"]
            where = f"{made['threads']} CPU thread" if made["device"] == "cpu" else made["device"]
            rows.append(
                f"| {experiment['name']} | {experiment['T']} | {experiment['K']} | "
                f"{last['epoch']} of {experiment['epochs']} | {last['seed']} | {last['test_error']:.2f} | "
                f"{last['train_error']:.2f} | {said} | "
                f"{session['engines']['ep']}, {where} | {duration(seconds)} |"
            )
    return "\n".join([*head, *rows])


def gain_block() -> str:
    """Errors and residuals after equal epochs, by start and T."""
    found = [*documents("initialised-ep-*.json")[:1], *documents("start-*.json")]
    head = [
        "| start | T | " + " | ".join(f"test, % after {epoch}" for epoch in EPOCHS) + " | mean residual, then |",
        "|---|---:|" + "---:|" * len(EPOCHS) + "---:|",
    ]
    rows = []
    for d in found:
        by_epoch = {line["epoch"]: line for line in d["epochs"]}
        shown = [by_epoch.get(epoch) for epoch in EPOCHS]
        errors = " | ".join("" if line is None else f"{line['test_error']:.2f}" for line in shown)
        last = [line for line in shown if line is not None][-1]
        rows.append(f"| {d['experiment']['start']} | {d['experiment']['T']} | {errors} | {last['residual_mean']:.1e} |")
    return "\n".join([*head, *rows])


def literal_block() -> str:
    """The experiments beside other readings of the published numbers, after as many epochs."""
    rows = ["| experiment | beta | rates, from the input on | epochs | test error, % |", "|---|---:|---|---:|---:|"]
    for other in documents("literal-*.json"):
        name, last = other["experiment"]["name"], other["epochs"][-1]["epoch"]
        for d in (documents(f"{name}-*.json")[0], other):
            rates = ", ".join(str(rate) for rate in d["experiment"]["learning_rates"].values())
            line = next((x for x in d["epochs"] if x["epoch"] == last), d["epochs"][-1])
            which = " (as recorded)" if d is not other else ""
            errors = f"{line['epoch']} | {line['test_error']:.2f}"
            rows.append(f"| {name}{which} | {d['experiment']['beta']:g} | {rates} | {errors} |")
    return "\n".join(rows)


def warm_block() -> str:
    """The residual of the free phase from epoch to epoch where states persist."""
    rows = ["| run | epoch | mean residual | samples not settled, % |", "|---|---:|---:|---:|"]
    for d in documents("scellier-bengio-2017-*.json")[:1]:
        for line in [x for x in d["epochs"] if x["trial"] == 0][:6]:
            rows.append(
                f"| {d['experiment']['name']}, T = {d['experiment']['T']} | {line['epoch']} | "
                f"{line['residual_mean']:.1e} | {100 * line['unsettled']:.1f} |"
            )
    return "\n".join(rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "runs": runs_block,
    "gain": gain_block,
    "literal": literal_block,
    "warm": warm_block,
}


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--collect"]:
        collect(words[1:])
        return
    write_or_check(PAGE, BLOCKS, check=words == ["--check"])


if __name__ == "__main__":
    main()

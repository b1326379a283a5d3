"""Fill the measured parts of docs/tune.md from the files under results/tune: no number there is typed.

python docs/make_tune_page.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blocks import write_or_check

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "tune"
PAGE = ROOT / "docs" / "tune.md"


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(value: Any) -> str:
    return ", ".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, Mapping) else f"{value:g}"


def decisions() -> str:
    document = read("p-1h.json")
    rows = []
    for decision in document["decisions"]:
        name = decision["name"]
        reason = decision["reason"].replace("|", "\\|")
        rows.append([name.replace("_", " "), shown(decision["value"]), shown(document["paper"][name]), reason])
    return table(["", "decided", "paper", "reason"], rows)


def trainings() -> str:
    document = read("p-1h.json")
    effort, machine = document["effort"], document["provenance"]
    rows = [
        [str(t["T"]), str(t["K"]), f"{t['beta']:g}", shown(t["rates"]), f"{t['train']:.2f}", f"{t['held_out']:.2f}"]
        for t in document["trainings"]
    ]
    seconds = sum(t["seconds"] for t in document["trainings"])
    text = (
        f"The {len(rows)} short trainings: {effort['samples']} samples, {effort['epochs']} epochs, "
        f"{effort['validation']} samples held out; {seconds:.0f} s together on {machine['threads']} thread of "
        f"{machine['processor']}, shared with other work (commit {machine['commit'][:12]}).\n\n"
    )
    return text + table(["T", "K", "beta", "rates", "training error, %", "held out, %"], rows)


def trained() -> str:
    """The last errors of two full trainings, and the mean of the last five test errors, which say how they scatter."""
    tuned = read("p-1h.json")
    rows = []
    for what, path, values in (
        ("tuned", "tune/p-1h-trained.json", tuned["experiment"]),
        ("paper", "training/p-1h-ep-seed-0.json", tuned["paper"]),
    ):
        trial = json.loads((ROOT / "results" / path).read_text(encoding="utf-8"))["estimators"]["ep"]["trials"][0]
        tests = trial["test_error"]
        errors = [f"{tests[-1]:.2f}", f"{sum(tests[-5:]) / 5:.2f}", f"{trial['train_error'][-1]:.2f}"]
        steps = f"{values['T']}, {values['K']}, {values['beta']:g}"
        rows.append([what, steps, shown(values["learning_rates"]), str(len(tests)), *errors])
    errors = ["test error, %", "mean of the last five", "running train error, %"]
    return table(["experiment", "T, K, beta", "rates", "epochs", *errors], rows)


def search() -> str:
    document = read("p-1h-search.json")
    effort, states = document["effort"], [t["state"] for t in document["trials"]]
    ended = [t for t in document["trials"] if t["held_out_error"] is not None]
    names = list(ended[0]["values"])
    rows = [
        [str(t["number"]), f"{t['held_out_error']:.2f}", *(f"{t['values'][name]:.3g}" for name in names)]
        for t in sorted(ended, key=lambda t: (t["held_out_error"], t["number"]))[:5]
    ]
    own = next(t for t in ended if t["number"] == 0)
    text = (
        f"Measured: `eqprop {document['provenance']['command'].partition(' ')[2]}`, Optuna {document['optuna']}; "
        f"{states.count('complete')} trials of {effort['epochs']} epochs on {effort['samples']} samples, "
        f"{states.count('pruned')} given up earlier. The best five; trial 0, the experiment searched around, has "
        f"{own['held_out_error']:.2f} %.\n\n"
    )
    return text + table(["trial", "held out, %", *names], rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "decisions": decisions,
    "trainings": trainings,
    "trained": trained,
    "search": search,
}


if __name__ == "__main__":
    write_or_check(PAGE, BLOCKS, check="--check" in sys.argv)

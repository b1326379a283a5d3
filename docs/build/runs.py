"""Trainings apart from Table 1: blocks of docs/beyond.md, docs/starts.md and docs/tune.md."""

from __future__ import annotations

from statistics import fmean

from docs.build.results import Document, documents, flat
from docs.build.text import by_name, duration, listed, table
from eqprop.report.runs import machine
from eqprop.run.published import PaperResult

EPOCHS, EARLY = (1, 5, 10, 15, 20, 30), (1, 2, 5, 10)
NUDGED = (("EP, nudge outside", "ep", "outside"), ("EP, nudge inside", "ep", "inside"), ("BPTT", "bptt", "outside"))


def trials(found: Document) -> list[Document]:
    return [trial for own in found["estimators"].values() for trial in own["trials"]]


def nudge_training_block() -> str:
    """Test error and, in parentheses, running train error, in percent."""
    lines = []
    for label, name, site in NUDGED:
        found = [d for d in documents("runs/nudge-site.json") if flat(d["experiment"])["nudge_site"] == site]
        own = [trial for d in found if name in d["estimators"] for trial in trials(d)]
        means = [[fmean(t[kind][epoch - 1] for t in own) for kind in ("test_error", "train_error")] for epoch in EPOCHS]
        lines.append([label, *(f"{test:.2f} ({train:.2f})" for test, train in means), listed(t["seed"] for t in own)])
    return table(["test % (train %) after epoch", *map(str, EPOCHS), "seeds"], lines)


def runs_of(topic: str) -> str:
    """A line per run: settings, epochs and errors."""
    lines = []
    for d in documents(f"runs/{topic}.json"):
        e = flat(d["experiment"])
        setting = f"T {e['T']}, K {e['K']}, beta {e['beta']:g}, nudge {e['nudge_site']}"
        setting += "" if e.get("output_bias") is None else f", output bias {e['output_bias']:g}"
        for name, t in [(name, t) for name, own in d["estimators"].items() for t in own["trials"]]:
            errors = [f"{t[kind][-1]:.2f}" for kind in ("test_error", "train_error")]
            lines.append(
                [e["name"], setting, f"{len(t['test_error'])} of {e['epochs']}", t["seed"], *errors, d["engines"][name]]
            )
    heads = ["experiment", "settings", "epochs", "seed", "test error, %", "running train error, %", "engine"]
    return table(heads, lines, words=2)


def literature_block() -> str:
    lines = []
    for d in documents("runs/literature.json"):
        e = flat(d["experiment"])
        for t in trials(d):
            ran = f"{len(t['test_error'])} of {e['epochs']}"
            errors = [f"{t[kind][-1]:.2f}" for kind in ("test_error", "train_error")]
            theirs = PaperResult.parse(e["published"]["ep"])
            where = f"{d['engines']['ep']}, {machine(d['provenance'][-1])}"
            lines.append([e["name"], e["T"], ran, t["seed"], *errors, theirs, where, duration(sum(t["seconds"]))])
    heads = ["experiment", "T", "epochs", "seed", "test error, %", "running train error, %", "paper result", "where"]
    return table([*heads, "time"], lines)


def gain_block() -> str:
    """Errors and residuals after equal epochs, by start and T."""
    first = next(d for d in documents("runs/literature.json") if flat(d["experiment"])["start"] == "initialised")
    lines = []
    for d in (first, *documents("runs/starts.json")):
        (trial,) = trials(d)
        shown = [*(f"{trial['test_error'][n - 1]:.2f}" for n in EARLY), f"{trial['residual_mean'][EARLY[-1] - 1]:.0e}"]
        e = flat(d["experiment"])
        lines.append([e["start"], e["T"], *shown])
    return table(["start", "T", *(f"test % after {epoch}" for epoch in EARLY), "mean residual, then"], lines)


def decisions_block() -> str:
    found = documents("tune/recipe.json")[0]
    lines = []
    for decision in found["decisions"]:
        name, values = decision["name"], (decision["value"], found["paper"][decision["name"]])
        shown = [by_name(v) if isinstance(v, dict) else f"{v:g}" for v in values]
        lines.append([name.replace("_", " "), *shown, decision["reason"].replace("|", "\\|")])
    return table(["", "decided", "paper", "reason"], lines, words=4)


def tuned_block() -> str:
    """The tuned experiment trained in full beside the paper's, from the same seed."""
    recipe, (tuned,) = documents("tune/recipe.json")[0], documents("runs/tuned.json")
    paper = documents("runs/nudge-site.json")[0]
    lines = []
    for label, d, values in (("tuned", tuned, flat(recipe["experiment"])), ("paper", paper, recipe["paper"])):
        (trial,) = trials(d)
        tests = trial["test_error"]
        errors = [f"{tests[-1]:.2f}", f"{fmean(tests[-5:]):.2f}", f"{trial['train_error'][-1]:.2f}"]
        steps = f"{values['T']}, {values['K']}, {values['beta']:g}"
        lines.append([label, steps, by_name(values["rates"]), len(tests), *errors])
    heads = ["experiment", "T, K, beta", "rates", "epochs", "test error, %", "mean of the last five", "train error, %"]
    return table(heads, lines, words=3)

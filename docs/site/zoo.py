"""The zoo: every experiment with its source, the paper's result, ours, time, hardware and command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import eqprop
from docs.build import cifar10, depth, table1
from docs.build.results import Document, documents
from docs.build.runs import trials
from docs.build.text import commit, duration, table
from eqprop import papers
from eqprop.estimators.named import label
from eqprop.report.runs import BUSY, machine
from eqprop.run.metrics import deviation
from eqprop.run.published import PaperResult, reproduces
from eqprop.run.spec import Spec

INTRODUCTION = """# Zoo

Every experiment that comes with the package: the paper's result, ours, how long it took and on which machine,
and the command that trains it.

Errors are test errors in percent after the last epoch; several trials are given as mean ± standard deviation. **Bold**:
reproduced, that is within two of the paper's standard deviations of its mean. A dash: the paper's number is
not known to us, or this experiment was not trained here. "Both" is the time of EP and BPTT together, "busy" that of a
processor shared with other work. A [preset](training.md#experiments-and-presets) is a named version of the settings.
What each learning rule of the field reaches beside backprop, and how far its gradient is from the exact one:
[Learning rules of the field](field.md).
All numbers are read from the files under `results/`, which hold seeds, versions and commits.
"""


def _shipped() -> str:
    """The nets that come trained with the package, with what was measured of each."""
    lines = []
    for place in sorted(path.parent for path in eqprop.zoo.SHIPPED.glob("*/result.json")):
        trained = json.loads((place / "experiment.json").read_text(encoding="utf-8"))["experiment"]
        result = json.loads((place / "result.json").read_text(encoding="utf-8"))
        (made,) = json.loads((place / "environment.json").read_text(encoding="utf-8"))["sessions"]
        made = made["provenance"]
        (own,) = result["estimators"].values()
        where = (
            f"seed {trained['run']['seed']}, {duration(result['seconds'])} on {machine(made)}, commit {commit(made)}"
        )
        lines.append(
            f'`eqprop.zoo.load("{place.name}")` is a trained {place.name} in one line: '
            f"{own['test_error_mean']:.2f} % test error after {trained['optimizer']['epochs']} epochs ({where})."
        )
    return "\n".join(lines) + " `eqprop.zoo.build(NAME)` trains and keeps any other.\n"


OVERVIEW = ("experiment", "source", "estimator", "paper, %", "ours, %", "preset")
COLUMNS = ("preset", "estimator", "paper, %", "ours, %", "trials", "time", "hardware")

ERNOULT = "[Ernoult et al. 2019](https://arxiv.org/abs/1905.13633)"
CONTINUAL = "[Ernoult et al. 2020](https://arxiv.org/abs/2005.04168)"
LABORIEUX = "[Laborieux et al. 2021](https://arxiv.org/abs/2006.03824)"
SCELLIER = "[Scellier et al. 2023](https://arxiv.org/abs/2312.15103)"
SOURCES = dict.fromkeys(papers.of_paper(), ERNOULT) | {
    "scellier-bengio-2017": "[Scellier, Bengio 2017](https://arxiv.org/abs/1602.05179)",
    "initialised-ep": "O'Connor et al. 2019",
    "continual-ep-1h": CONTINUAL,
    "continual-ep-2h": CONTINUAL,
    "cifar10-laborieux-2021": LABORIEUX,
    "cifar10-laborieux-2021-mse": LABORIEUX,
    "cifar10-scellier-2023": SCELLIER,
    **dict.fromkeys(("deep-10", "deep-20", "fre-512"), "[this package](depth.md), after Liu et al. 2025"),
}
TOPICS = ("literature", "continual")
"""Files of results/runs with trainings of whole experiments; others hold variations of them."""


@dataclass(frozen=True)
class Entry:
    """An experiment under a preset, by one estimator; what was not trained or is not known is None."""

    experiment: Spec
    estimator: str
    paper: PaperResult | None
    ours: str | None = None
    mean: float | None = None
    trials: int = 0
    time: str = "–"
    hardware: str = "–"
    short: str = ""
    """What keeps it from being a whole training: fewer epochs or samples."""

    @property
    def reproduced(self) -> bool:
        return bool(self.paper and self.mean is not None and not self.short and reproduces(self.mean, self.paper))

    @property
    def shown(self) -> str:
        """The error, bold where it is the paper's, with what cut it short."""
        if self.ours is None:
            return "–"
        return (f"**{self.ours}**" if self.reproduced else self.ours) + (f" ({self.short})" if self.short else "")


def page() -> str:
    entries = {name: list(_entries(name)) for name in papers.names() if papers.find(name).preset not in papers.COMPARED}
    parts = [INTRODUCTION, _shipped(), table(OVERVIEW, [_overview(n, own) for n, own in entries.items()], words=6)]
    parts += [_section(name, own) for name, own in entries.items()]
    return "\n".join(parts) + "\n"


def _overview(name: str, own: list[Entry]) -> list[str]:
    """By the experiment's own estimator, the first preset that reproduces, else the first that was trained."""
    mine = [e for e in own if e.estimator == papers.find(name).estimator.kind]
    best = min(mine, key=lambda e: (not e.reproduced, e.mean is None, bool(e.short)))
    preset = f"`{best.experiment.preset}`"
    return [
        f"[{name}](#{name.lower()})",
        _source(mine[0].experiment),
        label(best.estimator),
        _paper(best.paper),
        best.shown,
        preset,
    ]


def _source(e: Spec) -> str:
    return SOURCES.get(e.name) or e.source or "this package"


def _section(name: str, own: list[Entry]) -> str:
    e = own[0].experiment
    steps = f"T = {e.phases.T}, K = {e.phases.K}, β = {e.phases.beta:g}"
    rows = [
        [f"`{o.experiment.preset}`", label(o.estimator), _paper(o.paper), o.shown, o.trials or "–", o.time, o.hardware]
        for o in own
    ]
    data = "CIFAR-10" if e.data.set == "cifar10" else "MNIST"
    if e.data.samples is not None:
        data = f"{e.data.samples:,} images of {data}"
    about = f"{e.model}; {steps}; batch {e.optimizer.batch}, {e.optimizer.epochs} epochs of {data}. From {_source(e)}."
    commands = "\n".join(dict.fromkeys(_command(o, own) for o in own))
    return f"\n## {name}\n\n{about}\n\n{table(COLUMNS, rows, words=7)}\n\n```bash\n{commands}\n```"


def _command(entry: Entry, own: list[Entry]) -> str:
    """What trains every estimator of an entry's preset as its trials were."""
    e = entry.experiment
    same = [o for o in own if o.experiment.preset == e.preset]
    estimators = ",".join(o.estimator for o in same)
    preset = "" if e.preset == papers.find(e.name).preset else f" --preset {e.preset}"
    chosen = "" if estimators == e.estimator.kind else f" --estimator {estimators}"
    count = max(o.trials for o in same)
    return f"eqprop train {e.name}{preset}{chosen}" + (f" --trials {count}" if count > 1 else "")


def _entries(name: str) -> Iterator[Entry]:
    for preset in papers.presets(name):
        if preset not in papers.COMPARED:
            spec = papers.find(name, preset)
            found = list(_of_table1(name, preset) if name in papers.of_paper() else _of_runs(spec))
            yield from found or list(_of_depth(spec)) or [_untrained(spec)]


def _untrained(e: Spec) -> Entry:
    return Entry(e, e.estimator.kind, e.results.get(e.estimator.kind))


def _of_table1(name: str, preset: str) -> Iterator[Entry]:
    for row in table1.rows():
        if (row.experiment.name, row.experiment.preset) != (name, preset) or not row.own_schedule:
            continue
        alone = "seconds_by_estimator" in row.found
        for estimator in table1.ESTIMATORS:
            found, epochs = row.result(estimator), row.epochs(estimator)
            paper = row.experiment.results.get(estimator)
            if found is None:
                yield Entry(row.experiment, estimator, paper)
                continue
            yield Entry(
                row.experiment,
                estimator,
                paper,
                table1.spread(found, train=False),
                found["test_error_mean"],
                len(found["trials"]),
                duration(row.seconds(estimator)) + ("" if alone else ", both"),
                machine(row.found["provenance"][0]["provenance"]),
                ""
                if epochs == row.experiment.optimizer.epochs
                else f"epoch {epochs} of {row.experiment.optimizer.epochs}",
            )


def _of_runs(e: Spec) -> Iterator[Entry]:
    """Trials of the same experiment, preset and estimator, together."""
    found = [d for d in _runs() if (d["experiment"]["name"], d["experiment"]["preset"]) == (e.name, e.preset)]
    for estimator in dict.fromkeys(map(_estimator, found)):
        own = [d for d in found if _estimator(d) == estimator]
        each = [t for d in own for t in trials(d) if t["test_error"]]
        errors = [t["test_error"][-1] for t in each]
        std = deviation(errors)
        yield Entry(
            e,
            estimator,
            e.results.get(estimator),
            f"{fmean(errors):.2f}" + (f" ± {std:.2f}" if std is not None else ""),
            fmean(errors),
            len(each),
            duration(sum(sum(t["seconds"]) for t in each)) + (", busy" if _shared(own[0]) else ""),
            machine(own[0]["provenance"][-1]),
            _cut_short(e, own),
        )


def _of_depth(e: Spec) -> Iterator[Entry]:
    """Deep chains, with the error of the last epoch and of the best one on the test set, each called so."""
    for estimator in ("ep", "backprop"):
        own = depth.trainings(record=f"{e.name}-{estimator}", name=e.name, preset=e.preset)
        if own:
            last, best = ([d[which] for d in own] for which in ("last", "best"))
            yield Entry(
                e,
                estimator,
                e.results.get(estimator),
                f"last epoch {depth.spread(last)}, best epoch {depth.spread(best)}",
                fmean(last),
                len(own),
                duration(sum(d["cpu_seconds"] for d in own)),
                machine(own[0]["provenance"]),
            )


def _estimator(d: Document) -> str:
    """Runs of version 0.1.0 file every variant of EP under "ep"."""
    name = next(iter(d["estimators"]))
    return Spec(**d["experiment"]).estimator.kind if name == "ep" else str(name)


def _shared(d: Document) -> bool:
    """Whether other work ran beside it, as the remark of a document says."""
    return BUSY in d.get("stopped", d.get("note", ""))


def _cut_short(e: Spec, own: list[Document]) -> str:
    ran = min(len(t["test_error"]) for d in own for t in trials(d))
    parts = [f"epoch {ran} of {e.optimizer.epochs}"] * (ran != e.optimizer.epochs)
    samples = own[0]["data"]["training_samples"]
    whole = e.data.samples or samples
    return ", ".join(parts + [f"{samples:,} of {whole:,} images"] * (whole != samples))


def _runs() -> list[Document]:
    """Trainings by topic, and the rows of CIFAR-10 but those that only vary the precision of another."""
    rows = [d for name, d in cifar10.rows().items() if not name.endswith(("-float16", "-float32"))]
    others = [d for topic in TOPICS for d in documents(f"runs/{topic}.json")]
    return others + [{**d, "provenance": [one["provenance"] for one in d["provenance"]]} for d in rows]


def _paper(result: PaperResult | None) -> str:
    return "–" if result is None else str(PaperResult(result.test, result.test_std))

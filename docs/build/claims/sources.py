"""Where the numbers of a row come from: results/, and the settings that the package has for an experiment."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from itertools import product
from typing import Any

import torch

from docs.build.gdu import compared, traces
from docs.build.results import RESULTS, Document, documents, flat
from eqprop import papers
from eqprop.dynamics import Dynamics
from eqprop.run.session import build_model
from eqprop.run.spec import Spec


@cache
def settings(name: str, preset: str = "paper", **_: Any) -> Document:
    """A training experiment and its published numbers; rates from the input to the output, as the paper lists them."""
    spec = papers.find(name, preset)
    published = {estimator: asdict(result) for estimator, result in spec.results.items()}
    samples = [papers.TRAINING_SAMPLES, papers.TEST_SAMPLES]
    more = {"rates": list(spec.optimizer.rates.values()), "published": published, "samples": samples}
    return {**_flat(spec), **more}


@cache
def gdu_settings(name: str, preset: str = "paper") -> Document:
    """An experiment of the laboratory."""
    return _flat(papers.find(name, "gdu" if preset == "paper" else f"gdu-{preset}"))


def _flat(spec: Spec) -> Document:
    """A spec as it is read from JSON, which knows no tuples."""
    return flat(json.loads(json.dumps(spec.to_dict())))


@cache
def literature(name: str) -> Document:
    """A row below the double rule of Table 1, by the name of its source."""
    row = next(row for row in papers.literature() if row.source == name)
    return {**row._asdict(), "result": asdict(row.result)}


PREPARED: dict[str, Callable[..., Document]] = {
    "settings": settings,
    "gdu settings": gdu_settings,
    "literature": literature,
    "gdu": compared,
    "traces": traces,
}
"""Sources with a function of their own; any other is a file or folder of results/."""


def selected(source: str, where: Mapping[str, Any]) -> list[Document] | None:
    """The documents with these fields, for each value of a field that is a list; None if nothing was measured yet."""
    if source not in PREPARED and not (RESULTS / source).exists():
        return None
    lists = {name: value for name, value in where.items() if isinstance(value, list)}
    found = []
    for values in product(*lists.values()):
        fields = {**where, **dict(zip(lists, values, strict=True))}
        found += [PREPARED[source](**fields)] if source in PREPARED else _documents(source, fields)
    return found


def _documents(source: str, fields: Mapping[str, Any]) -> list[Document]:
    found = [d for d in documents(source) if all(_field(d, name) == value for name, value in fields.items())]
    if not found:
        raise LookupError(f"results/{source} has no document with {dict(fields)}.")
    return found


def _field(document: Document, name: str) -> Any:
    """A field; `experiment.name` is one of a field."""
    value: Any = document
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def training_net(name: str, init: str, seed: int, dtype: torch.dtype) -> Dynamics:
    """The network of a training experiment at its first weights."""
    return build_model(papers.find(name).override(init=init, seed=seed), 0, dtype)


def gdu_net(name: str, init: str, seed: int, dtype: torch.dtype) -> Dynamics:
    """The network of an experiment of the laboratory at its first weights."""
    return build_model(papers.find(name, "gdu").override(init=init, seed=seed), 0, dtype)

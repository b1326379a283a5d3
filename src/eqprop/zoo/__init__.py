"""Trained nets in one line: run folders that come with the package, or that one call makes.

    net = eqprop.zoo.load("P-1h")
    eqprop.predict(net, "digit.png")

A net of the zoo is a run folder like any other: its settings, seed, machine, versions, commit, errors and weights are
files in it, and `eqprop evaluate`, `doctor` and `report` take its `folder`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eqprop import papers
from eqprop.cache import cache_folder
from eqprop.files import read_bytes
from eqprop.messages import unknown
from eqprop.run import Result, resume, train
from eqprop.run.evaluate import Trained
from eqprop.run.evaluate import load as load_run
from eqprop.run.folder import RESULT, is_run

SHIPPED = Path(__file__).parent
PRESETS = {"EB-1h": "tuned", "EB-2h": "tuned", "P-2h": "tuned", "P-3h": "tuned", "P-conv": "tuned"}
"""The preset of a net that reproduces its paper's number, where that is not `paper`."""


def names() -> list[str]:
    """The nets that can be loaded at once: those of the package, and those that were built."""
    return [name for name in papers.names() if _finished(name) is not None]


def load(name: str, **options: Any) -> Trained:
    """The trained net of an experiment.

    name        an experiment, such as "P-1h"; `names` lists those that need no training first
    options     as `eqprop.load` takes them: estimator, trial, at, device
    """
    return load_run(folder(name), **options)


def folder(name: str) -> Path:
    """The run folder of a net, for `eqprop.evaluate`, `eqprop.report` and the command line.

    name        an experiment, such as "P-1h"
    """
    found = _finished(_known(name))
    if found is None:
        raise FileNotFoundError(
            f"The zoo has no weights of {name} yet; it has {', '.join(names())}. Train it once with "
            f"eqprop.zoo.build({name!r}), with its paper's settings and all its epochs, or smaller with eqprop.train."
        )
    return found


def numbers(name: str) -> dict[str, Any]:
    """What was measured when a net was trained: result.json of its run, errors in percent per epoch.

    name        an experiment, such as "P-1h"
    """
    found: dict[str, Any] = json.loads(read_bytes(folder(name) / RESULT))
    return found


def build(name: str, **options: Any) -> Result:
    """Train a net of the zoo with its published settings and keep it in the cache; a stopped training continues.

    name        an experiment, such as "EB-1h"
    options     as `eqprop.train` takes them: device, threads, watch="lines" to see how far it is, ...
    """
    place = _built(_known(name))
    if is_run(place):
        return resume(place, **options)
    return train(name, place, **{"preset": PRESETS.get(name), **options})


def _known(name: str) -> str:
    known = papers.known_name(name)
    if known is None:
        raise ValueError(unknown("experiment", name, papers.names()))
    return known


def _built(name: str) -> Path:
    return cache_folder() / "zoo" / name


def _finished(name: str) -> Path | None:
    """The folder of a net whose training has ended, the package's before one that was built."""
    return next((place for place in (SHIPPED / name, _built(name)) if (place / RESULT).is_file()), None)

"""Every experiment that the package knows, one TOML file per paper, and files in the same format.

A table per experiment holds its settings, its source and the published results; tables in it are presets, each with
what differs from the experiment, or from the preset that it names as its base:

    ["P-1h"]
    source = "Ernoult et al. 2019, Table 1"
    phases = { T = 30, K = 10, beta = 0.1 }
    ["P-1h".authors]
    phases = { T = 40, K = 15 }
    ["P-1h".tuned]
    base = "authors"
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from eqprop.messages import shown, unknown
from eqprop.run.own import Factory, OwnFunction, as_own, is_own, load_own
from eqprop.run.published import PaperResult, reproduces
from eqprop.run.spec import NAMED, SECTIONS, Optimizer, Spec, declared

PAPER = "ernoult-2019"


def _files() -> tuple[str, ...]:
    """The folder's files without their ending: the paper's own, the others by year, and last what stems from none."""
    there = {
        name.removesuffix(".toml")
        for f in resources.files("eqprop.papers").iterdir()
        if (name := f.name).endswith(".toml")
    }
    return PAPER, *sorted(there - {PAPER}, key=lambda name: (name.rpartition("-")[2], name))


PAPERS = _files()
"""The files, in the order in which tables show their experiments."""
PRESETS = ("paper", "authors", "tuned", "fast", "gdu", "gdu-authors")
"""`paper`: as printed; `authors`: as in the authors' code; `tuned`: the fewest changes that reproduce the number;
`gdu`: the settings of the paper's GDU figures."""
COMPARED = ("gdu", "gdu-authors")
"""Presets that are compared with BPTT step by step, not trained."""
TRAINING_SAMPLES, TEST_SAMPLES = 60_000, 10_000
"""The sizes of MNIST's two sets."""
CIFAR_SAMPLES = 50_000
"""Training images of CIFAR-10; it has as many test images as MNIST."""


class Literature(NamedTuple):
    """A result that a paper's table cites; `experiment` names the one that trains it, if any."""

    source: str
    result: PaperResult
    T: int
    K: int | None
    epochs: int
    experiment: str | None = None


class PublishedRow(NamedTuple):
    """A row of published results: an experiment by one estimator, and what it is held against.

    seeds       how many it is to have
    published   the error in percent as printed, with what it is of: "7.8, best epoch on the test set, one run"
    beside      the row of its yardstick, such as the same net by backprop
    minutes     estimated CPU time of a seed
    remark      what differs from the published or expected result, and what was tried
    """

    name: str
    spec: Spec
    estimator: str
    about: str
    minutes: float = 0.0
    seeds: int = 3
    beside: str | None = None
    published: str | None = None
    remark: str | None = None


Table = Mapping[str, Any]


@cache
def _library() -> dict[str, Table]:
    """The tables of all experiments, by name."""
    return {name: table for paper in PAPERS for name, table in _paper(paper).items() if isinstance(table, dict)}


@cache
def _paper(name: str) -> Table:
    text = resources.files("eqprop.papers").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def of_preset(name: str, preset: str) -> Spec | None:
    """The experiment of exactly that name and preset; None if there is none."""
    table = _library().get(name)
    return None if table is None or preset not in _presets(table) else _made(name, table, preset)


@cache
def _names_of_settings() -> frozenset[str]:
    """Keys of an experiment's table that are no presets."""
    head = (*Spec.__struct_fields__, "base", "reached", "estimators")
    return frozenset((*head, *SECTIONS, *(f.flat for f in declared())))


def _presets(table: Table) -> list[str]:
    """The presets of an experiment, its own settings first."""
    known = _names_of_settings()
    more = [key for key, value in table.items() if isinstance(value, Mapping) and key not in known]
    return [table.get("preset", "paper"), *more]


def _made(name: str, table: Table, preset: str) -> Spec:
    """A preset of an experiment: its own settings, then what differs, base by base."""
    others = _presets(table)
    own = {key: value for key, value in table.items() if key not in (*others[1:], "reached", "preset")}
    if preset == others[0]:
        return Spec.of(**{"name": name, "preset": preset, **own})
    more = {key: value for key, value in table[preset].items() if key not in ("base", "reached")}
    start = _made(name, table, table[preset].get("base", others[0]))
    return start.override(**{"preset": preset, **more})


def names(preset: str | None = None) -> tuple[str, ...]:
    """The names of all experiments, or of those that have a preset."""
    return tuple(name for name, table in _library().items() if preset is None or preset in _presets(table))


def known_name(text: str) -> str | None:
    """The name of an experiment as it is written, given in any case; None if there is none."""
    return next((name for name in names() if name.lower() == text.lower()), None)


def presets(name: str) -> tuple[str, ...]:
    """The presets of an experiment."""
    return tuple(_presets(_library()[name])) if name in _library() else ()


def specs(preset: str) -> dict[str, Spec]:
    """The experiments of a preset, by name."""
    if preset not in PRESETS:
        raise ValueError(unknown("preset", preset, PRESETS))
    found = {name: of_preset(name, preset) for name in names(preset)}
    return {name: spec for name, spec in found.items() if spec is not None}


def find(what: str | Path | Spec, preset: str | None = None) -> Spec:
    """An experiment by name, case-insensitive, or from a TOML or JSON file; a `Spec` is returned unchanged.

    what        "P-1h", or mine.toml, or mine.toml:NAME where a file holds several
    preset      by default "paper", or what the experiment has where it is of no paper
    """
    if isinstance(what, Spec):
        return what
    path, _, name = str(what).partition(".toml:")
    if name:
        return read(Path(f"{path}.toml"), preset, name)
    if Path(what).suffix in READERS:
        return read(Path(what), preset)
    if preset is not None and preset not in PRESETS:
        raise ValueError(unknown("preset", preset, PRESETS))
    known = known_name(str(what))
    if known is None:
        raise ValueError(unknown("experiment", str(what), names()))
    there = presets(known)
    chosen = there[0] if preset in (None, "paper") else preset
    found = of_preset(known, chosen)
    if found is None:
        raise ValueError(
            f"{known} has no preset {preset!r}, which exists only for {', '.join(names(preset))}. Use one of "
            f"{', '.join(there)}."
        )
    return found


def printed(spec: Spec) -> Spec | None:
    """The printed settings of the row of that name; None for your own experiments."""
    return of_preset(spec.name, "paper")


def place_of(name: str) -> int:
    """The place of an experiment of that name in tables: the paper's first, those of no paper last."""
    return names().index(name) if name in names() else len(names())


def of_paper(paper: str = PAPER) -> tuple[str, ...]:
    """The names of a paper's experiments that are trained."""
    return tuple(
        name
        for name, table in _paper(paper).items()
        if isinstance(table, dict) and table.get("preset", "paper") == "paper"
    )


def paper_rows() -> dict[str, Spec]:
    """The paper's own experiments as printed, by name: Table 1."""
    return {name: find(name) for name in of_paper()}


def literature() -> list[Literature]:
    """The best EP results the paper found in the literature."""
    rows = (dict(row) for row in _paper(PAPER)["literature"])
    return [Literature(result=PaperResult.parse(row.pop("published")), **{"K": None, **row}) for row in rows]


@cache
def cifar_rows() -> dict[str, PublishedRow]:
    """What `eqprop reproduce cifar10` trains, the most wanted first."""
    return {row["name"]: _published_row(row) for row in _paper("ours")["rows"]}


@cache
def field_rows() -> dict[str, PublishedRow]:
    """What `eqprop reproduce field` trains: the rows that each paper's file lists as `[[field]]`."""
    return {row["name"]: _published_row(row) for paper in PAPERS for row in _paper(paper).get("field", ())}


def _published_row(table: Mapping[str, Any]) -> PublishedRow:
    given = dict(table)
    spec = find(given.pop("experiment"), given.pop("preset", None)).override(**given.pop("changes", {}))
    return PublishedRow(**{"spec": spec, "estimator": spec.estimator.kind, **given})


def reached(name: str, preset: str) -> dict[str, float]:
    """The mean test errors over five trials that a preset reached here, by estimator."""
    table = _library().get(name, {})
    own = table if preset == table.get("preset", "paper") else table.get(preset, {})
    return dict(own.get("reached", {}))


def caution(spec: Spec, estimator: str) -> str | None:
    """What to know before training a cell whose printed settings do not reproduce the number; None otherwise."""
    if spec.preset != "paper" or estimator not in spec.results:
        return None
    paper, errors = spec.results[estimator], {p: reached(spec.name, p).get(estimator) for p in presets(spec.name)}
    own = errors["paper"]
    if own is None or reproduces(own, paper):
        return None
    better = next((p for p, error in errors.items() if error is not None and reproduces(error, paper)), None)
    advice = "" if better is None else f" With --preset {better} it reproduces."
    return (
        f"{spec.name} by {estimator} does not reproduce as printed: the paper reports {paper.test:.2f} %, these "
        f"settings reached {own:.2f} % (five trials).{advice}"
    )


def read(path: Path, preset: str | None = None, name: str | None = None) -> Spec:
    """An experiment from a file. With `base = "P-1h"`, what is not given is that experiment's."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. Give a TOML or JSON file, or the name of an experiment.")
    try:
        return _settled(READERS[path.suffix](path, preset, name))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _settled(spec: Spec) -> Spec:
    """A spec from a file: a known experiment if it is unchanged, else a user's."""
    known = of_preset(spec.name, spec.preset)
    if known is not None and known == spec:
        return known
    return msgspec.structs.replace(spec, preset="own", published={}, source="", notes="")


def _read_toml(path: Path, preset: str | None, name: str | None) -> Spec:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not a TOML file: {error}. Expected lines such as T = 30.") from error
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    if not tables or len(tables) < len(values) or any(key in _names_of_settings() for key in values):
        tables = {str(values.get("name", path.stem)): values}
    chosen = name or next(iter(tables))
    if chosen not in tables:
        raise ValueError(unknown("experiment", chosen, tables))
    if name is None and len(tables) > 1:
        raise ValueError(f"it holds {', '.join(tables)}. Name one: {path}:{chosen}.")
    return _from_table(chosen, dict(tables[chosen]), preset)


def _from_table(name: str, table: dict[str, Any], preset: str | None) -> Spec:
    base, of = table.pop("base", None), table.get("preset", "paper")
    if base is None:
        found = _presets(table)
        if preset is not None and preset not in found and preset != "paper":
            raise ValueError(unknown("preset", preset, found))
        return _made(name, table, preset if preset in found else found[0])
    for key, value in (("base", base), ("preset", of)):
        if not isinstance(value, str):
            raise ValueError(f'{key} is {shown(value)}; expected a name, such as base = "P-1h".')
    start = find(base, of).override(cost=table.pop("cost", None))
    return start.override(**{"name": name, **table, "preset": "own"})


def _read_json(path: Path, preset: str | None, name: str | None) -> Spec:
    """A complete spec, or an object that holds one, like a run's experiment.json."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not a JSON file: {error}. Expected an experiment's settings.") from error
    values = values.get("experiment", values) if isinstance(values, dict) else values
    if not isinstance(values, dict):
        raise ValueError("it holds no experiment; expected an object with sections such as phases and optimizer.")
    return Spec.of(**{"name": path.stem, **values})


READERS: dict[str, Callable[[Path, str | None, str | None], Spec]] = {".toml": _read_toml, ".json": _read_json}
"""Readers of experiment files, by suffix."""


def find_own(experiment: str | Path | Spec | Factory, model: Factory | None) -> tuple[Any, OwnFunction | None]:
    """The experiment and your own function, if there is one: given as model, or instead of an experiment."""
    own = as_own(model)
    target = str(experiment) if isinstance(experiment, Path) else experiment
    if is_own(target):
        own = load_own(str(target))
    elif callable(target) and not isinstance(target, Spec):
        own = as_own(target)
    else:
        return experiment, own
    if model is not None:
        raise ValueError(f"Got two functions, {own.name if own else target} and model; expected one. Omit model.")
    assert own is not None, "a function was given"
    return own_spec(own), own


def own_spec(own: OwnFunction) -> Spec:
    """The spec of your own function, where nothing else is given: every setting has its default."""
    source, _, function = own.name.rpartition(":")
    name = f"{Path(source).stem}-{function}" if source else function
    model = {"kind": "own", "function": own.name}
    x = own.build(0).x
    batch = None if x is None else min(len(x), Optimizer().batch)
    return Spec.of(name=name, model=model, cost="own" if own.has_cost else None, batch=batch)


def origins(spec: Spec) -> dict[str, str]:
    """Where each setting comes from, by its place, such as "phases.T".

    The preset of the experiment of that name whose table sets it, such as "paper"; "default" where none does; "own"
    where the value is another than these.
    """
    known = of_preset(spec.name, spec.preset)
    setters = {} if known is None else _setters(spec.name, spec.preset)
    out = {}
    for section in SECTIONS:
        now, was = getattr(spec, section), getattr(known, section, None)
        defaults = {f.name: f.default for f in msgspec.structs.fields(now)}
        for leaf in now.__struct_fields__:
            place, value = f"{section}.{leaf}", getattr(now, leaf)
            if known is not None and value == getattr(was, leaf, None):
                out[place] = setters.get(place, "default")
            else:
                out[place] = "default" if value == defaults[leaf] else "own"
    return out


def _setters(name: str, preset: str) -> dict[str, str]:
    """The last preset that sets each setting, on the way from the experiment's own settings to this preset."""
    table = _library()[name]
    first, way = _presets(table)[0], [preset]
    while way[-1] != first:
        way.append(table[way[-1]].get("base", first))
    found: dict[str, str] = {}
    for step in reversed(way):
        for key, value in (table if step == first else table[step]).items():
            if key in SECTIONS:
                leaves = value if isinstance(value, Mapping) else {NAMED[key]: value}
                found |= {f"{key}.{leaf}": step for leaf in leaves}
    return found

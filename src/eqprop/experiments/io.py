"""Convert experiments to and from dictionaries and files: JSON in run folders, TOML or JSON for custom ones."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from eqprop.data.augment import Augmentation, Normalisation
from eqprop.experiments.architecture import KINDS, Architecture, Factory, Own, as_own, is_own, load_own
from eqprop.experiments.experiment import OWN_ESTIMATOR, Experiment, PaperResult, own_experiment
from eqprop.experiments.paper import named_experiment
from eqprop.messages import shown, unknown


def to_dict(experiment: Experiment) -> dict[str, Any]:
    return asdict(experiment)


def from_dict(values: Mapping[str, Any], source: str) -> Experiment:
    """Build an experiment from JSON or TOML values; errors name `source`."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{source} holds {shown(values)} as its experiment; expected a table with T, K and so on.")
    given = up_to_date(values)
    known = [f.name for f in fields(Experiment)]
    _check_names(given, known, source)
    missing = [n for n in ("name", "architecture", "T", "K", "epochs", "learning_rates") if n not in given]
    if missing:
        raise ValueError(
            f'{source} lacks {", ".join(missing)}. Give them, or name an experiment to start from: base = "P-1h".'
        )
    given["architecture"] = _architecture(given["architecture"], source)
    given["paper_results"] = _paper_results(given.get("paper_results", {}), source)
    for name, kind in (("augmentation", Augmentation), ("normalisation", Normalisation)):
        if (table := given.get(name)) is not None:
            if not isinstance(table, Mapping):
                raise ValueError(f"{source}: {name} is {shown(table)}; expected a table, [{name}].")
            given[name] = kind.from_dict(table, f"{source}, {name}")
    try:
        return Experiment(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error


OLD_NAMES = {"nudge": "nudge_site", "reported": "paper_results"}
OLD_ESTIMATORS = {"one-sided": "ep"} | {
    form: f"ep-{form}" for form in ("symmetric", "random-sign", "holomorphic", "continual")
}
"""Names used by version 0.1.0."""


def up_to_date(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the fields of an experiment written by version 0.1.0 to their current names."""
    found = {OLD_NAMES.get(name, name): value for name, value in values.items()}
    estimator = found.get("estimator")
    if isinstance(estimator, str):
        found["estimator"] = OLD_ESTIMATORS.get(estimator, estimator)
    return found


def read_toml(path: Path) -> Experiment:
    """Read a custom experiment. With `base = "P-1h"`, other fields are that experiment's (of `preset`, if given)."""
    try:
        values = tomllib.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}. Expected lines such as T = 30.") from error
    values = up_to_date(values)
    base = values.pop("base", None)
    preset = values.pop("preset", "paper")
    values.setdefault("name", path.stem)
    if base is not None:
        start = _base(base, preset, values.get("cost"), path)
        architecture = values.get("architecture", {})
        if not isinstance(architecture, dict):
            raise ValueError(f"{path}: architecture is {shown(architecture)}; expected a table, [architecture].")
        if architecture.get("kind", start["architecture"]["kind"]) == start["architecture"]["kind"]:
            values["architecture"] = {**start["architecture"], **architecture}
        values = {**start, "paper_results": {}, **values}
    elif isinstance(net := values.get("architecture"), dict) and net.get("kind") in ("own", "graph"):
        values.setdefault("estimator", OWN_ESTIMATOR)
    values["preset"] = "own"
    return from_dict(values, str(path))


def _base(name: object, preset: object, cost: object, path: Path) -> dict[str, Any]:
    for what, value in (("base", name), ("preset", preset)):
        if not isinstance(value, str):
            raise ValueError(f'{path}: {what} is {shown(value)}; expected a name, such as base = "P-1h".')
    try:
        return to_dict(named_experiment(str(name), str(preset)).override(cost=cost))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


MOST_BYTES = 1 << 20
"""The largest file of an experiment that is read: 1 MiB, hundreds of times a usual one."""


def _read(path: Path) -> str:
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"it has {size} bytes, and at most {MOST_BYTES} are read")
    return path.read_text(encoding="utf-8")


def _paper_results(values: Any, source: str) -> dict[str, PaperResult]:
    try:
        return {name: PaperResult(**result) for name, result in values.items()}
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"{source}: paper_results is {shown(values)}; expected a table per estimator with test, test_std and train."
        ) from error


def read_json_file(path: Path) -> Experiment:
    """Read a complete experiment from JSON: its fields, or an object that holds them, like a run's experiment.json."""
    try:
        values = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}. Expected an experiment's fields.") from error
    if isinstance(values, dict):
        values = values.get("experiment", values.get("record", values))
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no experiment; expected an object with fields such as T, K and learning_rates.")
    return from_dict({"name": path.stem, **up_to_date(values), "preset": "own", "paper_results": {}}, str(path))


READERS: dict[str, Callable[[Path], Experiment]] = {".toml": read_toml, ".json": read_json_file}
"""Readers of experiment files, by suffix."""


def find_experiment(what: str | Path | Experiment, preset: str = "paper") -> Experiment:
    """Find an experiment by name or in a TOML or JSON file; an Experiment is returned unchanged."""
    if isinstance(what, Experiment):
        return what
    path = Path(what)
    if path.suffix in READERS:
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path}. Give a TOML or JSON file, or the name of an experiment.")
        return READERS[path.suffix](path)
    return named_experiment(str(what), preset)


def find_own(experiment: str | Path | Experiment | Factory, model: Factory | None) -> tuple[Any, Own | None]:
    """The experiment and your own function, if there is one: given as model, or instead of an experiment."""
    own = as_own(model)
    target = str(experiment) if isinstance(experiment, Path) else experiment
    if is_own(target):
        own = load_own(str(target))
    elif callable(target) and not isinstance(target, Experiment):
        own = as_own(target)
    else:
        return experiment, own
    if model is not None:
        raise ValueError(f"Got two functions, {own.name if own else target} and model; expected one. Omit model.")
    assert own is not None, "a function was given"
    return own_experiment(own), own


def _architecture(values: Any, source: str) -> Architecture:
    if not isinstance(values, Mapping):
        raise ValueError(f"{source}: architecture is {shown(values)}; expected a table with kind and sizes.")
    kind = values.get("kind", "layered")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{source}: {unknown('kind of architecture', str(kind), KINDS)}")
    chosen = KINDS[kind]
    _check_names(values, [f.name for f in fields(chosen)], f"{source}, architecture")
    try:
        net: Architecture = chosen(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}, architecture: {error}") from error
    return net


def _check_names(given: Mapping[str, Any], known: list[str], source: str) -> None:
    strange = next((name for name in given if name not in known), None)
    if strange is not None:
        raise ValueError(f"{source}: {unknown('field', strange, known)}")


LEFT_OUT = ("preset", "paper_results")
"""Fields that a custom file does not set."""


def to_toml(experiment: Experiment, reasons: Mapping[str, str] | None = None, title: str = "") -> str:
    """All fields of the experiment, tables last; `reasons` are comments above their fields, `title` one at the top."""
    reasons = reasons or {}
    values = {name: value for name, value in to_dict(experiment).items() if name not in LEFT_OUT and value is not None}
    lines = _comment(title)
    for name, value in values.items():
        if not isinstance(value, Mapping):
            lines += [*_comment(reasons.get(name, "")), f"{name} = {_value(value, name)}"]
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            lines += ["", *_comment(reasons.get(name, "")), f"[{name}]"]
            lines += [f"{_key(k)} = {_value(v, f'{name}.{k}')}" for k, v in value.items() if v is not None]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for part in text.splitlines() for line in textwrap.wrap(part, 110)]


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else json.dumps(name)


def _value(value: Any, name: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML string, except for the one character that only JSON leaves unescaped.
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        fields_ = ", ".join(f"{_key(k)} = {_value(v, f'{name}.{k}')}" for k, v in value.items() if v is not None)
        return f"{{ {fields_} }}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v, name) for v in value) + "]"
    raise ValueError(f"{name} is {value!r}, which a TOML file cannot hold. Write the experiment as JSON instead.")

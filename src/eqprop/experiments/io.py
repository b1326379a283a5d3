"""A record as the text of a TOML file that `eqprop train` takes, with the reasons for its values as comments."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from eqprop.experiments.architecture import KINDS, Architecture
from eqprop.experiments.experiment import Record, Reported
from eqprop.experiments.paper import named_record
from eqprop.messages import unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def to_plain(record: Record) -> dict[str, Any]:
    return asdict(record)


def from_plain(values: Mapping[str, Any], source: str) -> Record:
    """A record from plain values; `source` is named when they are wrong."""
    given = dict(values)
    known = [f.name for f in fields(Record)]
    _check_names(given, known, source)
    missing = [n for n in ("name", "architecture", "T", "K", "epochs", "learning_rates") if n not in given]
    if missing:
        raise ValueError(
            f'{source} lacks {", ".join(missing)}. Give them, or name a record to start from: base = "P-1h".'
        )
    given["architecture"] = _architecture(given["architecture"], source)
    given["reported"] = {m: Reported(**r) for m, r in given.get("reported", {}).items()}
    try:
        return Record(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error


def read_toml(path: Path) -> Record:
    """A user's own experiment. With `base = "P-1h"` every field not given is that record's (of `preset`, if given)."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}. Expected lines such as T = 30.") from error
    base = values.pop("base", None)
    preset = values.pop("preset", "paper")
    values.setdefault("name", path.stem)
    if base is not None:
        start = to_plain(named_record(base, preset).override(cost=values.get("cost")))
        architecture = values.get("architecture", {})
        if not isinstance(architecture, dict):
            raise ValueError(f"{path}: architecture is {architecture!r}; expected a table, [architecture].")
        if architecture.get("kind", start["architecture"]["kind"]) == start["architecture"]["kind"]:
            values["architecture"] = {**start["architecture"], **architecture}
        values = {**start, "reported": {}, **values}
    values["preset"] = "own"
    return from_plain(values, str(path))


def read_record_json(path: Path) -> Record:
    """A whole record as JSON: its fields, or an object that holds them as "record", such as the one of a run folder."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}.") from error
    values = values.get("record", values) if isinstance(values, dict) else values
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no record; expected an object with fields such as T, K and learning_rates.")
    return from_plain({"name": path.stem, **values, "preset": "own", "reported": {}}, str(path))


READERS: dict[str, Callable[[Path], Record]] = {".toml": read_toml, ".json": read_record_json}
"""Kinds of files that hold a record, by how their names end."""


def find_record(what: str | Path | Record, preset: str = "paper") -> Record:
    """A record as it is, by name, or from a TOML or JSON file."""
    if isinstance(what, Record):
        return what
    path = Path(what)
    if path.suffix in READERS:
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path}. Give a TOML or JSON file, or the name of a record.")
        return READERS[path.suffix](path)
    return named_record(str(what), preset)


def _architecture(values: Any, source: str) -> Architecture:
    if not isinstance(values, Mapping):
        raise ValueError(f"{source}: architecture is {values!r}; expected a table with kind and sizes.")
    kind = values.get("kind", "layered")
    if kind not in KINDS:
        raise ValueError(f"{source}: {unknown('kind of architecture', str(kind), KINDS)}")
    chosen = KINDS[kind]
    _check_names(values, [f.name for f in fields(chosen)], f"{source}, architecture")
    net: Architecture = chosen(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
    return net


def _check_names(given: Mapping[str, Any], known: list[str], source: str) -> None:
    strange = next((name for name in given if name not in known), None)
    if strange is not None:
        raise ValueError(f"{source}: {unknown('field', strange, known)}")


LEFT_OUT = ("preset", "reported")
"""Fields that a file of one's own does not set."""


def to_toml(record: Record, reasons: Mapping[str, str] | None = None, title: str = "") -> str:
    """Every field of the record, tables last; `reasons` go above their fields, `title` above everything."""
    reasons = reasons or {}
    values = {name: value for name, value in to_plain(record).items() if name not in LEFT_OUT and value is not None}
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
        # A JSON string is a TOML string, but for the one character that only JSON leaves as it is.
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v, name) for v in value) + "]"
    raise ValueError(f"{name} is {value!r}, which a TOML file cannot hold. Write the record as JSON instead.")

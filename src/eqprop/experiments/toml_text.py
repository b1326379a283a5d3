"""A record as the text of a TOML file that `eqprop train` takes, with the reasons for its values as comments."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from eqprop.experiments.plain import to_plain
from eqprop.experiments.record import Record

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

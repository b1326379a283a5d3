"""A spec as TOML: every setting, section by section, in the format of the package's papers/*.toml."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from eqprop.run.spec import SECTIONS, Spec

WIDTH = 110


def to_toml(
    spec: Spec, reasons: Mapping[str, str] | None = None, title: str = "", origins: Mapping[str, str] | None = None
) -> str:
    """All settings of a spec.

    reasons     comments above settings, by flat name       title       a comment at the top
    origins     comments beside settings, by their place, such as "phases.T"; those that are not set are named then
    """
    values, reasons, origins = spec.to_dict(), reasons or {}, origins or {}
    name = _key(values.pop("name"))
    head = {key: value for key, value in values.items() if key not in SECTIONS and value not in ("", {})}
    lines = [*_comment(title), f"[{name}]", *_lines(head, reasons, {})]
    for section in SECTIONS:
        beside = {key: origin for key in values[section] if (origin := origins.get(f"{section}.{key}"))}
        lines += ["", f"[{name}.{section}]", *_lines(values[section], reasons, beside)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any], reasons: Mapping[str, str], beside: Mapping[str, str]) -> Iterator[str]:
    for key, value in ({"kind": table.get("kind")} | dict(table)).items():
        origin = f"  # {beside[key]}" if key in beside else ""
        if value is not None:
            yield from _comment(reasons.get(key, ""))
            yield f"{_key(key)} = {_value(value, key)}{origin}"
        elif origin:
            yield f"# {_key(key)} is not set ({beside[key]})"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for part in text.splitlines() for line in textwrap.wrap(part, WIDTH)]


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else json.dumps(name)


def _value(value: Any, name: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML string, except for the one character that only JSON leaves unescaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = (f"{_key(k)} = {_value(v, f'{name}.{k}')}" for k, v in value.items() if v is not None)
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if isinstance(value, list | tuple):
        parts = [_value(v, name) for v in value]
        text = f"[{', '.join(parts)}]"
        return text if len(text) <= WIDTH else "[\n" + "".join(f"    {part},\n" for part in parts) + "]"
    raise ValueError(f"{name} is {value!r}, which a TOML file cannot hold. Write the experiment as JSON instead.")

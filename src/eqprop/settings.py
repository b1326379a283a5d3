"""Settings are declared once: a type with limits, a default and one sentence of help, read by msgspec.

    class Phases(Section):
        T: Annotated[int, about("Steps of the free phase.", common=True, ge=1, le=1_000_000)] = 50

Files, options of the command line, their help, the reference page and the messages about bad values come from it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from eqprop.messages import shown, unknown

LARGEST = 3.4028234e38
"""Numbers beyond this are infinite in float32, in which networks are trained."""


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of a spec, or a table in one."""


def about(help: str, *, common: bool = False, flat: str | None = None, flag: str | None = None, **limits: Any) -> Meta:
    """What a field says of itself.

    help        one sentence
    common      whether `--help` shows it, or only `--help-all`
    flat        its name as an option where the field's own would not be clear there
    flag        its option on the command line where that has another name
    limits      ge, gt, le, lt of numbers, min_length of lists and text
    """
    return Meta(description=help, extra={"common": common, "flat": flat, "flag": flag}, **limits)


Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[int, Meta(gt=0)]


@dataclass(frozen=True)
class Field:
    """A declared field: where it stands, its name as an option, its type, default and help.

    varies      whether another kind of net has another default
    """

    section: str
    leaf: str
    type: Any
    default: Any
    meta: Meta
    varies: bool = False

    @property
    def flat(self) -> str:
        return str((self.meta.extra or {}).get("flat") or self.leaf)

    @property
    def flag(self) -> str:
        """Its option on the command line."""
        given = (self.meta.extra or {}).get("flag")
        return given or f"--{self.flat.replace('_', '-')}"

    @property
    def common(self) -> bool:
        return bool((self.meta.extra or {}).get("common"))

    @property
    def help(self) -> str:
        return str(self.meta.description)

    @property
    def place(self) -> str:
        return f"{self.section}.{self.leaf}" if self.section else self.leaf


def fields_of(kind: type[Struct], section: str = "") -> Iterator[Field]:
    """The declared fields of a section that have a help text."""
    hints = get_type_hints(kind, include_extras=True)
    for f in msgspec.structs.fields(kind):
        meta = _meta(hints[f.name])
        if meta is not None:
            default = f.default if f.default_factory is msgspec.NODEFAULT else f.default_factory()
            yield Field(section, f.name, hints[f.name], default, meta)


def _meta(kind: Any) -> Meta | None:
    """The first description in a type: of `Annotated[int, ...] | None` that of the int."""
    if get_origin(kind) is Annotated:
        return next((m for m in get_args(kind)[1:] if isinstance(m, Meta) and m.description), None)
    return next((m for m in map(_meta, get_args(kind)) if m is not None), None)


def check(values: object, kind: Any, where: str) -> Any:
    """Make a value of this type of plain data; errors name the field, `where` first."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_explained(error, values, kind, where)) from error


def check_fields(made: Struct) -> None:
    """Check the fields of a Struct that was made in Python: msgspec checks only what it reads."""
    for name, kind in get_type_hints(type(made), include_extras=True).items():
        msgspec.structs.force_setattr(made, name, check(getattr(made, name), kind, name))


def _explained(error: msgspec.ValidationError, values: Any, kind: Any, where: str) -> str:
    """One sentence for msgspec's: the field with its section, what was got, what is expected."""
    if isinstance(error.__cause__, ValueError | TypeError):
        return f"{where}: {error.__cause__}"
    inner = bare(kind)
    if isinstance(inner, type) and issubclass(inner, Struct) and isinstance(values, Mapping):
        return _of_field(values, inner, where)
    if _is_mapping(inner) and isinstance(values, Mapping):
        for name, value in values.items():
            if not isinstance(name, str):
                return f"{where} has the key {shown(name)}; expected a name."
            if (found := _tried(value, get_args(inner)[1])) is not None:
                return _explained(found, value, get_args(inner)[1], f"{where}.{name}")
    if get_origin(inner) is Literal and isinstance(values, str):
        return unknown(where, values, get_args(inner))
    return f"{where} is {shown(values)}; expected {described(kind)}."


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _of_field(values: Mapping[Any, Any], kind: type[Struct], where: str) -> str:
    """The sentence for the first field of a table that is wrong."""
    hints = get_type_hints(kind, include_extras=True)
    known = kind.__struct_fields__
    strange = next((name for name in values if name not in known), None)
    if strange is not None:
        return unknown(f"field of {where}" if where else "field", str(strange), known)
    for name, value in values.items():
        if (error := _tried(value, hints[name])) is not None:
            return _explained(error, value, hints[name], f"{where}.{name}" if where else name)
    missing = [f.name for f in msgspec.structs.fields(kind) if f.required and f.name not in values]
    return f"{where} lacks {', '.join(missing)}."


def _tried(value: Any, kind: Any) -> msgspec.ValidationError | None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return error
    return None


def bare(kind: Any) -> Any:
    """A type without its annotations and without None."""
    if get_origin(kind) is Annotated:
        return bare(get_args(kind)[0])
    rest = [k for k in get_args(kind) if k is not type(None)]
    is_optional = get_origin(kind) in (Union, UnionType) and len(rest) == 1
    return bare(rest[0]) if is_optional else kind


def _limits(kind: Any) -> dict[str, Any]:
    """The limits of an annotated type."""
    names = ("ge", "gt", "le", "lt", "min_length", "max_length")
    metas = [m for m in get_args(kind)[1:] if isinstance(m, Meta)]
    return {name: v for m in metas for name in names if (v := getattr(m, name)) is not None}


def described(kind: Any) -> str:
    """What values of a type are, in words: "a whole number from 1 to 100"."""
    limits: dict[str, Any] = {}
    while get_origin(kind) is Annotated:
        limits |= _limits(kind)
        kind = get_args(kind)[0]
    parts, origin = get_args(kind), get_origin(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if kind in (int, float):
        return f"{'a whole' if kind is int else 'a'} number{_range(limits)}"
    if kind is bool or kind is str or kind is type(None):
        return {bool: "true or false", str: f"text{_length(limits)}"}.get(kind, "nothing")
    if origin is tuple:
        return f"a list{'' if ... in parts else f' of {len(parts)}'}, each {described(parts[0])}"
    if _is_mapping(kind):
        return "a table" if parts[1] is Any else f"a table by name, each {described(parts[1])}"
    if parts:
        return " or ".join(described(part) for part in parts if part is not type(None))
    return "a table" if isinstance(kind, type) and (issubclass(kind, Struct) or is_dataclass(kind)) else "plain data"


def _range(limits: Mapping[str, Any]) -> str:
    least, most = limits.get("ge"), limits.get("le")
    if most == LARGEST:
        most, least = None, None if least == -LARGEST else least
        if least is None and "gt" not in limits:
            return ", finite"
    if least is not None and most is not None:
        return f" from {least} to {most}"
    below = f" to below {limits['lt']:g}" if "lt" in limits else ""
    if "gt" in limits:
        return f" above {limits['gt']:g}" + (f" and below {limits['lt']:g}" if "lt" in limits else "")
    if least is not None:
        return f" from {least:g}{below}" if below else f", {least:g} or more"
    return ""


def _length(limits: Mapping[str, Any]) -> str:
    least, most = limits.get("min_length", 0), limits.get("max_length")
    return f" of {least} to {most} characters" if most is not None else ""


Kept = TypeVar("Kept", bound=Section)
_made: dict[tuple[type[Section], Any], Any] = {}


def extended(base: type[Kept], part: Any, taken: Collection[str] = ()) -> type[Kept]:
    """A section with the settings that a part from outside declares.

    They are the fields of `part.Settings`, a dataclass or a Struct, or those of the part itself if it is one of these;
    what the spec has already (`taken`) comes from there.
    """
    declared = getattr(part, "Settings", part)
    if not isinstance(declared, type) or not (is_dataclass(declared) or issubclass(declared, Struct)):
        return base
    key = (base, declared)
    if key not in _made:
        there = {*taken, *base.__struct_fields__}
        found = [one for one in _declared(declared) if one[0] not in there]
        name = f"{declared.__name__}Settings"
        _made[key] = msgspec.defstruct(
            name, found, bases=(base,), frozen=True, kw_only=True, forbid_unknown_fields=True
        )
    made: type[Kept] = _made[key]
    return made


def _declared(part: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and default of each field that plain data can give."""
    hints = get_type_hints(part, include_extras=True)
    if issubclass(part, Struct):
        for f in msgspec.structs.fields(part):
            yield f.name, _told(hints[f.name], f.name), f.default
        return
    for field in dataclass_fields(part):
        kind = hints[field.name]
        plain = re.fullmatch(r"[\w\[\], .|']*", str(kind)) is not None and "Tensor" not in str(kind)
        if (field.init and plain) or get_origin(kind) is Annotated or kind in (int, float, str, bool):
            default = field.default
            if default is MISSING:
                default = msgspec.NODEFAULT if field.default_factory is MISSING else field.default_factory()
            yield field.name, _told(kind, field.name), default


def _told(kind: Any, name: str) -> Any:
    return kind if _meta(kind) is not None else Annotated[kind, about(f"{name}, of a part from outside.")]

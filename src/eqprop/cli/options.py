"""Options of commands: one for every setting of a spec, made from its declaration, in a panel per section."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from eqprop.run.own import OwnFunction, load_own, meet_machine
from eqprop.run.spec import EVERY_OTHER, declared
from eqprop.settings import Field, bare

PANELS = {
    "model": "Model",
    "cost": "Model",
    "machine": "Model",
    "phases": "Phases and estimator",
    "estimator": "Phases and estimator",
    "optimizer": "Optimizer",
    "data": "Data",
    "run": "Run",
}
"""The panel of the help that a section's options stand in, and their order."""
METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT", tuple: "LIST"}
Command = Callable[..., None]


def with_settings(*names: str, without: Iterable[str] = (), defaults: bool = True) -> Callable[[Command], Command]:
    """Add an option to a command for each of these settings, or for all; it gets those that are given as `settings`.

    names       flat names, all shown by --help, with no default; without names all settings, of which --help shows
                the common ones
    without     settings that do not concern the command
    defaults    whether the help has the defaults of all settings: not where a command has others
    """
    left_out = set(without)
    fields = [f for f in declared() if (not names or f.flat in names) and f.flat not in left_out]
    fields.sort(key=lambda f: list(PANELS).index(f.section))

    def decorate(command: Command) -> Command:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
        told_of = told if defaults and not names else lambda f: f.help
        made = [_parameter(f, told_of(f), hidden=not (names or f.common)) for f in fields]
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own] + made

        @functools.wraps(command)
        def called(**given: Any) -> None:
            given.pop("help_all", None)
            settings = {f.flat: value for f in fields if (value := read(f, given.pop(f.flat))) is not None}
            meet_machine(settings.get("machine"))
            command(**given, settings=settings)

        if any(p.annotation.__metadata__[0].hidden for p in parameters):
            parameters.append(_HELP_ALL)
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        return called

    return decorate


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        for parameter in ctx.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option("--help-all", metavar="", callback=_show_all, is_eager=True, help="Show every option and exit."),
    ],
)


def _parameter(field: Field, help: str, hidden: bool) -> inspect.Parameter:
    """The option of a setting: text, which `read` makes a value of; None where it is not given."""
    kind = list[str] if is_repeatable(field) else bool if bare(field.type) is bool else str
    flags = [field.flag] if kind is not bool else [f"{field.flag}/--no-{field.flag.removeprefix('--')}"]
    option = typer.Option(
        *flags,
        metavar="" if kind is bool else metavar(field),  # a switch takes no value
        help=help.replace("[", r"\["),  # it is markup
        rich_help_panel=PANELS[field.section],
        hidden=hidden,
    )
    return inspect.Parameter(
        field.flat, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def is_repeatable(field: Field) -> bool:
    """Whether an option is given several times, as NAME=VALUE."""
    return metavar(field).startswith("NAME=")


def metavar(field: Field) -> str:
    """What stands for an option's value in the help."""
    kind = bare(field.type)
    if field.flat == "rates":
        return "NAME=RATE"
    if field.flat in NAMED_VALUES:
        return "NAME=VALUE"
    if get_origin(kind) is Literal:
        choices = "|".join(get_args(kind))
        return choices if len(choices) < 20 else "NAME"
    return METAVARS.get(kind) or METAVARS.get(get_origin(kind) or kind, "JSON" if field.section == "model" else "TEXT")


def shown_default(field: Field) -> str:
    """A default as help, `eqprop show` and the reference page have it; empty where there is none."""
    value = field.default
    if value is None or not isinstance(value, int | float | str | tuple | Mapping):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{number:g}" if name == EVERY_OTHER else f"{name}={number:g}" for name, number in value.items()
        )
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"


def told(field: Field) -> str:
    """A setting's sentence of help, with its default."""
    default = shown_default(field)
    of = " in layered nets" if field.varies else ""
    return f"{field.help} [default: {default}{of}]" if default else field.help


def read(field: Field, given: Any) -> Any:
    """The value of an option; text that is no such value is left to the spec, which says what it expects."""
    if given is None or isinstance(given, bool):
        return given
    if isinstance(given, Sequence) and not isinstance(given, str):
        return _rates(given) if field.flat == "rates" else _named_values(given, field.flag)
    kind = bare(field.type)
    if kind in (int, float):
        return _number(given)
    if given[:1] in "[{":
        return _json(given)
    return [_number(part.strip()) for part in given.split(",")] if get_origin(kind) is tuple else given


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


NAMED_VALUES = {"optimizer_options": "momentum=0.9", "augmentation": "crop=4", "normalisation": "scale=3"} | {
    "keep_at_rest": "radius=0.95",
    "imperfections": "read_noise=0.01",
    "machine_options": "reads=10",
}
"""Settings that are tables, with an example."""


def _named_values(given: Sequence[str], flag: str) -> dict[str, Any] | None:
    """["momentum=0.9", "nesterov=true"] as numbers, booleans or text."""
    out = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"{flag} is {text!r}; expected NAME=VALUE, such as {_example(flag)}.")
        out[name] = _json(value)
    return out or None


def _example(flag: str) -> str:
    return next(NAMED_VALUES[f.flat] for f in declared() if f.flag == flag)


def _rates(given: Sequence[str]) -> dict[str, float] | None:
    """["W01=0.04", "W12=0.08"], or ["0.05"] for every parameter."""
    rates = {}
    for text in given:
        name, separator, value = text.rpartition("=")
        try:
            rates[name if separator else EVERY_OTHER] = float(value)
        except ValueError:
            raise ValueError(f"--lr is {text!r}; expected NAME=RATE, such as W01=0.04, or one rate for all.") from None
    return rates or None


def words_of(settings: Mapping[str, Any]) -> Iterator[str]:
    """The options that give these settings: `eqprop train` with them is what a check was made of."""
    fields = {f.flat: f for f in declared()}
    for name, value in settings.items():
        flag = fields[name].flag
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag.removeprefix('--')}"
        elif isinstance(value, Mapping):
            for part, one in value.items():
                text = one if isinstance(one, str) else json.dumps(one)
                yield from (flag, text if part == EVERY_OTHER else f"{part}={text}")
        else:
            yield from (flag, value if isinstance(value, str) else json.dumps(value))


def factory(settings: dict[str, Any]) -> OwnFunction | None:
    """Load the function of --model, and take it out of the settings."""
    where = settings.pop("function", None)
    return None if where is None else load_own(where)

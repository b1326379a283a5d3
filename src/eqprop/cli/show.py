"""eqprop show: every setting of an experiment, as a TOML file to copy and edit."""

from __future__ import annotations

from typing import Any

import typer

from eqprop import papers
from eqprop.cli import command
from eqprop.cli.common import Experiment, Json, Preset, check_json, give_json
from eqprop.cli.options import factory, with_settings
from eqprop.run.session import chosen
from eqprop.run.toml import to_toml


@command("show", "eqprop show toy", "eqprop show P-1h --preset tuned > mine.toml; eqprop train mine.toml")
@with_settings()
def show_experiment(
    experiment: Experiment, settings: dict[str, Any], preset: Preset = None, as_json: Json = None
) -> None:
    """Print every setting of an experiment, as a TOML file to copy and edit.

    Beside each setting stands where it comes from: the paper, a preset, an option given here, or the default.
    """
    check_json(as_json)
    spec, _ = chosen(experiment, factory(settings), {"preset": preset, **settings})
    give_json(spec.to_dict(), as_json)
    if as_json != "-":
        typer.echo(to_toml(spec, origins=papers.origins(spec)), nl=False)

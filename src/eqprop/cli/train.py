"""eqprop train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eqprop import papers
from eqprop.cli import command
from eqprop.cli.common import Experiment, Json, Logger, Preset, Quiet, check_json, give_result, stopping, watcher
from eqprop.cli.options import factory, with_settings
from eqprop.run import train
from eqprop.run.own import own_code
from eqprop.run.session import chosen


@command("train", "eqprop train P-1h --preset tuned --estimator ep,bptt", "eqprop train my.py:build --T 100 --lr 0.05")
@with_settings()
def train_experiment(
    experiment: Experiment,
    settings: dict[str, Any],
    preset: Preset = None,
    out: Annotated[Path | None, typer.Option(help=r"The run folder. \[default: runs/NAME-DATE-TIME]")] = None,
    logger: Logger = None,
    quiet: Quiet = False,
    as_json: Json = None,
) -> None:
    """Train an experiment, or your own net, in a run folder. Ctrl-C saves; eqprop resume continues.

    An option replaces the experiment's setting. A default holds where the experiment has none.
    """
    check_json(as_json)
    with stopping(), own_code(settings.get("function") or experiment):
        spec, own = chosen(experiment, factory(settings), {"preset": preset, **settings})
        if not quiet:
            for name in spec.estimators:
                if known := papers.caution(spec, name):
                    typer.echo(known, err=True)
        result = train(spec, out, model=own, watch=watcher(quiet, logger))
    give_result(result, as_json, quiet)

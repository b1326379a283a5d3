"""eqprop resume."""

from __future__ import annotations

from typing import Any

from eqprop.cli import command
from eqprop.cli.common import Folder, Json, Logger, Quiet, check_json, give_result, stopping, watcher
from eqprop.cli.options import factory, with_settings
from eqprop.run import resume
from eqprop.run.api import RESUMABLE
from eqprop.run.own import own_code


@command("resume", "eqprop resume runs/p1h", "eqprop resume runs/p1h --epochs 60")
@with_settings("data", "function", "machine", *RESUMABLE)
def resume_run(
    folder: Folder, settings: dict[str, Any], logger: Logger = None, quiet: Quiet = False, as_json: Json = None
) -> None:
    """Continue a run where it stopped, with its own settings.

    The options are the settings that may change on resume; the run keeps all others.
    """
    check_json(as_json)
    settings.pop("machine", None)  # a class of your own, which is known now; the run says which machine it has
    with stopping(), own_code(settings.get("function")):
        result = resume(folder, model=factory(settings), watch=watcher(quiet, logger), **settings)
    give_result(result, as_json, quiet)

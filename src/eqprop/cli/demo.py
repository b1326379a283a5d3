"""eqprop demo: a tour in a few minutes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from eqprop import papers
from eqprop.cli import command
from eqprop.cli.common import Quiet, new_console, results_table, stopping, watcher
from eqprop.cli.options import with_settings
from eqprop.run.api import begin_or_resume
from eqprop.run.folder import check_free, is_run

SAMPLES, EPOCHS = 20_000, 3
"""A third of MNIST, three times: enough to see that EP and BPTT learn alike."""


@command("demo", "eqprop demo", "eqprop demo --samples 2000 --epochs 1 --out small")
@with_settings("samples", "epochs", "engine", "threads")
def demo(
    settings: dict[str, Any],
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("demo"),
    quiet: Quiet = False,
) -> None:
    """Check gradients on the toy model, train a network by EP and by BPTT, and write a page that shows both."""
    from eqprop.report.page import write_report
    from eqprop.report.runs import collect, rows

    started = time.monotonic()
    console = new_console(quiet=quiet)
    if not is_run(out / "p-1h") and not (out / "toy").is_dir():
        check_free(out)
    console.print("1. The toy model: EP's updates against the gradients of BPTT, step by step", style="bold")
    console.print(_toy(out / "toy"))
    settings = {"samples": SAMPLES, "epochs": EPOCHS, **settings}
    of = f"P-1h on {settings['samples']} MNIST images"
    console.print(f"\n2. {of}, by EP and by BPTT from the same weights", style="bold")
    spec = papers.find("P-1h").override(estimators="ep,bptt", **settings)
    with stopping():
        begin_or_resume(spec, out / "p-1h", watch=watcher(quiet))
    written = write_report(out)
    console.print()
    console.print(results_table(rows(collect(out).runs)))
    console.print(f"Page: {written.page.resolve()}", soft_wrap=True)
    console.print(f"{time.monotonic() - started:.0f} s. Results are kept; remove {out} to run it again.")


def _toy(folder: Path) -> str:
    """Compare on the paper's toy model, draw its figures, and return the verdict."""
    from eqprop.report.gdu import read_document, write_folder
    from eqprop.run.laboratory import compare, find_problem

    document = read_document(folder)
    if document is None:
        subject = find_problem("toy", dtype=torch.float64, trains=False)
        document, report = compare(subject)
        write_folder(folder, document, report.traces_to_dict())
    return str(document["budget"]["verdict"])

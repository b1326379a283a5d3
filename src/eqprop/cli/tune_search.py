"""The search of eqprop tune: one worker in this process, or several in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eqprop.cli.options import factory, give_json
from eqprop.cli.tune import Wish, progress
from eqprop.experiments.plain import to_plain
from eqprop.experiments.toml_text import to_toml
from eqprop.files import write_json, write_text
from eqprop.training.plan import describe
from eqprop.tuning.folder import prepare_folder
from eqprop.tuning.search import Found, Search, result, work

JOURNAL, DOCUMENT, RECORD = "study.journal", "search.json", "best.toml"


def run_search(wish: Wish, trials: int, storage: str | None, workers: int) -> None:
    """Search to the end and write the best record; every worker does, and writes the same."""
    images = wish.images()
    asked = {"search": to_plain(wish.record), "model": wish.model, "data": describe(images)}
    prepare_folder(wish.folder, asked)
    where = storage or str(wish.folder / JOURNAL)
    threads = wish.machine.threads or max((os.cpu_count() or 1) // workers, 1)
    torch.set_num_threads(threads)
    machine = replace(wish.machine, threads=threads)
    team = [_start(threads) for _ in range(workers - 1)]
    try:
        with progress(wish.quiet) as tell:
            own = factory(wish.model)
            wanted = Search(wish.record, wish.folder, images, trials, where, own, machine, wish.budget, tell)
            work(wanted)
    finally:
        _end(team)
    found = result(wanted)
    _write(wish.folder, found, wish)
    give_json(found.document, wish.as_json)
    if not wish.quiet and wish.as_json != "-":
        console = Console(highlight=False)
        console.print(trials_table(found.document))
        console.print(f"Train with it: eqprop train {wish.folder / RECORD}", soft_wrap=True, markup=False)


def _start(threads: int) -> subprocess.Popen[bytes]:
    """A worker more: the same command in a process of its own, silent."""
    words = [*_without(sys.argv[1:], ("--workers", "--threads", "--json"))]
    command = [sys.executable, "-m", "eqprop", *words, "--workers", "1", "--threads", str(threads), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _without(words: list[str], options: tuple[str, ...]) -> list[str]:
    """The words of a command without these options and their values."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in options:
            skip = True
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            kept.append(word)
    return kept


def _end(team: list[subprocess.Popen[bytes]]) -> None:
    """Wait for the other workers; where this one was stopped or failed, they are asked to stop first."""
    if sys.exc_info()[0] is not None:
        for worker in team:
            if worker.poll() is None:
                worker.send_signal(signal.SIGTERM)
    for worker in team:
        code = worker.wait()
        if code not in (0, 130, 143):
            how = f"by signal {-code}" if code < 0 else f"with code {code}"
            print(f"A worker ended {how}; the others did its share.", file=sys.stderr)


def _write(folder: Path, found: Found, wish: Wish) -> None:
    title = (
        f"{wish.record.name}, the best of {len(found.document['trials'])} trials of a search with seed "
        f"{wish.record.seed}: held-out error {found.document['held_out_error']:.2f} %"
    )
    write_text(folder / RECORD, to_toml(found.record, title=title))
    write_json(folder / DOCUMENT, found.document)


def trials_table(document: Mapping[str, Any], most: int = 8) -> Table:
    """The best trials."""
    ended = [t for t in document["trials"] if t["held_out_error"] is not None]
    states = [t["state"] for t in document["trials"]]
    effort = document["effort"]
    table = Table(
        title=f"{document['name']}: {len(ended)} trials trained to the end, {states.count('pruned')} given up earlier; "
        f"{effort['samples']} samples, {effort['epochs']} epochs, {effort['validation']} held out"
    )
    names = list(ended[0]["values"])
    for heading in ("trial", "held out, %", *names):
        table.add_column(heading, justify="right")
    for trial in sorted(ended, key=lambda t: (t["held_out_error"], t["number"]))[:most]:
        values = [f"{trial['values'][name]:.3g}" for name in names]
        table.add_row(str(trial["number"]), f"{trial['held_out_error']:.2f}", *values)
    return table

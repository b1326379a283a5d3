"""Progress on standard error, where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def bars() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[float], None]]:
    """A bar for one comparison; the function given is told the fraction done."""
    with bars() as progress:
        task = progress.add_task(name, total=1.0)
        yield lambda fraction: progress.update(task, completed=fraction)

"""One HTML file that says what came out: no network, no library, readable on a phone and on paper."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from eqprop.experiments.beyond_records import LITERATURE
from eqprop.files import write_text
from eqprop.report.collect import Contents, Point, Run, collect
from eqprop.report.curves import Series, draw, hover_data, series
from eqprop.report.drawing import save
from eqprop.report.error_curves import error_curves, panel_of
from eqprop.report.gdu_folder import write_figure
from eqprop.report.tables import Row, rows, to_csv, to_latex
from eqprop.training.watch import duration
from eqprop.version import __version__

PAGE, CSV, LATEX, CURVES = "report.html", "table.csv", "table.tex", "curves"
VERDICTS = {
    "yes": "reproduced",
    "no": "not reproduced",
    "unfinished": "not at full length",
    "other settings": "other settings",
    "none": "",
}


@dataclass(frozen=True)
class Written:
    """The files of a report."""

    page: Path
    csv: Path
    latex: Path
    curves: Path


def write_report(folder: Path, out: Path | None = None, *, with_curves: bool = True) -> Written:
    """The page; beside it the table as CSV and LaTeX, and the curves of each run as PNG and PDF.

    All of it lies in the folder itself, or in another. Drawing takes longer than all the rest: where the page is only
    brought up to date in between, it can be left for the end.
    """
    contents = collect(folder)
    place = out or folder
    table = rows(contents.runs)
    written = Written(place / PAGE, place / CSV, place / LATEX, place / CURVES)
    write_text(written.csv, to_csv(table))
    write_text(written.latex, to_latex(table))
    for run in contents.runs if with_curves else ():
        panel = panel_of(run)
        if panel.curves:
            write_figure(written.curves / _file_name(run, folder), save(error_curves([panel])))
    write_text(written.page, render(contents))
    return written


def _file_name(run: Run, folder: Path) -> str:
    """After the folder of the run, as paper-P-1h."""
    return "-".join(run.folder.relative_to(folder).parts) or run.folder.resolve().name


def render(contents: Contents) -> str:
    """The page as text."""
    table = rows(contents.runs)
    parts = [_head(contents), _table(table), _figures(contents.runs), _pictures(contents)]
    parts += [_settings(contents.runs), _sources(table)]
    style, script = (files("eqprop.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(_title(contents))}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n{''.join(parts)}\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _title(contents: Contents) -> str:
    names = list(dict.fromkeys(run.record.name for run in contents.runs))
    return f"eqprop: {', '.join(names)}" if names else "eqprop: GDU figures"


def _head(contents: Contents) -> str:
    trained = len(contents.runs)
    runs = f"{trained} run{'s' if trained != 1 else ''}" if trained else "no training runs"
    return (
        f"<header><h1>{escape(_title(contents))}</h1>\n"
        f'<p class="soft">Equilibrium propagation and backpropagation through time, {runs}. '
        f"Made by eqprop {__version__} from the files of the run folders.</p></header>\n"
    )


def _table(table: list[Row]) -> str:
    if not table:
        return ""
    runs = list(dict.fromkeys(id(row.run) for row in table))
    body = "".join(_rows_of_run([row for row in table if id(row.run) == run]) for run in runs)
    return (
        '<section id="results"><h2>Errors on the test set</h2><p class="soft">Mean and standard deviation over trials '
        "at the last epoch, in percent; in parentheses the running train error. A row counts as reproduced if its mean "
        "lies within two of the paper’s standard deviations of the paper’s mean, or below.</p>"
        '<div class="wide"><table>\n<thead><tr><th>network</th><th class=text>method</th><th>ours</th><th>paper</th>'
        "<th class=text></th><th>trials</th><th>epochs</th><th>T</th><th>K</th></tr></thead>\n"
        f"{body}{_literature(table)}</table></div></section>\n"
    )


def _literature(table: list[Row]) -> str:
    """What the paper found in the literature, below its rows where there are any; rows that were trained are above."""
    trained = {row.run.record.name for row in table}
    if not any(row.reported for row in table):
        return ""
    found = [row for row in LITERATURE if row.record not in trained]
    lines = "".join(
        f'<tr><th scope="row">{escape(row.source)}</th><td class="text">EP</td><td>–</td><td>{row.errors}</td>'
        f'<td class="text soft">literature</td><td></td>'
        f"<td>{row.epochs}</td><td>{row.T}</td><td>{row.K or '–'}</td></tr>\n"
        for row in found
    )
    return f'<tbody class="literature">{lines}</tbody>\n' if lines else ""


def _rows_of_run(table: list[Row]) -> str:
    """The network once, with what is not as the paper prints it, and a row a method."""
    run = table[0].run
    changes = _differences(run)
    note = f'<span class="note">{escape(changes)}</span>' if changes else ""
    name = f'<th scope="rowgroup" rowspan="{len(table)}">{escape(run.title)}{note}</th>'
    rows = "".join(_row(row, name if n == 0 else "") for n, row in enumerate(table))
    return f"<tbody>{rows}</tbody>\n"


def _row(row: Row, name: str) -> str:
    record, paper = row.run.record, row.reported
    lost = f", {row.diverged} diverged" if row.diverged else ""
    cells = [
        f'<td class="text">{escape(record.label(row.method))}</td>',
        f'<td data-value="{"" if row.test is None else row.test.mean}">{_point(row.test, row.train)}</td>',
        f"<td>{'–' if paper is None else str(paper)}</td>",
        f'<td class="text {row.verdict if row.verdict in ("yes", "no") else "soft"}">{VERDICTS[row.verdict]}</td>',
        f"<td>{0 if row.test is None else row.test.trials}{lost}</td>",
        f"<td>{0 if row.test is None else row.test.epoch} of {record.epochs}</td>",
        f"<td>{record.T}</td><td>{record.K}</td>",
    ]
    return f'<tr data-row="{escape(row.run.title)} {row.method}">{name}{"".join(cells)}</tr>\n'


def _differences(run: Run) -> str:
    settings = run.settings
    held = [f"tested on {settings.validation} held-out training samples"] if settings.validation else []
    few = [f"trained on {settings.samples} samples"] if settings.samples else []
    return ", ".join([*run.changes, *held, *few])


def _point(test: Point | None, train: Point | None) -> str:
    if test is None:
        return "–"
    spread = "" if test.std is None else f" ± {test.std:.2f}"
    return f"{test.mean:.2f}{spread}" + ("" if train is None else f" ({train.mean:.2f})")


def _figures(runs: list[Run]) -> str:
    drawn = [(run, series(run)) for run in runs]
    shown = [_figure(run, curves) for run, curves in drawn if curves]
    if not shown:
        return ""
    return (
        '<section id="curves"><h2>Errors throughout learning</h2><p class="soft">Mean over trials; shaded zones show '
        "plus and minus one standard deviation. Solid: test error; dashed: running train error. Point at a figure, or "
        "use the arrow keys, for values; a button switches its curve off.</p>"
        f'<div class="figures">{"".join(shown)}</div>'
        "</section>\n"
    )


def _figure(run: Run, curves: list[Series]) -> str:
    epochs = max(p.epoch for s in curves for p in s.points)
    buttons = "".join(
        f'<button type="button" class="{s.method} {s.kind}" data-series="{s.key}" aria-pressed="true"><i></i>'
        f"{escape(s.label)}</button>"
        for s in curves
    )
    trials = max(p.trials for s in curves for p in s.points)
    data = json.dumps(hover_data(curves, epochs)).replace("<", "\\u003c")
    return (
        f"<figure data-curves><h3>{escape(run.title)}</h3>"
        f"{draw(curves, epochs, run.title)}"
        f'<div class="tip" role="status" hidden></div><div class="legend">{buttons}</div>'
        f"<figcaption>{escape(str(run.record.architecture))}, {trials} trial{'s' if trials != 1 else ''}</figcaption>"
        f'<script type="application/json">{data}</script></figure>'
    )


def _pictures(contents: Contents) -> str:
    if not contents.pictures:
        return ""
    shown = "".join(
        f'<figure><img src="{p.source}" alt="{escape(p.caption)}"><figcaption>{escape(p.caption)}</figcaption></figure>'
        for p in contents.pictures
    )
    return f'<section id="gdu"><h2>Gradient-descending updates</h2><div class="figures">{shown}</div></section>\n'


def _settings(runs: list[Run]) -> str:
    if not runs:
        return ""
    return f'<section id="settings"><h2>Settings and provenance</h2>{"".join(map(_details, runs))}</section>\n'


def _details(run: Run) -> str:
    record, settings = run.plain["record"], run.plain["settings"]
    shown = {k: v for k, v in record.items() if k not in ("reported", "architecture", "name")}
    shown |= {f"network: {k}": v for k, v in record["architecture"].items() if v is not None}
    shown |= {k: v for k, v in settings.items() if v is not None}
    shown |= {f"data: {k}": v for k, v in run.plain["data"].items()}
    shown["wall time"] = ", ".join(f"{m} {duration(run.seconds(m))}" for m in settings["methods"])
    stopped = "".join(
        f'<p class="no">{method.upper()}, trial {line["trial"]}: {escape(line["diverged"]["reason"])}</p>'
        for method in settings["methods"]
        for line in run.diverged(method)
    )
    sessions = "".join(
        f'<p class="soft">Session {n} of {len(run.sessions)}</p>'
        + _pairs({**s["provenance"], "engines": ", ".join(f"{m}: {e}" for m, e in s["engines"].items())})
        for n, s in enumerate(run.sessions, start=1)
    )
    return (
        f"<details><summary>{escape(run.title)} <span class=soft>{escape(run.folder.name)}</span></summary>"
        f"{stopped}{_pairs(shown)}{sessions}</details>\n"
    )


def _pairs(values: Mapping[str, object]) -> str:
    items = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(_plain(v))}</dd>" for k, v in values.items())
    return f"<dl>{items}</dl>"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _sources(table: list[Row]) -> str:
    if not table:
        return ""
    return (
        f'<section id="sources"><h2>The table as text</h2><details><summary>CSV (<a href="{CSV}">{CSV}</a>)</summary>'
        f'<pre>{escape(to_csv(table))}</pre></details><details><summary>LaTeX (<a href="{LATEX}">{LATEX}</a>)</summary>'
        f"<pre>{escape(to_latex(table))}</pre></details></section>\n"
    )

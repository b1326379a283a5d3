"""Results as one HTML file: no network access, no libraries, readable on a phone and in print."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

import torch

from eqprop import papers
from eqprop.estimators.named import label
from eqprop.files import read_bytes, write_text
from eqprop.models.network import GraphNet
from eqprop.provenance import __version__
from eqprop.report.examined import Examination, examinations
from eqprop.report.figures import error_curves, panel_of, percent_ticks, save, write_figure
from eqprop.report.runs import KINDS, Contents, Picture, Point, Row, RunFolder, collect_all, rows, to_csv, to_latex
from eqprop.report.sections import compared, looked_at, what_is_seen
from eqprop.run.folder import AUGMENTED
from eqprop.run.log import Line, cosines
from eqprop.run.spec import SECTIONS
from eqprop.run.watch import duration

WIDTH, HEIGHT = 640.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 66.0, 14.0, 36.0, 54.0
STEPS = (1.0, 2.0, 5.0)


@dataclass(frozen=True)
class ErrorCurve:
    """A curve: an estimator and a kind of error, "test" or "train"."""

    estimator: str
    kind: str
    points: list[Point]

    @property
    def key(self) -> str:
        return f"{self.estimator}-{self.kind}"

    @property
    def label(self) -> str:
        return f"{label(self.estimator)} {self.kind}"


@dataclass(frozen=True)
class Axes:
    """Epochs on a linear axis, errors on a logarithmic one: train errors fall far below test errors."""

    epochs: int
    low: float
    high: float

    def x(self, epoch: float) -> float:
        span = max(self.epochs - 1, 1)
        return LEFT + (epoch - 1) / span * (WIDTH - LEFT - RIGHT)

    def y(self, error: float) -> float:
        clamped = min(max(error, self.low), self.high)
        share = math.log(clamped / self.low) / math.log(self.high / self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        return percent_ticks(self.low, self.high)


def series(run: RunFolder) -> list[ErrorCurve]:
    found = [ErrorCurve(m, kind, run.curve(m, kind)) for m in run.spec.estimators for kind in KINDS]
    return [s for s in found if s.points]


def axes(curves: Sequence[ErrorCurve], epochs: int, paper: Sequence[float] = ()) -> Axes:
    """Fit the axes to the curves, their bands and the paper's errors; 0 lies at the lower edge, 100 is the largest."""
    values = [v for s in curves for p in s.points for v in (p.mean, p.mean + (p.std or 0.0)) if v > 0]
    values += paper
    low, high = (min(values), max(values)) if values else (0.1, 10.0)
    high = min(_round(max(high * 1.05, low * 1.5), math.ceil), 100.0)
    return Axes(epochs, _round(min(max(low * 0.9, high / 1000.0), high / 2.0), math.floor), high)


def _round(value: float, direction: object) -> float:
    """Round to a tick, down or up."""
    power = 10.0 ** math.floor(math.log10(value))
    ladder = [power * step for step in (*STEPS, 10.0)]
    if direction is math.floor:
        return max(v for v in ladder if v <= value * 1.000001)
    return min(v for v in ladder if v >= value * 0.999999)


def draw(curves: Sequence[ErrorCurve], epochs: int, name: str, paper: Mapping[str, float]) -> str:
    """The SVG of one figure; paper: test errors by estimator."""
    frame = axes(curves, epochs, list(paper.values()))
    inside = [
        _grid(frame),
        *(_band(s, frame) for s in curves),
        *(_paper(n, v, frame) for n, v in paper.items()),
        *(_line(s, frame) for s in curves),
    ]
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" tabindex="0" '
        f'aria-label="{escape(name)}: errors over epochs">' + "".join(inside) + '<g class="marker"></g></svg>'
    )


def _grid(frame: Axes) -> str:
    parts = []
    for value in frame.ticks():
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8:g}" y="{y + 5:.1f}" text-anchor="end">{value:g}</text>')
    for epoch in _epoch_ticks(frame.epochs):
        x = frame.x(epoch)
        foot = HEIGHT - BOTTOM
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{foot:g}" y2="{foot + 5:g}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{foot + 23:g}" text-anchor="middle">{epoch}</text>')
    foot = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{foot:g}" y2="{foot:g}"/>')
    centre = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="name" x="{centre:g}" y="{HEIGHT - 6:g}" text-anchor="middle">epoch</text>')
    parts.append('<text class="name" x="4" y="20">error, %</text>')
    return "".join(parts)


def _epoch_ticks(epochs: int) -> list[int]:
    """About eight ticks, including the first epoch."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if epochs / s <= 8)
    return sorted({1, *range(step, epochs + 1, step)} - ({step} if step > 1 and step <= 1 + epochs * 0.04 else set()))


def _line(s: ErrorCurve, frame: Axes) -> str:
    path = " ".join(f"{'L' if n else 'M'}{frame.x(p.epoch):.1f} {frame.y(p.mean):.1f}" for n, p in enumerate(s.points))
    dot = s.points[-1]
    return (
        f'<g class="curve {s.estimator} {s.kind}" data-series="{s.key}"><path d="{path}"/>'
        f'<circle cx="{frame.x(dot.epoch):.1f}" cy="{frame.y(dot.mean):.1f}" r="3"/></g>'
    )


def _paper(estimator: str, error: float, frame: Axes) -> str:
    """The paper's test error across the figure."""
    y = frame.y(error)
    return (
        f'<line class="paper {escape(estimator)}" data-series="{escape(estimator)}-test" x1="{LEFT:g}" '
        f'x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
    )


def _band(s: ErrorCurve, frame: Axes) -> str:
    """Mean plus/minus one standard deviation."""
    points = [p for p in s.points if p.std is not None]
    if len(points) < 2:
        return ""
    over = [f"{frame.x(p.epoch):.1f},{frame.y(p.mean + (p.std or 0.0)):.1f}" for p in points]
    under = [f"{frame.x(p.epoch):.1f},{frame.y(p.mean - (p.std or 0.0)):.1f}" for p in reversed(points)]
    corners = " ".join([*over, *under])
    return f'<polygon class="band {s.estimator} {s.kind}" data-series="{s.key}" points="{corners}"/>'


def hover_data(curves: Sequence[ErrorCurve], frame: Axes) -> dict[str, object]:
    """Data for the script: where each epoch is drawn, and the values there."""
    return {
        "series": [
            {
                "key": s.key,
                "estimator": s.estimator,
                "label": s.label,
                "points": [
                    {
                        "epoch": p.epoch,
                        "mean": p.mean,
                        "std": p.std,
                        "trials": p.trials,
                        "x": round(frame.x(p.epoch), 1),
                        "y": round(frame.y(p.mean), 1),
                    }
                    for p in s.points
                ],
            }
            for s in curves
        ],
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
    }


PAGE, CSV, LATEX, CURVES = "report.html", "table.csv", "table.tex", "curves"
VERDICTS = {
    "yes": "reproduced",
    "lower": "lower than published",
    "no": "not reproduced",
    "unfinished": "unfinished",
    "other data": "other data",
    "other settings": "other settings",
    "none": "",
}


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report, and why runs were left out."""

    page: Path
    csv: Path
    latex: Path
    curves: Path
    left_out: tuple[str, ...] = ()


MOST_EXAMINED = 3
"""Runs whose nets are looked at again for a page; more would take minutes."""


def write_report(
    folder: Path | Sequence[Path],
    out: Path | None = None,
    *,
    with_curves: bool = True,
    examine: bool = True,
    gradients: bool = False,
) -> ReportFiles:
    """Write the page, the table as CSV and LaTeX, and the curves of each run as PNG and PDF.

    folder          a run folder, a folder of run folders, or several of them, whose runs are set side by side
    out             where to write; by default the folder itself, or the one that several lie in
    with_curves     draw the curves as files, which takes time: not needed for intermediate updates
    examine         load the nets, of three runs at most: errors by class, worst answers, settling, the doctor's verdict
    gradients       also compare the estimator's gradient of a mini-batch with BPTT's
    """
    contents = collect_all([folder] if isinstance(folder, Path) else folder)
    place = out or contents.folder
    table = rows(contents.runs)
    written = ReportFiles(place / PAGE, place / CSV, place / LATEX, place / CURVES, tuple(contents.left_out))
    write_text(written.csv, to_csv(table))
    write_text(written.latex, to_latex(table))
    for run in contents.runs if with_curves else ():
        panel = panel_of(run)
        if panel.curves:
            write_figure(written.curves / _file_name(run, contents.folder), save(error_curves([panel])))
    few = examine and len(contents.runs) <= MOST_EXAMINED
    seen = [(run, list(examinations(run, gradients))) for run in contents.runs] if few else []
    write_text(written.page, render(contents, seen))
    return written


def _file_name(run: RunFolder, folder: Path) -> str:
    """Named after the run's folder, such as paper-P-1h."""
    return "-".join(run.folder.relative_to(folder).parts) or run.folder.resolve().name


def render(contents: Contents, seen: Sequence[tuple[RunFolder, Sequence[Examination]]] = ()) -> str:
    """The page as HTML.

    seen    runs whose nets were looked at again, and what was seen
    """
    table = rows(contents.runs)
    parts = [_head(contents), _pictures(contents), _table(table), compared(contents.runs), _figures(contents.runs)]
    parts += [_seen(contents, seen), _augmented(contents.runs), _settings(contents.runs), _sources(table)]
    style, script = (files("eqprop.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(_title(contents))}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n{''.join(parts)}\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _title(contents: Contents) -> str:
    names = list(dict.fromkeys(run.spec.name for run in contents.runs))
    return f"eqprop: {', '.join(names)}" if names else "eqprop: GDU figures"


def _head(contents: Contents) -> str:
    trained = len(contents.runs)
    names = dict.fromkeys(label(name) for run in contents.runs for name in run.spec.estimators)
    runs = f"{', '.join(names)}: {trained} run{'s' if trained != 1 else ''}" if trained else "No training runs"
    return (
        f"<header><h1>{escape(_title(contents))}</h1>\n"
        f'<p class="soft">{escape(runs)}. '
        f"Written by eqprop {__version__} from run folders.</p>{_left_out(contents)}</header>\n"
    )


def _left_out(contents: Contents) -> str:
    if not contents.left_out:
        return ""
    items = "".join(f"<li>{escape(reason)}</li>" for reason in contents.left_out)
    return f"<p>Left out, as they are damaged:</p><ul>{items}</ul>"


JUDGED = (
    " A row counts as reproduced if every trial ended, none diverged, and their mean is at most two of the paper’s "
    "standard deviations from the paper’s. The paper’s number stands only beside a run with its data, network and "
    "number of samples, and with the settings of a preset."
)


def _table(table: list[Row]) -> str:
    """Errors by run and estimator; columns about the paper only where one of its numbers stands."""
    if not table:
        return ""
    runs = list(dict.fromkeys(id(row.run) for row in table))
    paper = any(row.paper_result for row in table)
    body = "".join(_rows_of_run([row for row in table if id(row.run) == run], paper, len(runs) > 1) for run in runs)
    papers_heads = "<th>paper</th><th class=text></th>" if paper else ""
    return (
        '<section id="results"><h2>Errors on the test set</h2><p class="soft">Mean and standard deviation over trials '
        f"at the last epoch, in percent; running train error in parentheses.{JUDGED if paper else ''}</p>"
        '<div class="wide"><table>\n<thead><tr><th>network</th><th class=text>data</th><th class=text>estimator</th>'
        f"<th>{'ours' if paper else 'error'}</th>{papers_heads}"
        "<th>trials</th><th>epochs</th><th>T</th><th>K</th></tr></thead>\n"
        f"{body}{_literature(table)}</table></div></section>\n"
    )


def _literature(table: list[Row]) -> str:
    """The paper's rows from the literature, if the table has any of the paper's; omits those trained here."""
    trained = {row.run.spec.name for row in table}
    if not any(row.paper_result for row in table):
        return ""
    found = [row for row in papers.literature() if row.experiment not in trained]
    lines = "".join(
        f'<tr><th scope="row">{escape(row.source)}</th><td class="text">mnist</td><td class="text">EP</td>'
        f"<td>–</td><td>{row.result}</td>"
        f'<td class="text soft">literature</td><td></td>'
        f"<td>{row.epochs}</td><td>{row.T}</td><td>{row.K or '–'}</td></tr>\n"
        for row in found
    )
    return f'<tbody class="literature">{lines}</tbody>\n' if lines else ""


def _rows_of_run(table: list[Row], paper: bool, several: bool) -> str:
    """One row per estimator, after the network and its differences from the paper."""
    run = table[0].run
    note = f'<span class="note">{escape(", ".join([run.model, *run.changes]))}</span>'
    place = f' <span class="soft">{escape(run.folder.name)}</span>' if several else ""
    name = f'<th scope="rowgroup" rowspan="{len(table)}">{escape(run.title)}{place}{note}</th>'
    rows = "".join(_row(row, name if n == 0 else "", paper) for n, row in enumerate(table))
    return f"<tbody>{rows}</tbody>\n"


def _row(row: Row, name: str, with_paper: bool) -> str:
    paper = row.paper_result
    lost = f", {row.diverged} diverged" if row.diverged else ""
    cells = [
        f'<td class="text">{escape(row.run.data)}</td><td class="text">{escape(label(row.estimator))}</td>',
        f'<td data-value="{"" if row.test is None else row.test.mean}">{_point(row.test, row.train)}{_top5(row)}</td>',
        f"<td>{'–' if paper is None else str(paper)}</td>" if with_paper else "",
        f'<td class="text {row.verdict if row.verdict in ("yes", "no") else "soft"}">{VERDICTS[row.verdict]}</td>'
        if with_paper
        else "",
        f"<td>{0 if row.test is None else row.test.trials}{lost}</td>",
        f"<td>{0 if row.test is None else row.test.epoch} of {row.run.spec.optimizer.epochs}</td>",
        "".join(f"<td>{steps}</td>" for steps in row.phases or ("–", "–")),
    ]
    return f'<tr data-row="{escape(row.run.title)} {escape(row.estimator)}">{name}{"".join(cells)}</tr>\n'


def _point(test: Point | None, train: Point | None) -> str:
    if test is None:
        return "–"
    spread = "" if test.std is None else f" ± {test.std:.2f}"
    return f"{test.mean:.2f}{spread}" + ("" if train is None else f" ({train.mean:.2f})")


def _top5(row: Row) -> str:
    return "" if row.top5 is None else f'<span class="note">top-5 {row.top5:.2f}</span>'


def _figures(runs: list[RunFolder]) -> str:
    drawn = [(run, series(run)) for run in runs]
    alone = sum(bool(curves) for _, curves in drawn) == 1
    shown = [_figure(run, curves, alone) for run, curves in drawn if curves]
    if not shown:
        return ""
    papers_line = "; dotted: the paper’s test error" if any(run.paper_results for run in runs) else ""
    return (
        '<section id="curves"><h2>Errors throughout learning</h2><p class="soft">Mean over trials; bands show plus '
        f"and minus one standard deviation. Solid: test error; dashed: running train error{papers_line}. Point at a "
        "figure, or use the arrow keys, to see values; buttons toggle curves.</p>"
        f'<div class="figures">{"".join(shown)}</div>'
        "</section>\n"
    )


def _figure(run: RunFolder, curves: list[ErrorCurve], alone: bool) -> str:
    epochs = max(p.epoch for s in curves for p in s.points)
    buttons = "".join(
        f'<button type="button" class="{s.estimator} {s.kind}" data-series="{s.key}" aria-pressed="true"><i></i>'
        f"{escape(s.label)}</button>"
        for s in curves
    )
    trials = max(p.trials for s in curves for p in s.points)
    place = "" if alone else f' <span class="soft">{escape(run.folder.name)}</span>'
    drawn = {s.estimator for s in curves}
    paper = {name: result.test for name, result in run.paper_results.items() if name in drawn}
    data = json.dumps(hover_data(curves, axes(curves, epochs, list(paper.values())))).replace("<", "\\u003c")
    return (
        f"<figure data-curves{' class=alone' * alone}><h3>{escape(run.title)}{place}</h3>"
        f"{draw(curves, epochs, run.title, paper)}"
        f'<div class="tip" role="status" hidden></div><div class="legend">{buttons}</div>'
        f"<figcaption>{escape(what_is_seen(run))}<br>{escape(run.model)} on {escape(run.data)}, {trials} "
        f"trial{'s' * (trials != 1)}{escape(''.join(f', {change}' for change in run.changes))}</figcaption>"
        f'<script type="application/json">{data}</script></figure>'
    )


def _seen(contents: Contents, seen: Sequence[tuple[RunFolder, Sequence[Examination]]]) -> str:
    """What the nets get wrong, how they settle, and what the doctor says."""
    shown = "".join(looked_at(run, found) for run, found in seen if found)
    if shown:
        return f'<section id="nets"><h2>The nets</h2>{shown}</section>\n'
    if len(contents.runs) > MOST_EXAMINED:
        why = (
            f"The nets of more than {MOST_EXAMINED} runs are not looked at; the page of a single run has its classes, "
        )
        return f'<p class="soft">{why}worst answers, settling and the doctor’s verdict.</p>\n'
    return ""


def _pictures(contents: Contents) -> str:
    if not contents.pictures:
        return ""
    loose = "".join(_picture(p) for p in contents.pictures if not p.verdict)
    verdicts = list(dict.fromkeys((p.comparison, p.verdict) for p in contents.pictures if p.verdict))
    compared = [_comparison(c, v, contents, len(verdicts) <= MOST_OPEN) for c, v in verdicts]
    loose = f'<div class="figures">{loose}</div>' if loose else ""
    return f'<section id="gdu"><h2>Gradient-descending updates</h2>{"".join(compared)}{loose}</section>\n'


MOST_OPEN = 2
"""Comparisons whose figures are shown at once; of more, the verdicts are."""


def _comparison(name: str, verdict: str, contents: Contents, shown: bool) -> str:
    """The verdict of a comparison, and its figures in full width."""
    own = [p for p in contents.pictures if (p.comparison, p.verdict) == (name, verdict)]
    figures = "".join(map(_picture, own))
    return (
        f"<details{' open' * shown}><summary>{escape(name)}</summary>"
        f'<p class="verdict">{escape(verdict)}</p><div class="theorem">{figures}</div></details>\n'
    )


def _picture(p: Picture) -> str:
    caption = escape(p.caption)
    return f'<figure><img src="{p.source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'


def _settings(runs: list[RunFolder]) -> str:
    if not runs:
        return ""
    return f'<section id="settings"><h2>Settings and provenance</h2>{"".join(map(_details, runs))}</section>\n'


def _details(run: RunFolder) -> str:
    settings = run.spec.to_dict()
    shown = {k: settings[k] for k in ("preset", "source", "notes") if settings[k]}
    shown |= {f"{name}: {k}": v for name in SECTIONS for k, v in settings[name].items() if v is not None}
    shown |= {f"data: {k}": v for k, v in run.described.data.items()}
    shown["wall time"] = ", ".join(f"{m} {duration(run.seconds(m))}" for m in run.spec.estimators)
    shown |= _agreement(run)
    stopped = "".join(
        f'<p class="no">{escape(label(estimator))}, trial {escape(str(line["trial"]))}: {escape(_reason(line))}</p>'
        for estimator in run.spec.estimators
        for line in run.diverged(estimator)
    )
    sessions = "".join(
        f'<p class="soft">Session {n} of {len(run.sessions)}</p>'
        + _pairs({**s["provenance"], "engines": ", ".join(f"{m}: {e}" for m, e in s["engines"].items())})
        for n, s in enumerate(run.sessions, start=1)
    )
    return (
        f"<details><summary>{escape(run.title)} <span class=soft>{escape(run.folder.name)}</span></summary>"
        f"{stopped}{_graph(run)}{_pairs(shown)}{sessions}</details>\n"
    )


def _agreement(run: RunFolder) -> dict[str, str]:
    """Cosines of updates in a declared precision with float32's, and of float32's with float64's, per estimator."""
    out = {}
    kinds = {
        "with_float32": f"cosine of {run.spec.run.precision} with float32",
        "float32_with_float64": "cosine of float32 with float64",
    }
    for estimator in run.spec.estimators:
        for what, title in kinds.items():
            found = [c for line in run.lines if line["estimator"] == estimator and (c := cosines(line, what))]
            if found:
                lowest = {name: min(c.get(name, math.nan) for c in found) for name in found[-1]}
                over = f"lowest of {len(found)}: " if len(found) > 1 else ""
                out[f"{title}, {estimator}"] = over + ", ".join(f"{k} {v:.4f}" for k, v in lowest.items())
    return out


def _reason(line: Line) -> str:
    why = line["diverged"]
    return str(why.get("reason", why)) if isinstance(why, Mapping) else str(why)


def _graph(run: RunFolder) -> str:
    """The picture of a net that is a graph."""
    net = run.spec.model
    return f'<div class="graph">{net.build(0, torch.float32).draw()}</div>' if isinstance(net, GraphNet) else ""


PNG = b"\x89PNG\r\n\x1a\n"
LARGEST_PICTURE = 2 << 20


def _augmented(runs: list[RunFolder]) -> str:
    shown = "".join(map(_augmented_images, runs))
    return f'<section id="augmented"><h2>Training images, augmented</h2>{shown}</section>\n' if shown else ""


def _augmented_images(run: RunFolder) -> str:
    """Training images as the first epoch sees them, inside the page; nothing that is not a PNG of usual size."""
    path = run.folder / AUGMENTED
    if run.spec.data.augmentation is None or not path.is_file() or path.stat().st_size > LARGEST_PICTURE:
        return ""
    content = read_bytes(path)
    if not content.startswith(PNG):
        return ""
    changes = run.spec.data.augmentation
    caption = escape(f"{run.title}: the first training images as the first epoch sees them ({changes})")
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return f'<figure class="augmented"><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'


def _pairs(values: Mapping[str, object]) -> str:
    items = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(_shown(v))}</dd>" for k, v in values.items())
    return f"<dl>{items}</dl>"


def _shown(value: object) -> str:
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

"""Results as one HTML file: no network access, no libraries, readable on a phone and in print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from eqprop import papers
from eqprop.estimators.named import label
from eqprop.files import read_bytes, write_text
from eqprop.models.network import GraphNet
from eqprop.provenance import __version__
from eqprop.report.examined import ExaminedNet, examinations
from eqprop.report.figures import error_curves, panel_of, percent_ticks, save, write_figure
from eqprop.report.runs import KINDS, Contents, Picture, Point, Row, RunFolder, collect_all, rows, to_csv, to_latex
from eqprop.report.sections import compared, looked_at, what_is_seen
from eqprop.run.folder import AUGMENTED
from eqprop.run.log import cosines
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


def render(contents: Contents, seen: Sequence[tuple[RunFolder, Sequence[ExaminedNet]]] = ()) -> str:
    """The page as HTML.

    seen    runs whose nets were looked at again, and what was seen
    """
    table, runs = rows(contents.runs), contents.runs
    style, script = (
        Markup(files("eqprop.report").joinpath(name).read_text("utf-8")) for name in ("page.css", "page.js")
    )
    names = list(dict.fromkeys(run.spec.name for run in runs))
    comparisons: dict[tuple[str, str], list[Picture]] = {}
    for p in contents.pictures:
        if p.verdict:
            comparisons.setdefault((p.comparison, p.verdict), []).append(p)
    return _template().render(
        title=f"eqprop: {', '.join(names)}" if names else "eqprop: GDU figures",
        version=__version__,
        style=style,
        script=script,
        estimators=list(dict.fromkeys(label(name) for run in runs for name in run.spec.estimators)),
        left_out=contents.left_out,
        pictures=contents.pictures,
        comparisons=comparisons,
        loose=[p for p in contents.pictures if not p.verdict],
        most_open=MOST_OPEN,
        runs=runs,
        table=table,
        by_run=[(run, [row for row in table if row.run is run]) for run in runs],
        verdicts=VERDICTS,
        paper=any(row.paper_result for row in table),
        compared=Markup(compared(runs)),
        nets=[Markup(looked_at(run, found)) for run, found in seen if found],
        most_examined=MOST_EXAMINED,
        literature=_literature(table),
        figures=[_figure(run, curves) for run in runs if (curves := series(run))],
        augmented=[found for run in runs if (found := _augmented(run)) is not None],
        files={"csv": CSV, "latex": LATEX},
        csv=to_csv(table),
        latex=to_latex(table),
    )


def _template() -> Template:
    made = Environment(loader=PackageLoader("eqprop.report", "."), autoescape=True, undefined=StrictUndefined)
    made.filters |= {"label": label, "plain": _plain, "settings": _settings, "graph": _graph}
    return made.get_template("page.html")


MOST_OPEN = 2
"""Comparisons whose figures are shown at once; of more, the verdicts are."""


def _literature(table: list[Row]) -> list[papers.Literature]:
    """The paper's rows from the literature, if the table has any of the paper's; omits those trained here."""
    trained = {row.run.spec.name for row in table}
    known = any(row.paper_result for row in table)
    return [row for row in papers.literature() if row.experiment not in trained] if known else []


def _figure(run: RunFolder, curves: list[ErrorCurve]) -> dict[str, object]:
    """What the page shows of a run's curves."""
    epochs = max(p.epoch for s in curves for p in s.points)
    drawn = {s.estimator for s in curves}
    paper = {name: result.test for name, result in run.paper_results.items() if name in drawn}
    return {
        "run": run,
        "seen": what_is_seen(run),
        "curves": curves,
        "chart": Markup(draw(curves, epochs, run.title, paper)),
        "trials": max(p.trials for s in curves for p in s.points),
        "data": hover_data(curves, axes(curves, epochs, list(paper.values()))),
    }


def _settings(run: RunFolder) -> dict[str, object]:
    """Settings, data, wall time and precision of a run, by name."""
    settings = run.spec.to_dict()
    shown = {k: settings[k] for k in ("preset", "source", "notes") if settings[k]}
    shown |= {f"{name}: {k}": v for name in SECTIONS for k, v in settings[name].items() if v is not None}
    shown |= {f"data: {k}": v for k, v in run.described.data.items()}
    shown["wall time"] = ", ".join(f"{m} {duration(run.seconds(m))}" for m in run.spec.estimators)
    return shown | _agreement(run)


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


def _graph(run: RunFolder) -> Markup | None:
    """The picture of a net that is a graph."""
    net = run.spec.model
    return Markup(net.build(0, torch.float32).draw()) if isinstance(net, GraphNet) else None


def _augmented(run: RunFolder) -> Picture | None:
    """Training images as the first epoch sees them, if they are augmented."""
    path, changes = run.folder / AUGMENTED, run.spec.data.augmentation
    if changes is None or not path.is_file():
        return None
    caption = f"{run.title}: the first training images as the first epoch sees them ({changes})"
    return Picture(caption, read_bytes(path))


def _plain(value: object) -> str:
    """A value in words: tables and lists without brackets."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

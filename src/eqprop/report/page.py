"""Results as one HTML file: no network access, no libraries, readable on a phone and in print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
from eqprop.report.charts import error_chart, error_series, settling_chart
from eqprop.report.examined import ExaminedNet, examinations
from eqprop.report.figures import error_curves, panel_of, save, write_figure
from eqprop.report.runs import Contents, Picture, Row, RunFolder, collect_all, rows, to_csv, to_latex
from eqprop.report.sections import compared, epochs_table, in_words, settings_of, what_is_seen
from eqprop.run.folder import AUGMENTED
from eqprop.run.log import cosines
from eqprop.run.own import Factory
from eqprop.run.watch import duration

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
    model: Factory | None = None,
) -> ReportFiles:
    """Write the page, the table as CSV and LaTeX, and the curves of each run as PNG and PDF.

    folder          a run folder, a folder of run folders, or several of them, whose runs are set side by side
    out             where to write; by default the folder itself, or the one that several lie in
    with_curves     draw the curves as files, which takes time: not needed for intermediate updates
    examine         load the nets, of three runs at most: errors by class, worst answers, settling, the doctor's verdict
    gradients       also compare the estimator's gradient of a mini-batch with BPTT's
    model           the function that builds your own net; without it such a net is not loaded
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
    seen = [(run, list(examinations(run, gradients, model))) for run in contents.runs] if few else []
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
    return page_template().render(
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
        compared=compared(runs),
        nets=[(run, found) for run, found in seen if found],
        most_examined=MOST_EXAMINED,
        literature=_literature(table),
        figures=[_figure(run) for run in runs if error_series(run)],
        augmented=[found for run in runs if (found := _augmented(run)) is not None],
        files={"csv": CSV, "latex": LATEX},
        csv=to_csv(table),
        latex=to_latex(table),
    )


def page_template(name: str = "page.html") -> Template:
    """A template of this package by name, escaping, with the filters that the page uses."""
    made = Environment(loader=PackageLoader("eqprop.report", "."), autoescape=True, undefined=StrictUndefined)
    made.filters |= {"label": label, "plain": in_words, "settings": _settings, "graph": _graph}
    made.filters |= {"verdict": _verdict, "epochs": epochs_table, "settling_chart": settling_chart}
    made.filters["small"] = lambda value: f"{value:.1e}" if value else "0"
    return made.get_template(name)


MOST_OPEN = 2
"""Comparisons whose figures are shown at once; of more, the verdicts are."""


def _literature(table: list[Row]) -> list[papers.Literature]:
    """The paper's rows from the literature, if the table has any of the paper's; omits those trained here."""
    trained = {row.run.spec.name for row in table}
    known = any(row.paper_result for row in table)
    return [row for row in papers.literature() if row.experiment not in trained] if known else []


def _figure(run: RunFolder) -> dict[str, object]:
    """What the page shows of a run's curves."""
    curves = error_series(run)
    drawn = {s.estimator for s in curves}
    paper = {name: result.test for name, result in run.paper_results.items() if name in drawn}
    trials = max(p.trials for s in curves for p in s.points)
    return {"run": run, "seen": what_is_seen(run), "chart": error_chart(curves, paper), "trials": trials}


def _verdict(found: ExaminedNet) -> str:
    """What the doctor says, without what stands before it."""
    assert found.diagnosis is not None, "asked of nets that the doctor has seen"
    verdict = found.diagnosis.verdict.removeprefix("No cause found: ")
    return verdict[:1].upper() + verdict[1:]


def _settings(run: RunFolder) -> dict[str, object]:
    """Settings, data, wall time and precision of a run, by name."""
    shown = {name: value for name in ("preset", "source", "notes") if (value := getattr(run.spec, name))}
    shown |= settings_of(run)
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

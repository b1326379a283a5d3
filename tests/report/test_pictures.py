"""No picture has text outside its canvas, and axes show what they should: one run and six, short names and long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import Browser
from helpers.training_runs import SMALL, few_images
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from eqprop.report.figures import Panel, decisions, error_curves
from eqprop.report.gdu import processes, rmse_single
from eqprop.report.page import write_report
from eqprop.report.paper import FIGURES
from eqprop.report.runs import Point
from eqprop.run import train
from eqprop.run.published import PaperResult

RESULTS = Path(__file__).resolve().parents[2] / "results"
LONG = "A-WIDE-NAME-WITHOUT-A-BREAK-" * 3 + "of an experiment"
FORMS = ("ep", "ep-symmetric", "ep-random-sign", "ep-continual", "bptt", "rbp")
NAMES = pytest.mark.parametrize("name", ["small", LONG])


def outside(figure: Figure) -> list[str]:
    """The texts of a figure that its canvas cuts."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box, renderer = figure.bbox, canvas.get_renderer()
    hidden = _hidden(figure)
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in hidden]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
    return [s for s, b in boxes if b.x0 < -1 or b.y0 < -1 or b.x1 > box.x1 + 1 or b.y1 > box.y1 + 1]


def _hidden(figure: Figure) -> set[int]:
    """Labels of ticks beyond the limits, which are not drawn."""
    found = set()
    for ax in figure.axes:
        for axis, (low, high) in ((ax.xaxis, sorted(ax.get_xlim())), (ax.yaxis, sorted(ax.get_ylim()))):
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high or not ax.axison:
                    found |= {id(tick.label1), id(tick.label2)}
    return found


def panel(name: str, estimators: tuple[str, ...], paper: bool = False) -> Panel:
    points = [Point(e, 90.0 - 10 * e, 1.0, 2) for e in (1, 2, 3)]
    curves = {(m, kind): points for m in estimators for kind in ("test", "train")}
    return Panel(name, curves, {"ep": PaperResult(1.95, 0.1)} if paper else {}, f"784-24-10 on few; {name}")


def test_the_check_finds_cut_text() -> None:
    figure = Figure(figsize=(2, 2))
    figure.text(0.9, 0.5, "beyond the edge")
    assert outside(figure) == ["beyond the edge"]


@NAMES
@pytest.mark.parametrize("runs", [1, 6])
@pytest.mark.parametrize("estimators", [("ep",), FORMS])
def test_learning_curves_keep_their_text_inside(name: str, runs: int, estimators: tuple[str, ...]) -> None:
    assert outside(error_curves([panel(name, estimators, paper=n == 0) for n in range(runs)])) == []


@NAMES
def test_the_figures_of_a_comparison_and_of_tuning_keep_their_text_inside(name: str) -> None:
    document, traces = (json.loads((RESULTS / "gdu" / "toy" / f"{n}.json").read_text()) for n in ("gdu", "traces"))
    document["name"] = name
    assert outside(processes(document, traces)) == []
    assert outside(rmse_single(document)) == []


@NAMES
def test_the_figure_of_tuning_keeps_its_text_inside(name: str) -> None:
    found = json.loads((RESULTS / "tune" / "recipe.json").read_text())
    document: dict[str, Any] = found[0] if isinstance(found, list) else found
    assert outside(decisions({**document, "name": name})) == []


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all kinds of curves under a long name, and the comparison of the toy model."""
    place = tmp_path_factory.mktemp("pictures")
    images = few_images(40, 20)
    train(SMALL.override(name=LONG[:90]), place / "run", data=images, epochs=2, estimators="ep,ep-symmetric,bptt")
    document, traces = (json.loads((RESULTS / "gdu" / "toy" / f"{n}.json").read_text()) for n in ("gdu", "traces"))
    from eqprop.report.gdu import write_folder

    write_folder(place / "toy", document, traces)
    return write_report(place, with_curves=False).page


BEYOND = """[...document.querySelectorAll('svg.chart')].flatMap(c => { const b = c.getBoundingClientRect();
  return [...c.querySelectorAll('text')].filter(t => { const r = t.getBoundingClientRect();
    return r.left < b.left - 1 || r.right > b.right + 1 || r.top < b.top - 1 || r.bottom > b.bottom + 1; })
  .map(t => t.textContent) })"""
STICKS_OUT = """[...document.querySelectorAll('figure *, h1, h3, summary, .verdict')].filter(e => {
  const r = e.getBoundingClientRect(); return r.width && (r.left < -1 || r.right > innerWidth + 1) })
  .map(e => e.tagName + e.className)"""


@pytest.mark.browser
@pytest.mark.parametrize(("width", "mobile"), [(1280, False), (390, True)])
def test_on_the_page_all_text_is_inside_and_one_run_fills_the_width(
    browser: Browser, page: Path, width: int, mobile: bool
) -> None:
    browser.open(page, width=width, mobile=mobile)
    assert browser.run(BEYOND) == []
    assert browser.run(STICKS_OUT) == []
    figure, whole = browser.run(
        "['#curves figure', '#curves .figures'].map(q => document.querySelector(q).getBoundingClientRect().width)"
    )
    assert figure > 0.95 * whole


@pytest.mark.browser
def test_the_theorem_stands_above_the_tables_with_its_verdict(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280)
    verdict = json.loads((RESULTS / "gdu" / "toy" / "gdu.json").read_text())["budget"]["verdict"]
    assert browser.run("document.querySelector('#gdu .verdict').innerText") == verdict
    tops = browser.run("['#gdu', '#results'].map(q => document.querySelector(q).getBoundingClientRect().top)")
    assert tops[0] < tops[1]
    shown, whole = browser.run("['#gdu img', '#gdu'].map(q => document.querySelector(q).getBoundingClientRect().width)")
    assert shown > 0.55 * whole


@pytest.mark.parametrize("figure", [f for f in FIGURES if not f.needs], ids=lambda figure: figure.name)
def test_no_text_of_a_schematic_figure_is_cut(figure: Any) -> None:
    assert outside(figure.draw({})) == []

"""The page: its numbers are those of the metrics, it stands alone, and it works in a real browser."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from helpers.browser import Browser, find_browser
from helpers.training_runs import SMALL, few_images

from eqprop.data import Images
from eqprop.data.images import MNIST_DIGEST
from eqprop.experiments.paper import PAPER, named_experiment
from eqprop.report.figures import error_curves, panel_of
from eqprop.report.page import Axes, _epoch_ticks, axes, render, series, write_report
from eqprop.report.runs import collect, rows, to_csv, to_latex
from eqprop.training import train
from eqprop.training.metrics import read_metrics


def as_mnist(images: Images) -> Images:
    """Under the checksum of MNIST, which is what a paper's number stands beside."""
    return replace(images, sha256=MNIST_DIGEST)


PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real runs, one under the name of a row of the paper, and a GDU figure."""
    place = tmp_path_factory.mktemp("report")
    images = as_mnist(few_images())
    options: dict[str, Any] = {"data": images, "estimators": "ep,bptt", "trials": 3}
    train(SMALL, place / "own", epochs=4, **options)
    train("P-1h", place / "p-1h", epochs=2, T=8, K=4, **{**options, "trials": 1})
    (place / "toy" / "figures").mkdir(parents=True)
    (place / "toy" / "figures" / "processes.png").write_bytes(PIXEL)
    (place / "toy" / "gdu.json").write_text('{"name": "<toy>"}')
    write_report(place)
    return place


class Reader(HTMLParser):
    """Collects tags, links, the text of every table row, and the data of the figures."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, str] = {}
        self.data: list[dict[str, Any]] = []
        self._row: str | None = None
        self._script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag == "tr":
            self._row = values.get("data-row")
            if self._row:
                self.rows[self._row] = ""
        self._script = tag == "script" and values.get("type") == "application/json"

    def handle_data(self, data: str) -> None:
        if self._row and data.strip():
            self.rows[self._row] += f"{data.strip()}|"
        if self._script:
            self.data.append(json.loads(data))
            self._script = False


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def test_the_numbers_of_the_page_are_those_of_the_metrics(folder: Path) -> None:
    page = read((folder / "report.html").read_text(encoding="utf-8"))
    lines = read_metrics(folder / "own")
    for estimator in ("ep", "bptt"):
        last = [x["test_error"] for x in lines if x["estimator"] == estimator and x["epoch"] == 4]
        train_last = [x["train_error"] for x in lines if x["estimator"] == estimator and x["epoch"] == 4]
        assert len(last) == 3
        shown = f"{mean(last):.2f} ± {stdev(last):.2f} ({mean(train_last):.2f})"
        assert shown in page.rows[f"small (own) {estimator}"], page.rows
    drawn = next(d for d in page.data if len(d["series"][0]["points"]) == 4)
    assert [s["label"] for s in drawn["series"]] == ["EP test", "EP train", "BPTT test", "BPTT train"]
    for one in drawn["series"]:
        estimator, kind = one["key"].split("-")
        for point in one["points"]:
            values = [x[f"{kind}_error"] for x in lines if (x["estimator"], x["epoch"]) == (estimator, point["epoch"])]
            assert point["mean"] == pytest.approx(mean(values), rel=1e-12)
            assert point["std"] == pytest.approx(stdev(values), rel=1e-9)
            assert point["trials"] == 3


def test_the_papers_numbers_and_what_is_not_as_printed_stand_beside_ours(folder: Path) -> None:
    page = read((folder / "report.html").read_text(encoding="utf-8"))
    row = page.rows["P-1h (paper) ep"]
    assert "2.00 ± 0.13 (0.20)" in row
    assert "T 8 instead of 30, K 4 instead of 10, epochs 2 instead of 30" in row
    assert "other settings" in row
    assert "reproduced" not in row.replace("not reproduced", "")


def test_the_table_as_csv_and_latex(folder: Path) -> None:
    found = list(csv.DictReader(io.StringIO((folder / "table.csv").read_text())))
    assert [(r["name"], r["estimator"]) for r in found] == [
        ("P-1h", "ep"),
        ("P-1h", "bptt"),
        ("small", "ep"),
        ("small", "bptt"),
    ]
    lines = read_metrics(folder / "own")
    last = [x["test_error"] for x in lines if x["estimator"] == "bptt" and x["epoch"] == 4]
    assert float(found[3]["test_error_mean"]) == pytest.approx(mean(last))
    assert float(found[3]["test_error_std"]) == pytest.approx(stdev(last))
    assert found[0]["test_error_std"] == "", "one trial has no deviation"
    assert found[0]["paper_test_error_mean"] == "2.0"
    latex = (folder / "table.tex").read_text()
    assert latex.count(r"\\") == 6
    assert rf"small (own) & BPTT & ${mean(last):.2f} \pm {stdev(last):.2f}$" in latex


def test_a_row_is_reproduced_only_as_its_preset_says(tmp_path: Path) -> None:
    """Verdicts from made-up metrics of whole runs: mean + 2 deviations of the paper is the limit."""

    def verdict(preset: str, error: float, epochs: int = 30, **changes: Any) -> str:
        place = tmp_path / f"{preset}{error}{epochs}{len(changes)}"
        run = place / "run"
        experiment = named_experiment("P-1h", preset).override(**changes)
        train(experiment, run, data=as_mnist(few_images(40, 10)), epochs=1, T=1, K=1)
        plain = json.loads((run / "experiment.json").read_text())
        plain["experiment"].update(T=experiment.T, K=experiment.K, epochs=experiment.epochs)
        plain["data"].update(training_samples=60_000)
        (run / "experiment.json").write_text(json.dumps(plain))
        line = json.loads((run / "metrics.jsonl").read_text())
        (run / "metrics.jsonl").write_text(json.dumps({**line, "epoch": epochs, "test_error": error}) + "\n")
        (row,) = rows(collect(place).runs)
        return row.verdict

    assert verdict("paper", 2.26) == "yes"
    assert verdict("paper", 1.5) == "yes"
    assert verdict("paper", 2.27) == "no"
    assert verdict("authors", 2.1) == "yes"
    assert verdict("paper", 2.0, epochs=29) == "unfinished"
    assert verdict("paper", 2.0, beta=0.2) == "other settings"


def test_the_page_needs_nothing_from_elsewhere(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = read(text)
    for tag, values in page.tags:
        for name in ("src", "href", "srcset", "action", "data"):
            value = values.get(name) or ""
            assert value.startswith("data:") or value in ("", "table.csv", "table.tex"), (tag, name, value)
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)|fetch\(|XMLHttpRequest", text)
    assert "processes, &lt;toy&gt;" in text, "what comes from files is escaped"


def test_a_page_from_figures_alone_and_from_nothing(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "rmse.png").write_bytes(PIXEL)
    assert "no training runs" in render(collect(tmp_path))
    with pytest.raises(FileNotFoundError, match="neither runs nor figures"):
        collect(folder / "toy" / "figures")
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        collect(tmp_path / "missing")


def test_axes_hold_every_value_and_zero_lies_at_the_edge(folder: Path) -> None:
    run = next(r for r in collect(folder).runs if r.experiment.name == "small")
    frame = axes(series(run), 4)
    for one in series(run):
        for p in one.points:
            assert frame.low <= p.mean <= frame.high
    assert frame.y(frame.low) == frame.y(0.0) > frame.y(frame.high)
    assert frame.ticks()[0] == pytest.approx(frame.low)
    assert frame.ticks()[-1] == pytest.approx(frame.high)
    assert math.isclose(Axes(1, 0.1, 1.0).x(1), Axes(9, 0.1, 1.0).x(1))
    assert _epoch_ticks(1) == [1]
    assert _epoch_ticks(30) == [1, 5, 10, 15, 20, 25, 30]
    assert all(len(_epoch_ticks(n)) <= 9 for n in range(1, 2000))


def test_rows_come_in_the_order_of_the_paper(folder: Path) -> None:
    names = [r.experiment.name for r in collect(folder).runs]
    assert names == sorted(names, key=lambda n: list(PAPER).index(n) if n in PAPER else 99)
    assert to_csv([]).startswith("name,preset,estimator")
    assert r"\bottomrule" in to_latex([])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    chromium = Browser(program)
    yield chromium
    chromium.close()


def place_of(browser: Browser, selector: str) -> tuple[float, float, float, float]:
    box = f"document.querySelector('{selector}').getBoundingClientRect()"
    browser.run(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
    left, top, width, height = browser.run(f"(b => [b.left, b.top, b.width, b.height])({box})")
    return left, top, width, height


FIGURE = "#curves figure:nth-of-type(2)"


@pytest.mark.browser
def test_in_a_browser_the_hover_shows_the_values_of_the_metrics(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.html")
    assert browser.run(f"document.querySelector('{FIGURE} h3').innerText") == "small (own)"
    assert browser.run(f"document.querySelector('{FIGURE} .tip').hidden")
    left, top, width, height = place_of(browser, f"{FIGURE} .chart")
    browser.point_at(left + 0.99 * width, top + height / 2)
    lines = [x for x in read_metrics(folder / "own") if x["epoch"] == 4]
    expected = ["epoch 4"]
    for estimator in ("ep", "bptt"):
        for kind in ("test", "train"):
            values = [x[f"{kind}_error"] for x in lines if x["estimator"] == estimator]
            expected.append(f"{estimator.upper()} {kind} {mean(values):.2f} ± {stdev(values):.2f} %")
    assert browser.run(f"document.querySelector('{FIGURE} .tip').innerText").split("\n") == expected
    browser.point_at(left + 0.2 * width, top + height / 2)
    assert browser.run(f"document.querySelector('{FIGURE} .tip b').innerText") == "epoch 1"
    browser.point_at(2, 2)
    assert browser.run(f"document.querySelector('{FIGURE} .tip').hidden")


@pytest.mark.browser
def test_in_a_browser_curves_are_switched_off_and_on(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.html")

    def visible() -> int:
        shown = f"[...document.querySelectorAll('{FIGURE} .curve')].filter(c => c.getBoundingClientRect().width > 0)"
        return int(browser.run(f"{shown}.length"))

    assert visible() == 4
    left, top, width, height = place_of(browser, f"{FIGURE} .legend button")
    browser.click(left + width / 2, top + height / 2)
    assert visible() == 3
    assert browser.run(f"document.querySelector('{FIGURE} .legend button').ariaPressed") == "false"
    browser.run(f"document.querySelector('{FIGURE} .chart').focus()")
    browser.press("ArrowLeft")
    tip = browser.run(f"document.querySelector('{FIGURE} .tip').innerText")
    assert tip.startswith("epoch 4")
    assert "EP train" in tip
    assert "\nEP test" not in tip
    browser.click(left + width / 2, top + height / 2)
    assert visible() == 4


@pytest.mark.browser
def test_in_a_browser_it_renders_without_errors_or_requests_on_every_screen(browser: Browser, folder: Path) -> None:
    browser.errors.clear()
    browser.requests.clear()
    for width, mobile, dark in ((1200, False, False), (390, True, False), (390, True, True)):
        browser.dark(dark)
        browser.open(folder / "report.html", width=width, mobile=mobile)
        assert browser.run("document.querySelectorAll('#curves .chart').length") == 2
        assert browser.run("document.querySelectorAll('#results tr[data-row]').length") == 4
        assert browser.run("document.querySelector('#gdu img').naturalWidth") == 1
        assert browser.run("document.documentElement.scrollWidth") <= width, "nothing sticks out sideways"
        paper, ink = browser.run("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
        lightness = [sum(map(int, re.findall(r"\d+", c)[:3])) for c in (paper, ink)]
        assert (lightness[0] < lightness[1]) == dark
    browser.dark(False)
    assert browser.print_pdf().startswith(b"%PDF")
    assert browser.errors == []
    assert [r for r in browser.requests if not r.startswith(("file:", "data:"))] == []


def test_every_run_has_its_curves_as_files_for_a_paper(folder: Path) -> None:
    found = sorted(path.name for path in (folder / "curves").iterdir())
    assert found == ["own.pdf", "own.png", "p-1h.pdf", "p-1h.png"]
    assert (folder / "curves" / "own.pdf").read_bytes().startswith(b"%PDF")
    before = (folder / "curves" / "p-1h.pdf").read_bytes()
    write_report(folder)
    assert (folder / "curves" / "p-1h.pdf").read_bytes() == before


def test_a_single_run_has_its_curves_under_its_own_name(folder: Path, tmp_path: Path) -> None:
    written = write_report(folder / "own", tmp_path)
    assert sorted(path.name for path in written.curves.iterdir()) == ["own.pdf", "own.png"]


def test_the_curves_of_a_figure_are_those_of_the_metrics(folder: Path) -> None:
    panels = [panel_of(run) for run in collect(folder).runs]
    assert [panel.title.split()[0] for panel in panels] == ["P-1h", SMALL.name]
    figure = error_curves(panels)
    row, own = figure.axes
    lines = read_metrics(folder / "own")
    for drawn, (estimator, field) in zip(
        own.get_lines(), [(m, k) for m in ("ep", "bptt") for k in ("test_error", "train_error")], strict=True
    ):
        expected = [
            mean(x[field] for x in lines if x["estimator"] == estimator and x["epoch"] == e) for e in range(1, 5)
        ]
        assert list(drawn.get_ydata()) == pytest.approx(expected)
    assert len(own.collections) == 2, "a band for the test error of each estimator"
    dotted = [line.get_ydata()[0] for line in row.get_lines() if line.get_linestyle() == ":"]
    assert dotted == [PAPER["P-1h"].paper_results[m].test for m in ("ep", "bptt")]
    assert len(row.collections) == 0, "one trial has no deviation"


def test_panels_that_do_not_fill_the_last_line_leave_it_empty(folder: Path) -> None:
    panels = [panel_of(run) for run in collect(folder).runs]
    figure = error_curves([*panels, panels[0]], columns=2)
    assert [ax.axison for ax in figure.axes] == [True, True, True, False]

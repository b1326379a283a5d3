"""The page: its numbers are those of the metrics, it stands alone, and it works in a real browser."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from helpers.browser import Browser
from helpers.training_runs import SMALL, few_images

from eqprop import papers
from eqprop.data import Images
from eqprop.data.images import MNIST_DIGEST
from eqprop.models.layered import LayeredNet
from eqprop.report.figures import error_curves, panel_of
from eqprop.report.page import write_report
from eqprop.report.runs import RunFolder, collect, read_run, rows
from eqprop.run import train
from eqprop.run.log import read_metrics


def as_mnist(images: Images) -> Images:
    """Under the checksum of MNIST, which alone does not make it MNIST."""
    return replace(images, sha256=MNIST_DIGEST)


def whole_run(place: Path, error: float, epochs: int | None = None, preset: str = "paper", **changes: Any) -> RunFolder:
    """A made-up run of P-1h on the whole of MNIST that ended with this error."""
    folder = place / f"{preset}-{error}-{epochs}-{len(changes)}"
    experiment = papers.find("P-1h", preset).override(**changes)
    train(experiment, folder, data=few_images(40, 10), epochs=1, T=1, K=1)
    described = json.loads((folder / "experiment.json").read_text())
    described["experiment"] = experiment.to_dict()
    described["changes_from_paper"] = [str(c) for c in experiment.changes(papers.find("P-1h"))]
    described["data"] = {"name": "mnist", "set": "mnist", "directory": None, "sha256": MNIST_DIGEST}
    described["data"] |= {"training_samples": 60_000, "test_samples": 10_000}
    (folder / "experiment.json").write_text(json.dumps(described))
    line = json.loads((folder / "metrics.jsonl").read_text())
    lines = [{**line, "epoch": n, "test_error": error} for n in range(1, 1 + (epochs or experiment.optimizer.epochs))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(folder)


def described_as(run: RunFolder, **data: Any) -> RunFolder:
    """The same run with another description of its data."""
    content = {**run.described.content, "data": {**run.described.data, **data}}
    return replace(run, described=replace(run.described, content=content))


def verdict(run: RunFolder) -> tuple[str, bool]:
    """The word, and whether the paper's number stands beside the run."""
    (row,) = rows([run])
    return row.verdict, row.paper_result is not None


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
        assert shown in page.rows[f"small (own, few) {estimator}"], page.rows
    drawn = next(d for d in page.data if len(d["series"][0]["points"]) == 4)
    assert [s["label"] for s in drawn["series"]] == ["EP test", "EP train", "BPTT test", "BPTT train"]
    for one in drawn["series"]:
        estimator, kind = one["key"].split("-")
        for point in one["points"]:
            values = [x[f"{kind}_error"] for x in lines if (x["estimator"], x["epoch"]) == (estimator, point["epoch"])]
            assert point["mean"] == pytest.approx(mean(values), rel=1e-12)
            assert point["std"] == pytest.approx(stdev(values), rel=1e-9)
            assert point["trials"] == 3


def test_what_is_not_as_printed_stands_beside_ours_and_the_papers_number_does_not(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    row = read(text).rows["P-1h (paper, changed, few) ep"]
    for named in ("784-512-10", "T 8 instead of 30, K 4 instead of 10, epochs 2 instead of 30", "|few|"):
        assert named in row, named
    assert "data few instead of mnist, trained on 400 samples, tested on 100 samples" in row
    assert "2.00" not in row
    (section,) = re.findall(r'<section id="results">.*?</section>', text, re.S)
    assert "paper</th>" not in section, "no column about the paper where there is no paper"
    assert "reproduced" not in section
    assert "reproduced" not in row
    assert "784-512-10 on few, 1 trial, T 8 instead of 30" in text, "the curves say it too"


def test_the_papers_number_and_the_changes_of_a_preset_stand_beside_a_whole_run(tmp_path: Path) -> None:
    whole_run(tmp_path, 1.9)
    whole_run(tmp_path, 2.0, preset="authors")
    written = write_report(tmp_path)
    page = read(written.page.read_text(encoding="utf-8"))
    printed, authors = page.rows["P-1h (paper) ep"], page.rows["P-1h (authors) ep"]
    for row in (printed, authors):
        assert "2.00 ± 0.13 (0.20)|reproduced" in row
        assert "|mnist|" in row
    assert "instead of" not in printed
    assert "init default instead of glorot, T 40 instead of 30, K 15 instead of 10" in authors
    csv_rows = list(csv.DictReader(io.StringIO(written.csv.read_text())))
    assert [r["reproduced"] for r in csv_rows] == ["yes", "yes"]
    assert {(r["model"], r["data"], r["training_samples"], r["test_samples"]) for r in csv_rows} == {
        ("784-512-10", "mnist", "60000", "10000")
    }
    panel = panel_of(collect(tmp_path).runs[0])
    (ax,) = error_curves([panel]).axes
    dotted = [line.get_ydata()[0] for line in ax.get_lines() if line.get_linestyle() == ":"]
    assert dotted == [papers.find("P-1h").results["ep"].test]


def test_data_counts_epochs_architecture_and_settings_must_all_be_the_papers(tmp_path: Path) -> None:
    whole = whole_run(tmp_path, 1.9)
    assert verdict(whole) == ("yes", True)
    fashion = described_as(whole, name="fashion-mnist", set="fashion-mnist", sha256="other")
    assert verdict(fashion) == ("other data", False)
    assert fashion.title == "P-1h (paper, fashion-mnist)"
    for count in ("training_samples", "test_samples"):
        assert verdict(described_as(whole, **{count: 9_000})) == ("other settings", False)
    assert verdict(replace_experiment(whole, epochs=29)) == ("other settings", False)
    assert verdict(replace_experiment(whole, model=LayeredNet((10, 256, 784)))) == ("other settings", False)
    assert verdict(replace_experiment(whole, seed=7)) == ("yes", True)


def replace_experiment(run: RunFolder, **fields: Any) -> RunFolder:
    return replace(run, described=replace(run.described, spec=run.spec.override(**fields)))


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
    assert found[0]["paper_test_error_mean"] == ""
    assert {(r["data"], r["training_samples"], r["test_samples"]) for r in found} == {("few", "400", "100")}
    latex = (folder / "table.tex").read_text()
    assert latex.count(r"\\") == 8
    assert rf"small (own, few) & few & BPTT & ${mean(last):.2f} \pm {stdev(last):.2f}$" in latex
    assert "P-1h (paper, changed, few): 784-512-10; T 8 instead of 30" in latex


def test_a_row_is_reproduced_only_as_its_preset_says(tmp_path: Path) -> None:
    """Verdicts from made-up metrics of whole runs: 2 deviations from the paper's mean are the limit."""

    assert verdict(whole_run(tmp_path, 2.26)) == ("yes", True)
    assert verdict(whole_run(tmp_path, 1.74)) == ("yes", True)
    assert verdict(whole_run(tmp_path, 1.73)) == ("lower", True)
    assert verdict(whole_run(tmp_path, 2.27)) == ("no", True)
    assert verdict(whole_run(tmp_path, 2.1, preset="authors")) == ("yes", True)
    assert verdict(whole_run(tmp_path, 2.0, epochs=29)) == ("unfinished", True)
    assert verdict(whole_run(tmp_path, 2.0, beta=0.2)) == ("other settings", False)


def test_a_row_is_unfinished_while_trials_are(tmp_path: Path) -> None:
    """Trials that run one after the other: the first that ends does not speak for the rest."""
    run = whole_run(tmp_path, 1.9)
    run = replace_experiment(run, trials=5)
    line = run.lines[-1]
    assert verdict(run)[0] == "unfinished"
    begun = [{**line, "trial": n, "epoch": 1, "test_error": 20.0} for n in range(1, 5)]
    assert verdict(replace(run, lines=[line, *begun]))[0] == "unfinished"
    ended = [{**line, "trial": n} for n in range(1, 5)]
    assert verdict(replace(run, lines=[line, *ended]))[0] == "yes"
    lost = [*ended[:3], {**ended[3], "epoch": 2, "diverged": {"reason": "nan"}}]
    assert verdict(replace(run, lines=[line, *lost]))[0] == "no", "a paper's trials do not diverge"


def test_the_page_needs_nothing_from_elsewhere(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = read(text)
    for tag, values in page.tags:
        for name in ("src", "href", "srcset", "action", "data"):
            value = values.get(name) or ""
            assert value.startswith("data:") or value in ("", "table.csv", "table.tex"), (tag, name, value)
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)|fetch\(|XMLHttpRequest", text)
    assert "processes, &lt;toy&gt;" in text, "what comes from files is escaped"


def place_of(browser: Browser, selector: str) -> tuple[float, float, float, float]:
    box = f"document.querySelector('{selector}').getBoundingClientRect()"
    browser.run(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
    left, top, width, height = browser.run(f"(b => [b.left, b.top, b.width, b.height])({box})")
    return left, top, width, height


FIGURE = "#curves figure:nth-of-type(2)"


@pytest.mark.browser
def test_in_a_browser_the_hover_shows_the_values_of_the_metrics(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.html")
    assert browser.run(f"document.querySelector('{FIGURE} h3').innerText") == "small (own, few) own"
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

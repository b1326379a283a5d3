"""Names from files and folders of others, through every output: shown as they are, or refused, never run or parsed."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Call
from helpers.training_runs import SMALL, few_images

from eqprop.report.page import render
from eqprop.report.runs import RunFolder, collect, rows, to_csv, to_latex
from eqprop.run import train
from eqprop.run.spec import Spec
from eqprop.run.toml import to_toml

PIECES = (
    *("<script>alert(1)</script>", "</script>", "<img src=x onerror=alert(1)>", '"><b>', "&lt;", "'", "`"),
    *("[/b]", "[bold", "[link=file:///etc/passwd]", "[@click=app.quit]", ":smile:", "\\[", "{0}", "%s", "{task}"),
    *("$", "$$", r"\$", r"$\frac$", r"\input{/etc/passwd}", "\\", "^", "~", "_", "#", "%", "&", "{", "}", "$x_{$"),
    *("=cmd|' /C calc'!A0", "+1", "-1", "@SUM(1)", '"', ",", ";", "é", "漢字", "\N{RIGHT-TO-LEFT MARK}", "ﬀ", " "),
)
FIXED = ("<b>$[/b]=\\^~", "=cmd|'/C calc'!A0", "[/b]", "$", "a$b$c", r"\^~", "</script><script>alert(1)</script>")


def names(count: int, seed: int) -> list[str]:
    """The fixed ones, then random ones of the pieces; what an experiment refuses as a name is left out."""
    draw = random.Random(seed)
    made = [*FIXED, *("".join(draw.choices(PIECES, k=draw.randint(1, 6))) for _ in range(count))]
    return [name for name in made if name.strip() and name.isprintable()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A real run in which one trial diverged."""
    place = tmp_path_factory.mktemp("hostile") / "run"
    train(SMALL, place, epochs=2, data=few_images(80, 40), trials=2)
    return collect(place).runs[0]


def named(run: RunFolder, name: str) -> RunFolder:
    """The same run with a hostile name wherever a file of a received folder can hold one."""
    experiment = run.spec.override(name=name, rates={**run.spec.optimizer.rates, name: 0.1})
    data = {**run.described.data, "name": name, "set": name, "sha256": name}
    content = {**run.described.content, "data": data, "changes_from_paper": [name]}
    last = {**run.lines[-1], "trial": name, "diverged": {"reason": name, "epoch": 1}}
    session = {"provenance": {name: name}, "engines": {name: name}}
    described = replace(run.described, spec=experiment, content=content)
    return replace(run, described=described, lines=[*run.lines, last], sessions=[session])


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(sorted(name for name, _ in attrs))))


def tags(page: str) -> list[tuple[str, tuple[str, ...]]]:
    reader = Tags()
    reader.feed(page)
    return reader.tags


def contents(run: RunFolder) -> Any:
    return replace(collect(run.folder), runs=[run])


def test_html_has_the_same_tags_whatever_the_name(run: RunFolder) -> None:
    usual = tags(render(contents(named(run, "usual"))))
    for name in names(10, seed=1):
        assert tags(render(contents(named(run, name)))) == usual, name


def test_csv_cells_hold_the_name_and_no_formula(run: RunFolder) -> None:
    for name in names(40, seed=2):
        _, row = csv.reader(io.StringIO(to_csv(rows([named(run, name)]))))
        assert row[0].removeprefix("'") == name.removeprefix("'")
        for cell in row:
            assert cell[:1] not in ("=", "+", "@", "\t", "\r"), name
            assert not cell.startswith("-") or re.fullmatch(r"-[\d.e+-]+", cell), name


def test_latex_has_no_command_of_the_name(run: RunFolder) -> None:
    usual = to_latex(rows([named(run, "usual")]))
    known = {*re.findall(r"\\[a-z]+", usual), r"\textbackslash", r"\textasciicircum", r"\textasciitilde"}
    for name in names(40, seed=3):
        text = to_latex(rows([named(run, name)]))
        assert set(re.findall(r"\\[a-z]+", text)) <= known, name
        bare = re.sub(r"\\text[a-z]+\{\}|\\[#$%&_{}]", "", text.splitlines()[4].split(" & ")[0])
        assert not set(bare) & set("\\#$%&_{}^~"), name


def test_show_train_and_report_with_a_hostile_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = Call(monkeypatch, capsys)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.toml"
    path.write_text(to_toml(SMALL.override(name=FIXED[0])))
    assert call("show", path)[0] == 0
    train(path, tmp_path / "run", epochs=1, data=few_images(40, 20))
    assert call("report", tmp_path / "run")[0] == 0
    assert "<b>$" not in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\x00", "\u202e", "\ud800", "", "x" * 201, 5, None, ["a"]])
def test_names_that_no_output_can_show_are_refused(name: Any) -> None:
    values = json.loads(json.dumps(SMALL.to_dict()))
    with pytest.raises(ValueError, match="name|printable"):
        Spec(**{**values, "name": name})
    with pytest.raises(ValueError, match="name|printable"):
        SMALL.override(**{"name": name} if name is not None else {"name": 5})

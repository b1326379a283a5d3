"""The page to play with: what it is made of, and that it computes what the library computes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers.browser import Browser
from torch import Tensor
from typer.testing import CliRunner

from eqprop import BPTT, EP, SquaredError, gdu
from eqprop.cli import load_commands
from eqprop.data import Images, mnist, one_hot
from eqprop.dynamics import set_nudge_site
from eqprop.gdu.budget import HOLDS
from eqprop.models import Layered
from eqprop.relax import relax
from eqprop.report.play import VERDICTS, dequantised, render, stored

AGREE = 1e-6
"""How far a number of the page may be from the library's, relative to the largest of its layer or parameter."""


@cache
def images() -> Images:
    return mnist(dtype=torch.float64)


def digit(example: dict[str, Any]) -> Tensor:
    return images().test_x[example["index"]][None]


def test_the_page_stands_alone_and_is_small() -> None:
    text = render()
    assert len(text.encode()) < 1_000_000
    assert "http" not in text
    assert not re.search(r"\b(?:fetch|import|XMLHttpRequest|WebSocket)\(", text)
    assert not re.search(r"\b(?:src|href)=[\"'](?!data:|#)", text)
    assert re.findall(r"\{(?:css|net|view|stored|about)\}", text) == []
    data = re.search(r'<script type="application/json" id="stored">(.*?)</script>', text, re.DOTALL)
    assert data
    assert json.loads(data[1])["verdicts"] == VERDICTS


def test_the_command_writes_the_page_and_says_how_to_open_it(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = CliRunner().invoke(load_commands(), ["play", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert out.resolve().as_uri() in done.output.replace("\n", "")
    assert out.read_text(encoding="utf-8") == render()


@pytest.mark.parametrize("name", ["energy-based", "prototypical"])
def test_the_stored_nets_have_the_errors_that_are_stated(name: str) -> None:
    net = stored()["nets"][name]
    state = relax(dequantised(net), images().test_x, net["experiment"]["phases"]["T"]).state
    error = 100.0 * float((state[0].argmax(1) != images().test_y).double().mean())
    assert error == pytest.approx(net["test_error"]["quantised"], abs=0.011)
    assert net["test_error"]["quantised"] < 5.0


@dataclass(frozen=True)
class Case:
    """A comparison that page and library both make: an example of the page and the answer it is nudged to."""

    net: str
    example: int
    answer: int
    T: int
    K: int
    beta: float
    site: str = "outside"

    def model(self) -> Layered:
        model = dequantised(stored()["nets"][self.net])
        if self.site == "inside":
            set_nudge_site(model, "inside")
        return model

    def script(self) -> str:
        """Evaluates to what the page finds."""
        made = f"Net.make(stored.nets['{self.net}'], '{self.site}')"
        return f"""(() => {{
            const stored = JSON.parse(document.getElementById("stored").textContent), net = {made};
            const x = Net.pixels(stored.examples[{self.example}].uint8), y = Net.oneHot({self.answer});
            const found = Net.study(net, x, y, {{T: {self.T}, K: {self.K}, beta: {self.beta}}});
            const plain = (p) => ({{neurons: [...p.neurons], biases: [...p.biases], W01: [...p.W01]}});
            const rmse = Object.fromEntries(Object.entries(found.metrics).map(([name, m]) => [name, m.rmse]));
            return {{
                states: found.states.filter((_, t) => t % 10 === 0 || t === {self.T}).map((s) => [...s]),
                ep: found.ep.map(plain), bptt: found.bptt.map(plain), visible: [...Net.visible(net, x)], rmse,
                verdict: Net.verdict(found, y, {self.K}, {self.beta}),
            }};
        }})()"""


EB, P = "energy-based", "prototypical"
CASES = [
    *(Case(EB, n, (n + 3) % 10, T=150, K=8, beta=0.01) for n in range(5)),
    *(Case(EB, n, n % 10, T=40, K=6, beta=0.5) for n in range(5, 10)),
    Case(EB, 10, 5, T=200, K=20, beta=0.5),
    Case(EB, 11, 4, T=12, K=12, beta=0.02),
    Case(EB, 10, 5, T=300, K=10, beta=0.001),
    Case(P, 0, 0, T=30, K=10, beta=0.1),
    Case(P, 10, 5, T=40, K=8, beta=0.1),
    Case(P, 11, 4, T=40, K=8, beta=1.0),
    Case(P, 3, 8, T=50, K=5, beta=0.01),
    Case(P, 10, 5, T=60, K=8, beta=0.01, site="inside"),
    Case(P, 7, 1, T=60, K=8, beta=0.1, site="inside"),
    Case(P, 2, 7, T=60, K=6, beta=0.5, site="inside"),
]


PARTS = ("neurons", "biases", "W01")


CAUSE_OF = {"residual": "T", "finite_beta": "beta", "output_slope": "nudge-site"}


def clear_cause(report: gdu.Report) -> str | None:
    """What the library blames, where one part of the error alone is more than the match allows; else None."""
    parts = {name: getattr(report.budget.synapses, name) or 0.0 for name in CAUSE_OF}
    large = [name for name, size in parts.items() if size > HOLDS]
    return CAUSE_OF[large[0]] if len(large) == 1 and report.budget.outcome != "holds" else None


def near(found: Any, expected: Tensor) -> None:
    values = numpy.asarray(found, dtype=float).reshape(expected.shape)
    largest = float(expected.abs().max())
    assert float(numpy.abs(values - expected.detach().numpy()).max()) <= AGREE * largest


@pytest.mark.browser
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.net}-{c.site}-{c.example}-T{c.T}-K{c.K}-beta{c.beta}")
def test_the_page_computes_what_the_library_computes(browser: Browser, page: Path, case: Case) -> None:
    if browser.run("typeof Net") != "object":
        browser.open(page)
    found = browser.run(case.script())
    model, cost = case.model(), SquaredError()
    x = digit(stored()["examples"][case.example])
    y = one_hot(torch.tensor([case.answer]), 10, torch.float64)
    free = relax(model, x, case.T, keep=case.T)
    shown = [s for t, s in enumerate((*free.trail, free.state)) if t % 10 == 0 or t == case.T]
    near(found["states"], torch.stack([torch.cat(s, -1)[0] for s in shown]))
    visible = torch.tensor(found["visible"], dtype=torch.float64)
    for name, estimator, sign in (("ep", EP(case.T, case.K, beta=case.beta), 1), ("bptt", BPTT(case.T, case.K), -1)):
        theirs = estimator.processes(model, cost, x, y, free)
        mine = {part: torch.tensor([step[part] for step in found[name]], dtype=torch.float64) for part in PARTS}
        for part, lead in (("neurons", theirs.neurons), ("biases", (theirs.synapses["b0"], theirs.synapses["b1"]))):
            outputs, hidden = (layer.reshape(case.K, -1) for layer in lead)
            near(mine[part][:, :10], sign * outputs)
            near(mine[part][:, 10:], sign * hidden)
        near(mine["W01"], sign * theirs.synapses["W01"])
        near(mine["biases"][:, 10:, None] * visible, sign * theirs.synapses["W12"])
    report = gdu.compare(model, cost, x, y, case.T, case.K, case.beta, gdu.Options(shown=0))
    expected = {n: m.rmse for kind in (report.neurons, report.synapses, report.biases) for n, m in kind.items()}
    assert found["rmse"] == pytest.approx(expected, rel=AGREE)
    assert found["verdict"]["outcome"] == report.budget.outcome
    if (cause := clear_cause(report)) is not None:
        assert found["verdict"]["cause"] == cause

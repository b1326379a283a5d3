"""The page to play with: one HTML file with two small trained nets in it, no network, no server."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch

from eqprop.dynamics import NudgeSite
from eqprop.files import write_text
from eqprop.gdu.verdict import CAUSES
from eqprop.models import Layered
from eqprop.provenance import __version__

HERE = Path(__file__).parent
NETS = HERE / "play-nets.json"

OUTCOMES = {"holds approximately": "Holds approximately.", "fails": "Does not hold."}
HOLDS = {
    "holds": "Holds: EP's updates are BPTT's gradients.",
    "silent": "No synapse carries a signal: there is nothing to learn here.",
}
REMEDIES = {
    "T": ": a neuron still moves by {residual} per step. Raise T.",
    "beta": ": lower β.",
    "nudge-site": ": BPTT sees σ' at the outputs, EP does not. Put the nudge inside σ, or choose the energy-based net.",
    "two-cycle": ": there is no steady state to compare at.",
    "never-settles": ": there is no steady state to compare at.",
}
NEAR = 0.1
"""RMSE of the synapses below which the page says that the property holds approximately."""
VERDICTS = HOLDS | {cause: CAUSES[cause] + remedy for cause, remedy in REMEDIES.items()}
"""What the page says of a comparison: by outcome where the property holds or nothing moves, else by cause, which is
the change that would bring EP's updates nearest to BPTT's gradients. A cause has the words the doctor has for it."""


@cache
def stored() -> dict[str, Any]:
    """The nets, digits and provenance that benchmarks/play_nets.py writes."""
    content: dict[str, Any] = json.loads(NETS.read_text(encoding="utf-8"))
    return content


def dequantised(net: Mapping[str, Any], nudge_site: NudgeSite = "outside") -> Layered:
    """A stored net in float64 as the page computes with it: integer times the scale of its row."""
    eps = net["eps"] if net["setting"] == "energy-based" else None
    model = Layered(
        *(net["sizes"], net["setting"], net["activation"]),
        eps=eps,
        nudge_site=nudge_site,
        seed=0,
        dtype=torch.float64,
    )
    with torch.no_grad():
        for name, weight in net["weights"].items():
            integers = numpy.frombuffer(base64.b64decode(weight["int8"]), dtype=numpy.int8).reshape(weight["shape"])
            scale = numpy.array(weight["scale"])[:, None]
            getattr(model, name).copy_(torch.from_numpy(integers * scale))
        for name, bias in net["biases"].items():
            getattr(model, name).copy_(torch.tensor(bias, dtype=torch.float64))
    return model


def render() -> str:
    """The whole page."""
    parts = {
        "css": _read("play.css"),
        "net": _read("play-net.js"),
        "view": _read("play.js"),
        "stored": _for_script(_page_data()),
        "about": _about(),
    }
    page = _read("play.html")
    for name, content in parts.items():
        before, _, after = page.partition(f"{{{name}}}")
        page = f"{before}{content}{after}"
    return page


def write_play(out: Path) -> Path:
    """Write the page to a file, or as play.html into a folder that is there."""
    path = out / "play.html" if out.is_dir() else out
    write_text(path, render())
    return path


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8").strip()


def _page_data() -> dict[str, Any]:
    """What the page's script reads: nets, digits and the words of its verdicts."""
    shown = ("setting", "eps", "sizes", "weights", "biases")
    nets = {name: {key: net[key] for key in shown} for name, net in stored()["nets"].items()}
    digits = {key: stored()[key] for key in ("examples", "back_and_forth")}
    return {"nets": nets, **digits, "outcomes": OUTCOMES, "verdicts": VERDICTS, "near": NEAR}


def _for_script(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _about() -> str:
    """The line at the foot of the page: what its nets are, and whose digits these are."""
    errors = {name: net["test_error"]["quantised"] for name, net in stored()["nets"].items()}
    sizes = "-".join(str(n) for n in reversed(stored()["nets"]["energy-based"]["sizes"]))
    return (
        f"Two nets of {sizes} neurons, trained with EP on MNIST and rounded to 8 bits; test error "
        f"{errors['energy-based']:.2f} % (energy-based) and {errors['prototypical']:.2f} % (prototypical). "
        f"Everything is computed on this page, in double precision, as eqprop {__version__} computes it. The example "
        "digits are from MNIST (Yann LeCun, Corinna Cortes, Christopher Burges), licensed CC BY-SA 3.0."
    )

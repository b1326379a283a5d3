"""What the page of one's own run shows of its net is what the net does."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import pytest
import torch
from helpers.training_runs import SMALL, few_images
from PIL import Image

import eqprop
from eqprop.report.examined import ExaminedNet, examinations
from eqprop.report.page import write_report
from eqprop.report.runs import read_run
from eqprop.report.sections import compared, differing
from eqprop.run import train

DATA = few_images(200, 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on data that its folder names, and another that differs in beta and the epochs."""
    place = tmp_path_factory.mktemp("own")
    cut = {"samples": 200, "test_samples": 60, "threads": 1}
    train(SMALL, place / "one", epochs=3, estimators="ep,bptt", **cut)
    train(SMALL, place / "two", epochs=2, beta=0.3, **cut)
    return place


@pytest.fixture(scope="module")
def seen(folder: Path) -> ExaminedNet:
    found, _ = examinations(read_run(folder / "one"), gradients=True)
    return found


def test_errors_by_class_are_those_of_its_answers(folder: Path, seen: ExaminedNet) -> None:
    answers = eqprop.predict(eqprop.load(folder / "one"), DATA.test_x)
    assert sum(c.wrong for c in seen.classes) == int((answers != DATA.test_y).sum())
    for one in seen.classes:
        own = answers[DATA.test_y == int(one.name)]
        assert (one.samples, one.wrong) == (len(own), int((own != int(one.name)).sum()))
        if one.mistaken_for is not None:
            counts = torch.bincount(own[own != int(one.name)], minlength=10)
            assert counts[int(one.mistaken_for)] == counts.max()


def test_the_worst_answers_lead_furthest_over_the_right_one(folder: Path, seen: ExaminedNet) -> None:
    net = eqprop.load(folder / "one")
    outputs = eqprop.predict(net, DATA.test_x, outputs=True)
    lead = outputs.max(1).values - outputs.gather(1, DATA.test_y[:, None])[:, 0]
    order = lead.argsort(descending=True, stable=True)[: len(seen.worst)]
    expected = [(str(int(DATA.test_y[n])), str(int(outputs[n].argmax()))) for n in order]
    assert [(m.label, m.answer) for m in seen.worst] == expected
    first = seen.worst[0].png
    assert first is not None
    pixels = torch.tensor(list(Image.open(io.BytesIO(first)).tobytes())).view(28, 28)
    assert torch.equal(pixels, (DATA.test_x[order[0]] * 255).round().long().view(28, 28))


def test_the_settling_is_that_of_its_steps(folder: Path, seen: ExaminedNet) -> None:
    net, curve = eqprop.load(folder / "one"), seen.settling
    assert curve is not None
    assert (len(curve.free), len(curve.nudged)) == (SMALL.phases.T, SMALL.phases.K)
    x = DATA.test_x[: curve.samples]
    for t in (1, SMALL.phases.T):
        before, after = (eqprop.relax(net.model, x, n).state for n in (t - 1, t))
        moved = torch.stack([(a - b).abs().amax(1) for a, b in zip(after, before, strict=True)]).amax(0)
        assert curve.free[t - 1] == pytest.approx((float(moved.median()), float(moved.max())), rel=1e-4)
    assert curve.nudged[0][1] > 0.0, "the nudge moves the outputs"


def test_the_doctor_and_the_gradient_are_asked_about_ep_and_bptt(folder: Path, seen: ExaminedNet) -> None:
    assert seen.diagnosis is not None
    assert seen.gradients is not None
    assert set(seen.gradients.parameters) == {"W01", "W12", "b0", "b1", "all"}
    _, other = examinations(read_run(folder / "one"), gradients=True)
    assert other.diagnosis is None, "BPTT is not examined for EP's faults"
    assert other.gradients is not None
    assert other.gradients.parameters["all"].cosine == pytest.approx(1.0, abs=1e-6)


def test_runs_side_by_side_show_every_setting_that_differs_and_no_other(folder: Path) -> None:
    runs = [read_run(folder / name) for name in ("one", "two")]
    found = dict(differing(runs))
    assert found["phases: beta"] == ["0.2", "0.3"]
    assert found["optimizer: epochs"] == ["3", "2"]
    assert "phases: T" not in found
    assert compared(runs[:1]) == []
    page = write_report([folder / "one", folder / "two", folder / "report.html"], with_curves=False, examine=False).page
    assert page == folder.resolve() / "report.html"
    assert "Side by side" in page.read_text()
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        write_report([folder / "three", folder / "four"])


def test_the_page_shows_what_was_seen_and_escapes_it(folder: Path) -> None:
    text = write_report(folder / "one", with_curves=False).page.read_text()
    for part in ("Errors by class", "Worst answers", "How the state settles", "The doctor", "What changed between"):
        assert part in text, part
    picture = re.search(r'<div class="worst"><div><img src="data:image/png;base64,([^"]+)"', text)
    assert picture is not None
    assert base64.b64decode(picture[1]).startswith(b"\x89PNG")
    assert "The nets" not in write_report(folder / "one", with_curves=False, examine=False).page.read_text()

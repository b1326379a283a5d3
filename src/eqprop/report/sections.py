"""Parts of the page about one's own runs: what a net gets wrong, how it settles, what changed, what runs differ in."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from html import escape
from statistics import fmean

from eqprop.estimators.named import label
from eqprop.report.examined import ClassErrors, ExaminedNet, Mistake, SettlingCurve
from eqprop.report.runs import KINDS, Point, RunFolder
from eqprop.run.log import Line
from eqprop.run.spec import SECTIONS

MOST_EPOCHS = 12
"""Epochs in the table of what changed; of more, the first, the best, the last and some between."""
WIDTH, HEIGHT, LEFT, FOOT = 640.0, 260.0, 74.0, 50.0
CHANGED_ON_THE_WAY = {"T": "T", "beta": "beta", "rate_factor": "rates ×", "radius": "radius"}
"""Fields that only runs which are kept at rest have, and their headings."""


def looked_at(run: RunFolder, found: Sequence[ExaminedNet]) -> str:
    """A run's estimators one by one: verdict, epochs, classes, pictures, settling."""
    parts = [_of_estimator(run, one) for one in found]
    return f'<h3 class="run">{escape(run.title)} <span class=soft>{escape(run.folder.name)}</span></h3>{"".join(parts)}'


def _of_estimator(run: RunFolder, found: ExaminedNet) -> str:
    trained = f"trial 0 after epoch {found.epoch}" if found.epoch else "trial 0"
    missing = "".join(f'<p class="soft">{escape(why)}</p>' for why in found.missing)
    parts = [_verdict(found), _gradients(found), missing, epochs_table(run, found.estimator)]
    figures = [_classes(found), _pictures(found), _settling(found)]
    shown = "".join(figure for figure in figures if figure)
    figures_html = f'<div class="figures">{shown}</div>' if shown else ""
    return f"<h4>{escape(label(found.estimator))}, {trained}</h4>{''.join(parts)}{figures_html}\n"


def _verdict(found: ExaminedNet) -> str:
    if found.diagnosis is None:
        return ""
    kind = "yes" if found.diagnosis.healthy else "no"
    word = "The doctor finds nothing wrong" if found.diagnosis.healthy else "The doctor finds a cause"
    verdict = found.diagnosis.verdict.removeprefix("No cause found: ")
    return f'<p><span class="{kind}">{word}.</span> {escape(verdict[:1].upper() + verdict[1:])}</p>'


def _gradients(found: ExaminedNet) -> str:
    """How far the gradient of a mini-batch points where BPTT's does."""
    if found.gradients is None:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{m.cosine:.4f}</td><td>{m.norm:.3f}</td></tr>'
        for name, m in found.gradients.parameters.items()
    )
    return (
        f"<details open><summary>Gradient of a mini-batch beside {escape(label('bptt'))}’s</summary>"
        '<div class="wide"><table class="small"><thead><tr><th>parameter</th><th>cosine</th><th>ratio of lengths</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def epochs_table(run: RunFolder, estimator: str) -> str:
    """Errors, loss and settling of some epochs, means over trials, each error with its change since the row above."""
    lines = [line for line in run.lines if line["estimator"] == estimator and not line["diverged"]]
    epochs = sorted({line["epoch"] for line in lines})
    if not epochs:
        return ""
    by_epoch = {epoch: [line for line in lines if line["epoch"] == epoch] for epoch in epochs}
    measured = {e: m for e, own in by_epoch.items() if (m := _mean(own, "test_error")) is not None}
    best = min(measured, key=measured.__getitem__) if measured else None
    extra = {name: head for name, head in CHANGED_ON_THE_WAY.items() if any(name in line for line in lines)}
    heads = [
        "test error, %",
        "change",
        "train error, %",
        "loss",
        "residual",
        "not settled, %",
        "time, s",
        *extra.values(),
    ]
    rows, before = [], None
    for epoch in _some(epochs, best):
        own = by_epoch[epoch]
        test = measured.get(epoch)
        change = "" if test is None or before is None else f"{test - before:+.2f}".replace("-", "−")
        unsettled = _mean(own, "unsettled")
        cells = [
            _number(test, ".2f"),
            change,
            _number(_mean(own, "train_error"), ".2f"),
            _number(_mean(own, "loss"), ".4g"),
            _number(_mean(own, "residual_mean"), ".1e"),
            _number(None if unsettled is None else 100.0 * unsettled, ".3g"),
            _number(_mean(own, "seconds"), ".1f"),
            *(_number(_mean(own, name), ".3g") for name in extra),
        ]
        mark = ' <span class="soft">best</span>' if epoch == best and len(epochs) > 1 else ""
        rows.append(f'<tr><th scope="row">{epoch}{mark}</th>' + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
        before = test if test is not None else before
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    return (
        "<details open><summary>What changed between epochs</summary>"
        f'<div class="wide"><table class="small epochs"><thead><tr><th>epoch</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        '<p class="soft">Means over trials. Change: of the test error since the row above. Residual: how far one more '
        "step would have moved a state after the free phase.</p></details>"
    )


def _some(epochs: Sequence[int], best: int | None) -> list[int]:
    """The first and the last, the best, and epochs between them at even distances."""
    if len(epochs) <= MOST_EPOCHS:
        return list(epochs)
    places = [round(n * (len(epochs) - 1) / (MOST_EPOCHS - 2)) for n in range(MOST_EPOCHS - 1)]
    return sorted({*(epochs[n] for n in places), *([] if best is None else [best])})


def _mean(lines: Sequence[Line], name: str) -> float | None:
    found = [float(line[name]) for line in lines if isinstance(line.get(name), int | float)]
    return fmean(found) if found else None


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _classes(found: ExaminedNet) -> str:
    """Bars: the share of each class that is wrong, and what it is taken for."""
    if not found.classes:
        return ""
    shown = sorted(found.classes, key=lambda c: -c.percent)
    rest = len(shown) - 20
    top = max(max(c.percent for c in shown), 1e-9)
    rows = "".join(_bar(c, top) for c in shown[:20])
    more = f"; {rest} classes with fewer errors are not shown" if rest > 0 else ""
    wrong = sum(c.wrong for c in shown)
    part = "" if found.samples == found.of else f" of {found.of:,}, the first"
    return (
        f'<figure class="classes"><h5>Errors by class</h5><table class="small">{rows}</table><figcaption>{wrong:,} of '
        f"{found.samples:,} test samples{part} are wrong; hardest first, with the class each is most often taken for"
        f"{more}.</figcaption></figure>"
    )


def _bar(one: ClassErrors, top: float) -> str:
    taken = f"as {escape(one.mistaken_for)}" if one.mistaken_for is not None else ""
    cells = (
        f'<td class="bar"><i style="width:{100 * one.percent / top:.1f}%"></i></td>',
        f"<td>{one.percent:.1f} %</td>",
        f'<td class="soft">{one.wrong} of {one.samples:,}</td>',
        f'<td class="soft text">{taken}</td>',
    )
    return f'<tr><th scope="row">{escape(one.name)}</th>{"".join(cells)}</tr>'


def _pictures(found: ExaminedNet) -> str:
    drawn = [one for one in found.worst if one.png is not None]
    if not drawn:
        return ""
    shown = "".join(_picture(one) for one in drawn)
    return (
        f'<figure><h5>Worst answers</h5><div class="worst">{shown}</div><figcaption>Test samples whose wrong answer '
        "leads furthest over the right one: what it is → what the net says.</figcaption></figure>"
    )


def _picture(one: Mistake) -> str:
    assert one.png is not None, "only pictures are shown"
    words = escape(f"{one.label} → {one.answer}")
    source = base64.b64encode(one.png).decode()
    return f'<div><img src="data:image/png;base64,{source}" alt="{words}"><span>{words}</span></div>'


def _settling(found: ExaminedNet) -> str:
    """Movement per step on a logarithmic axis; the nudged phase follows the free one."""
    curve = found.settling
    if curve is None or not curve.free:
        return ""
    return (
        f"<figure><h5>How the state settles</h5>{_settling_chart(curve)}<figcaption>{_settling_caption(curve)}"
        "</figcaption></figure>"
    )


def _settling_caption(curve: SettlingCurve) -> str:
    median, largest = curve.free[-1]
    text = (
        f"How far each step moves the neuron that moves most: median over {curve.samples} test samples (line) and the "
        f"sample that moves most (dotted). The last of {len(curve.free)} free steps still moves the median sample by "
        f"{_small(median)} and the worst by {_small(largest)}"
    )
    if not curve.nudged:
        return text + "."
    first = max(value for value, _ in curve.nudged)
    return text + f"; the nudge moves it by up to {_small(first)} per step (right of the mark)."


def _small(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _settling_chart(curve: SettlingCurve) -> str:
    steps = [*curve.free, *curve.nudged]
    values = [v for pair in steps for v in pair if v > 0.0]
    high = 10.0 ** math.ceil(math.log10(max(values, default=1.0)))
    low = max(10.0 ** math.floor(math.log10(min(values, default=1e-8))), high * 1e-10)
    low = low if low < high else high / 10.0
    right, foot, top = WIDTH - 14.0, HEIGHT - FOOT, 30.0

    def x(step: int) -> float:
        return LEFT + (step - 1) / max(len(steps) - 1, 1) * (right - LEFT)

    def y(value: float) -> float:
        share = math.log(min(max(value, low), high) / low) / math.log(high / low)
        return foot - share * (foot - top)

    parts = []
    decades = round(math.log10(high / low))
    for n in range(0, decades + 1, max(1, math.ceil(decades / 5))):
        at = y(low * 10.0**n)
        power = round(math.log10(low)) + n
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{right:g}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8:g}" y="{at + 5:.1f}" text-anchor="end">1e{power}</text>')
    parts.append(f'<line class="axis" x1="{LEFT:g}" x2="{right:g}" y1="{foot:g}" y2="{foot:g}"/>')
    for step in sorted({1, len(curve.free), len(steps)}):
        if step in (1, len(curve.free)) or len(steps) - len(curve.free) > 0.12 * len(steps):
            parts.append(f'<text class="tick" x="{x(step):.1f}" y="{foot + 22:g}" text-anchor="middle">{step}</text>')
    if curve.nudged:
        mark = (x(len(curve.free)) + x(len(curve.free) + 1)) / 2
        parts.append(f'<line class="mark" x1="{mark:.1f}" x2="{mark:.1f}" y1="{top:g}" y2="{foot:g}"/>')
    for n, style in ((1, "most"), (0, "median")):
        path = " ".join(f"{'L' if t else 'M'}{x(t + 1):.1f} {y(pair[n]):.1f}" for t, pair in enumerate(steps))
        parts.append(f'<path class="{style}" d="{path}"/>')
    parts.append('<text class="name" x="4" y="18">movement per step</text>')
    parts.append(f'<text class="name" x="{(LEFT + right) / 2:g}" y="{HEIGHT - 4:g}" text-anchor="middle">step</text>')
    name = f"Movement of the state over {len(curve.free)} free and {len(curve.nudged)} nudged steps"
    return (
        f'<svg class="chart settling" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{name}">'
        + "".join(parts)
        + "</svg>"
    )


def what_is_seen(run: RunFolder) -> str:
    """A sentence per estimator about its curves: where the test error begins, its lowest, its end."""
    said = []
    for estimator in run.spec.estimators:
        curve = run.curve(estimator, "test")
        if not curve:
            continue
        lowest = min(curve, key=lambda p: p.mean)
        text = f"{label(estimator)}: {_course(curve)}"
        if lowest.epoch not in (curve[0].epoch, curve[-1].epoch):
            text += f", lowest at epoch {lowest.epoch} ({lowest.mean:.2f} %)"
        train = run.curve(estimator, "train")
        said.append(text + (f"; train error {train[-1].mean:.2f} %" if train else ""))
    return ". ".join(said) + "." if said else ""


def _course(curve: Sequence[Point]) -> str:
    first, last = curve[0], curve[-1]
    if first is last:
        return f"test error {last.mean:.2f} % after epoch {last.epoch}"
    word = "falls" if last.mean < first.mean else "rises" if last.mean > first.mean else "stays"
    return f"test error {word} from {first.mean:.2f} % to {last.mean:.2f} % at epoch {last.epoch}"


def compared(runs: Sequence[RunFolder]) -> str:
    """Several runs side by side: the errors of each at its end, and every setting in which they differ."""
    if len(runs) < 2:
        return ""
    heads = "".join(f"<th>{escape(run.folder.name)}</th>" for run in runs)
    rows = [_line_of("network", [run.title for run in runs])]
    for estimator in dict.fromkeys(name for run in runs for name in run.spec.estimators):
        for kind in KINDS:
            ends = [run.last(estimator, kind) for run in runs]
            if any(ends):
                values = ["–" if end is None else _point(end) for end in ends]
                numbers = [math.inf if end is None else end.mean for end in ends]
                several = kind == "test" and sum(end is not None for end in ends) > 1
                best = numbers.index(min(numbers)) if several else None
                rows.append(_line_of(f"{label(estimator)} {kind} error, %", values, best))
    rows += [_line_of(name, values) for name, values in differing(runs)]
    return (
        '<section id="compared"><h2>Side by side</h2><p class="soft">Errors at the last epoch, the lowest test error '
        "in colour; below them every setting that is not the same in all runs.</p>"
        f'<div class="wide"><table class="compared"><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>\n"
    )


def _line_of(name: str, values: Sequence[str], best: int | None = None) -> str:
    cells = "".join(f"<td{' class=yes' if n == best else ''}>{escape(v)}</td>" for n, v in enumerate(values))
    return f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'


def _point(point: Point) -> str:
    return f"{point.mean:.2f}" + ("" if point.std is None else f" ± {point.std:.2f}")


def differing(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs, with the value of each run; the data is one of them."""
    settings = [_flat(run) for run in runs]
    names = dict.fromkeys(name for own in settings for name in own)
    rows = [(name, [own.get(name, "–") for own in settings]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _flat(run: RunFolder) -> dict[str, str]:
    content = run.spec.to_dict()
    found = {"preset": content["preset"], "data": run.data} | {
        f"{section}: {name}": value
        for section in SECTIONS
        for name, value in content[section].items()
        if value is not None and (section, name) != ("run", "estimators")
    }
    found["estimators"] = ", ".join(run.spec.estimators)
    return {name: _shown(value) for name, value in found.items()}


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

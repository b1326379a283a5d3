"""The picture of the start page: a small net settles, is nudged, moves, and each synapse gets its update.

Every size in it comes from the library: the states of a real free and nudged phase, and EP's gradient.
"""

from __future__ import annotations

import torch

import eqprop

FREE, NUDGED, SHOWN, SECONDS = 24, 12, 14, 12
STEPS = FREE + NUDGED + SHOWN
BETA = 1.0
COLUMNS = ((420, (60, 140)), (240, (30, 100, 170)), (60, (60, 140)))  # outputs, hidden, inputs
CAPTIONS = (
    (0, FREE, "1. Free phase: the net settles"),
    (FREE, FREE + NUDGED, "2. Nudged phase: the outputs are pulled, the change travels"),
    (FREE + NUDGED, STEPS, "3. Update: what changed. Solid: stronger; dashed: weaker"),
)
STYLE = (
    ".o{fill:#fff;stroke:#5c6bc0;stroke-width:2}.n{fill:#5c6bc0}.i{fill:#9e9e9e}.w{stroke:#9e9e9e;stroke-width:1.5}"
    # Orange and blue, which the colour-blind can tell apart.
    ".u{opacity:0}.up{stroke:#d55e00}.down{stroke:#0072b2;stroke-dasharray:9 6}"
    ".c{opacity:0;font:15px sans-serif;fill:#3949ab;text-anchor:middle}"
    f".n,.c,.u{{animation-duration:{SECONDS}s;animation-timing-function:linear;animation-iteration-count:infinite}}"
    "@media (prefers-reduced-motion:reduce){.n,.c,.u{animation:none}.u,.c2{opacity:1}}"
)


def draw() -> str:
    """An SVG with CSS animation: the size of a neuron is its state. It stands still for those who prefer that."""
    states, updates = _computed()
    rules, shapes = [], _wires(updates)
    places = [(x, y) for x, rows in COLUMNS[:2] for y in rows]
    for n, ((x, y), values) in enumerate(zip(places, zip(*states, strict=True), strict=True)):
        frames = "".join(f"{_at(t)}{{transform:scale({v:.4f})}}" for t, v in enumerate(values))
        rules.append(f"@keyframes n{n}{{{frames}}}.n{n}{{transform:scale({values[-1]:.4f});animation-name:n{n}}}")
        shapes.append(
            f'<g transform="translate({x} {y})"><circle class="o" r="26"/><circle class="n n{n}" r="26"/></g>'
        )
    for n, (start, end, words) in enumerate(CAPTIONS):
        rules.append(f"@keyframes c{n}{{{_between(start, end)}}}.c{n}{{animation-name:c{n}}}")
        shapes.append(f'<text class="c c{n}" x="240" y="222">{words}</text>')
    rules.append(f"@keyframes u{{{_between(FREE + NUDGED, STEPS)}}}.u{{animation-name:u}}")
    style, drawn = "".join([*rules, STYLE]), '<rect width="480" height="232" rx="6" fill="#fff"/>' + "".join(shapes)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 232"><style>{style}</style>{drawn}</svg>\n'


def _at(step: float) -> str:
    return f"{100 * step / STEPS:.1f}%"


def _between(start: int, end: int) -> str:
    """Seen between two steps, with a short fade on both sides."""
    inside = f"{_at(start + 0.5)},{_at(end - 0.5)}{{opacity:1}}"
    return f"0%,{_at(start)}{{opacity:0}}{inside}{_at(end)},100%{{opacity:0}}"


def _computed() -> tuple[list[list[float]], list[list[list[float]]]]:
    """The states of outputs and hidden neurons step by step, and EP's updates of the two weights."""
    net = eqprop.models.Layered((2, 3, 2), "energy-based", "tanh", eps=0.25, seed=0, dtype=torch.float64)
    with torch.no_grad():
        net.W01.copy_(torch.tensor([[0.6, 0.2, 0.4], [0.2, 0.6, 0.3]]))
        net.W12.copy_(torch.tensor([[0.8, 0.1], [0.2, 0.7], [0.5, 0.4]]))
        net.b0.zero_()
        net.b1.zero_()
    x = torch.tensor([[0.9, 0.6]], dtype=torch.float64)
    y = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    cost = eqprop.SquaredError()
    nudge, states = eqprop.Nudge(cost, y, BETA), [net.init_state(x)]
    for t in range(FREE + NUDGED):
        states.append(eqprop.relax(net, x, 1, states[-1], nudge if t >= FREE else None).state)
    states += [states[-1]] * SHOWN
    gradient = eqprop.EP(FREE, NUDGED, beta=BETA).gradient(net, cost, x, y)[1]
    shown = [[min(max(float(v), 0.05), 1.0) for layer in s for v in layer[0]] for s in states]
    return shown, [(-gradient[weight]).tolist() for weight in (net.W01, net.W12)]


def _wires(updates: list[list[list[float]]]) -> list[str]:
    """Synapses, and over each its update: the wider, the larger."""
    plain, drawn = [], []
    for layer, weights in enumerate(updates):
        (x1, above), (x2, below) = COLUMNS[layer], COLUMNS[layer + 1]
        largest = max(abs(v) for row in weights for v in row)
        for y1, row in zip(above, weights, strict=True):
            for y2, v in zip(below, row, strict=True):
                ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
                plain.append(f'<line class="w" {ends}/>')
                kind, width = "up" if v > 0 else "down", 0.5 + 7 * abs(v) / largest
                drawn.append(f'<line class="u {kind}" stroke-width="{width:.2f}" {ends}/>')
    x, rows = COLUMNS[2]
    return [*plain, *drawn, *(f'<circle class="i" cx="{x}" cy="{y}" r="14"/>' for y in rows)]

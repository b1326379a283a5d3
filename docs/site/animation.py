"""The picture of the start page: a small net settles, is nudged, moves. Its numbers are those of a real free phase."""

from __future__ import annotations

import torch

import eqprop

FREE, NUDGED, SECONDS = 24, 12, 9
COLUMNS = ((420, (60, 140)), (240, (30, 100, 170)))  # outputs, hidden
INPUTS = ((60, 60), (60, 140))
CAPTIONS = ((0, 62, "free phase: it settles"), (62, 100, "nudged phase: the outputs are pulled, the change travels"))


def draw() -> str:
    """An SVG with CSS animation: the size of a neuron is its state. It stands still for those who prefer that."""
    states = _trajectory()
    rules, shapes = [], [*_wires()]
    for n, (place, values) in enumerate(zip(_places(), zip(*states, strict=True), strict=True)):
        frames = "".join(
            f"{100 * t / (len(values) - 1):.1f}%{{transform:scale({v:.4f})}}" for t, v in enumerate(values)
        )
        rules.append(f"@keyframes n{n}{{{frames}}}.n{n}{{transform:scale({values[FREE]:.4f});animation-name:n{n}}}")
        x, y = place
        shapes.append(
            f'<g transform="translate({x} {y})"><circle class="o" r="26"/><circle class="n n{n}" r="26"/></g>'
        )
    for n, (start, end, words) in enumerate(CAPTIONS):
        rules.append(
            f"@keyframes c{n}{{0%,100%{{opacity:0}}{start + 0.1}%,{end - 0.1}%{{opacity:1}}{_off(start, end)}}}"
        )
        shapes.append(f'<text class="c" style="animation-name:c{n}" x="240" y="222">{words}</text>')
    style = (
        ".o{fill:#fff;stroke:#5c6bc0;stroke-width:2}.n{fill:#5c6bc0}.i{fill:#9e9e9e}line{stroke:#9e9e9e;stroke-width:1.5}"
        ".c{opacity:0;font:15px sans-serif;fill:#7986cb;text-anchor:middle}"
        f".n,.c{{animation:x {SECONDS}s linear infinite}}{''.join(rules)}"
        "@media (prefers-reduced-motion:reduce){.n,.c{animation:none}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 232"><style>{style}</style>{"".join(shapes)}</svg>\n'
    )


def _off(start: int, end: int) -> str:
    return "".join(f"{at}%{{opacity:0}}" for at in (start, end) if 0 < at < 100)


def _trajectory() -> list[list[float]]:
    """The states of outputs and hidden neurons, step by step: free, then nudged."""
    net = eqprop.models.Layered((2, 3, 2), "energy-based", "tanh", eps=0.25, seed=0, dtype=torch.float64)
    with torch.no_grad():
        net.W01.copy_(torch.tensor([[0.6, 0.2, 0.4], [0.2, 0.6, 0.3]]))
        net.W12.copy_(torch.tensor([[0.8, 0.1], [0.2, 0.7], [0.5, 0.4]]))
        net.b0.zero_()
        net.b1.zero_()
    x = torch.tensor([[0.9, 0.6]], dtype=torch.float64)
    nudge = eqprop.Nudge(eqprop.SquaredError(), torch.tensor([[1.0, 0.0]], dtype=torch.float64), 1.0)
    states = [net.init_state(x)]
    for t in range(FREE + NUDGED):
        states.append(eqprop.relax(net, x, 1, states[-1], nudge if t >= FREE else None).state)
    return [[min(max(float(v), 0.05), 1.0) for layer in s for v in layer[0]] for s in states]


def _places() -> list[tuple[int, int]]:
    return [(x, y) for x, rows in COLUMNS for y in rows]


def _wires() -> list[str]:
    (o, outputs), (h, hidden) = COLUMNS
    ends = [(h, a, o, b) for a in hidden for b in outputs] + [(x, y, h, b) for x, y in INPUTS for b in hidden]
    wires = [f'<line x1="{a}" y1="{b}" x2="{c}" y2="{d}"/>' for a, b, c, d in ends]
    return [*wires, *(f'<circle class="i" cx="{x}" cy="{y}" r="14"/>' for x, y in INPUTS)]

"""The schematic figures of the paper, drawn anew: graphs unfolded in time, and what is connected to what in each net.

[fig:theorem, fig:toy-model, fig:bptt, toymodelarchi, saw_teeth]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from eqprop.report.figures import BLUE, COLOURS, GREY, ORANGE, as_text, drawn, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]
GREEN, RED, PALE = "#009E73", "#D55E00", "#eeeeee"
AT_REST = ("#cfe3f5", "#fbe0c3")
"""Of outputs and of hidden layers."""
STEP_COLOURS = (GREEN, BLUE, RED, ORANGE)
"""Of the time steps 0 to 3 of the second phase and of BPTT, as in the paper."""
RADIUS = 14.0
"""Of a node, in points: arrows end there."""


class ArrowStyle(NamedTuple):
    """How an arrow is drawn."""

    colour: str = "black"
    width: float = 1.2
    style: str = "-|>"
    bend: float = 0.0
    gap: float = RADIUS


PLAIN = ArrowStyle()


def blank(ax: Axes, width: float, height: float, title: str = "") -> None:
    """A panel without axes, from half a unit left of and below 0 to (width, height)."""
    ax.set(xlim=(-0.8, width), ylim=(-0.6, height))
    ax.set_axis_off()
    if title:
        ax.set_title(title, fontsize=9, loc="left")


def node(ax: Axes, at: Point, text: str, face: str = "white", edge: str = "black", size: float = 9.0) -> None:
    """A round node with a symbol in it, white on dark faces."""
    ax.scatter(*at, s=(2 * RADIUS) ** 2 * 0.9, facecolor=face, edgecolor=edge, zorder=3)
    ink = "white" if face in (BLUE, GREEN, RED) else "#777777" if face == PALE else "black"
    ax.text(*at, text, ha="center", va="center", fontsize=size, color=ink, zorder=4)


def box(ax: Axes, at: Point, text: str, size: Point, face: str = "#f4f4f4") -> None:
    """A rectangle around a point, with lines of text in it."""
    from matplotlib.patches import FancyBboxPatch

    corner = (at[0] - size[0] / 2, at[1] - size[1] / 2)
    shape = FancyBboxPatch(corner, *size, boxstyle="round,pad=0,rounding_size=0.08", facecolor=face, edgecolor="black")
    ax.add_patch(shape)
    ax.text(*at, text, ha="center", va="center", fontsize=9)


def arrow(ax: Axes, start: Point, end: Point, look: ArrowStyle = PLAIN) -> None:
    """An arrow from one node to another."""
    shape: dict[str, Any] = {"arrowstyle": look.style, "color": look.colour, "linewidth": look.width}
    shape |= {"shrinkA": look.gap, "shrinkB": look.gap, "connectionstyle": f"arc3,rad={look.bend}"}
    ax.annotate("", end, start, arrowprops=shape)


def words(ax: Axes, at: Point, text: str, colour: str = "black", size: float = 9.0) -> None:
    ax.text(*at, text, ha="center", va="center", fontsize=size, color=colour)


@drawn
def theorem() -> Figure:
    """The correspondence of EP's second phase and BPTT, steps in the same colours  [fig:theorem]."""
    figure = new_figure(9.6, 4.8)
    forward, key, back, second = figure.subplots(2, 2).flat
    names = ["$s_{T-3}$", "$s_{T-2}$", "$s_{T-1}$", "$s_T$"]
    blank(forward, 5.4, 2.0, "First phase: forward in time, input x at every step")
    _chain(forward, names)
    for n in range(4):
        words(forward, (n, 1.6), "$x$")
        arrow(forward, (n, 1.6), (n, 1.0), ArrowStyle(GREY, 0.9, gap=9.0))
    words(forward, (3, 0.45), "$s_T = s_*$")
    _loss(forward, (4.4, 1.0), (3, 1.0))
    blank(back, 5.4, 2.0, "BPTT: gradients, backward in time")
    _chain(back, names, [*reversed(STEP_COLOURS)], backward=True)
    for n, t in enumerate((3, 2, 1, 0)):
        words(back, (n, 0.2), rf"$\nabla_s({t})$", STEP_COLOURS[t])
    _loss(back, (4.4, 1.0), (3, 1.0), backward=True)
    blank(second, 5.4, 2.0, r"EP, second phase: forward in time, nudged towards y with strength $\beta$")
    _chain(second, [rf"$s_{t}^\beta$" for t in range(5)], between=STEP_COLOURS)
    words(second, (0, 1.6), r"$s_0^\beta = s_*$")
    for t, colour in enumerate(STEP_COLOURS):
        words(second, (t + 0.5, 0.2), rf"$\Delta_s(\beta, {t})$", colour)
    _key(key)
    return figure


def _chain(
    ax: Axes,
    names: Sequence[str],
    faces: Sequence[str] = (),
    between: Sequence[str] = (),
    backward: bool = False,
) -> None:
    """States in a row at height 1; arrows in the colours of `between`, or of the nodes that they lead to."""
    for n, name in enumerate(names):
        node(ax, (n, 1.0), name, faces[n] if faces else "white")
    for n in range(len(names) - 1):
        colour = between[n] if between else faces[n] if backward else "black"
        ends = ((n + 1, 1.0), (n, 1.0)) if backward else ((n, 1.0), (n + 1, 1.0))
        arrow(ax, *ends, ArrowStyle(colour, 1.8 if between or backward else 1.2))


def _loss(ax: Axes, at: Point, last: Point, backward: bool = False) -> None:
    words(ax, at, r"$\mathcal{L} = \ell(s_T, y)$", size=10.0)
    near = (at[0] - 0.45, at[1])
    arrow(ax, *((near, last) if backward else (last, near)), ArrowStyle(GREEN if backward else "black", 1.6, gap=12.0))


def _key(ax: Axes) -> None:
    """The colours of the steps, and what the theorem says of each."""
    blank(ax, 5.4, 2.0, "Gradient-descending updates [Theorem 1]")
    for t, colour in enumerate(STEP_COLOURS):
        height = 1.6 - 0.45 * t
        words(ax, (0.4, height), f"t = {t}", colour)
        words(ax, (2.4, height), rf"$\Delta_s(\beta, {t}) \;\to\; -\nabla_s({t})$   as  $\beta \to 0$", colour, 10.0)


@drawn
def unfolded() -> Figure:
    """The graph unfolded in time, a copy of theta per step, and BPTT along it  [fig:bptt]."""
    figure = new_figure(9.6, 5.0)
    for ax, backward in zip(figure.subplots(2, 1), (False, True), strict=True):
        title = "BPTT: the gradient flows backward" if backward else "Forward pass: one parameter, a copy per time step"
        blank(ax, 7.2, 2.2, title)
        _unfolded(ax, backward)
    return figure


def _unfolded(ax: Axes, backward: bool) -> None:
    """States in a row with a copy of theta above each step; arrows follow the gradient where `backward`."""
    flow = ArrowStyle(RED, 1.6) if backward else ArrowStyle()

    def passed(start: Point, end: Point, look: ArrowStyle = flow) -> None:
        arrow(ax, *((end, start) if backward else (start, end)), look)

    for at, name in ((0.0, "0"), (1.4, "1"), (3.8, "T-1"), (5.2, "T")):
        node(ax, (at, 0.7), f"$s_{{{name}}}$", size=8.5)
        if backward and name != "0":
            words(ax, (at, -0.1), rf"$\partial\mathcal{{L}}/\partial s_{{{name}}}$", RED, 10.0)
    for start, end in ((0.0, 1.4), (1.4, 2.6), (2.6, 3.8), (3.8, 5.2), (5.2, 6.0)):
        passed((start, 0.7), (end, 0.7))
    for at, name in ((0.7, "0"), (2.0, "1"), (4.5, "T-1")):
        node(ax, (at, 1.75), rf"$\theta_{{{name}}}$", AT_REST[1], size=8.5)
        passed((at, 1.75), (at, 0.52), ArrowStyle(flow.colour))
        if backward:
            words(ax, (at + 0.48, 1.2), rf"$\partial\mathcal{{L}}/\partial\theta_{{{name}}}$", RED, 10.0)
        else:
            words(ax, (at - 0.34, 1.3), "$x$")
            arrow(ax, (at - 0.34, 1.3), (at, 0.65), ArrowStyle(GREY, 0.9, gap=6.0))
    words(ax, (2.6, 0.7), "···", size=14.0)
    words(ax, (6.5, 0.7), r"$\mathcal{L} = \ell(s_T, y)$", size=10.0)
    said = r"$\partial\mathcal{L}/\partial\theta = \sum_t \partial\mathcal{L}/\partial\theta_t$"
    words(ax, (6.5, 1.75), said if backward else r"$\theta_0 = \theta_1 = \ldots = \theta$", size=10.0)
    if not backward:
        words(ax, (5.2, -0.05), "$s_T = s_*$")


@drawn
def toy_net() -> Figure:
    """The toy model: input, hidden and output neurons, all connected  [toymodelarchi]."""
    figure = new_figure(4.6, 3.6)
    draw_toy(figure.subplots())
    return figure


def draw_toy(ax: Axes, target: bool = False) -> None:
    """The toy model in a panel, upwards from the input; with the target that nudges the output, if wanted."""
    blank(ax, 3.2, 3.9 if target else 3.1)
    places = {"x": (0.6, 0.0), "s1": (2.2, 1.25), "s0": (0.6, 2.5)}
    for at, text, face in zip(
        places.values(),
        ("$x$\n10 inputs", "$s^1$\n50 hidden", "$s^0$\n5 outputs"),
        ("#ffffff", AT_REST[1], AT_REST[0]),
        strict=True,
    ):
        box(ax, at, text, (1.2, 0.66), face)
    both, one = ArrowStyle(style="<|-|>", gap=4.0), ArrowStyle(gap=4.0)
    arrow(ax, (0.6, 0.35), (0.6, 2.15), one)
    arrow(ax, (1.2, 0.2), (2.0, 0.9), one)
    arrow(ax, (2.0, 1.6), (1.22, 2.3), both)
    for at, name in (((0.32, 1.25), "$W_{0x}$"), ((1.9, 0.38), "$W_{1x}$"), ((1.95, 2.1), "$W_{01}$")):
        words(ax, at, name)
    if target:
        words(ax, (0.6, 3.6), "$y$", RED, 11.0)
        arrow(ax, (0.6, 3.5), (0.6, 2.85), ArrowStyle(RED, 1.6, gap=3.0))
        words(ax, (1.65, 3.25), r"nudge $\beta(y - s^0)$", RED, 8.5)


@drawn
def layered_net() -> Figure:
    """The layered net: layers numbered from the output, each connected with the next alone."""
    figure = new_figure(8.4, 2.2)
    ax = figure.subplots()
    blank(ax, 9.0, 1.6)
    hidden = [(f"$s^{{{n}}}$\n512", AT_REST[1]) for n in ("N-2", "1")]
    layers = [("$x = s^{N-1}$\n784", "#ffffff"), *hidden, ("$s^0$\n10", AT_REST[0])]
    places = (0.2, 2.6, 5.6, 8.0)
    for at, (text, face) in zip(places, layers, strict=True):
        box(ax, (at, 0.4), text, (1.3, 0.9), face)
    weights = ("$W_{N-2,N-1}$", "", "$W_{01}$")
    for start, end, name in zip(places, places[1:], weights, strict=False):
        one_way = ArrowStyle(gap=2.0) if start == places[0] else ArrowStyle(style="<|-|>", gap=2.0)
        for a, b in ((start + 0.66, end - 0.66),) if name else ((start + 0.66, 3.85), (4.4, end - 0.66)):
            arrow(ax, (a, 0.4), (b, 0.4), one_way)
        words(ax, ((start + end) / 2, 0.75), name or "$W_{n,n+1}$")
    words(ax, (4.1, 0.4), "···", size=14.0)
    words(ax, (1.4, -0.35), "static input: one way", GREY, 8.0)
    words(ax, (6.8, -0.35), "both ways, by W and its transpose", GREY, 8.0)
    return figure


@drawn
def conv_net() -> Figure:
    """The convolutional net: sizes, operations forward and back, names of the weights."""
    figure = new_figure(10.4, 3.3)
    ax = figure.subplots()
    blank(ax, 11.6, 2.9)
    stages = (
        (0.0, "$x = h^2$\n1 × 28 × 28", "#ffffff"),
        (4.0, "$h^1$\n32 × 12 × 12", AT_REST[1]),
        (8.0, "$h^0 = s^1$\n64 × 4 × 4", AT_REST[1]),
        (11.0, "$s^0$\n10", AT_REST[0]),
    )
    for at, text, face in stages:
        box(ax, (at, 1.2), text, (1.15 if "s^0" in text else 1.6 if "=" in text or "h^1" in text else 1.3, 0.9), face)
    for start, low, size in ((0.0, "12", "32 × 24 × 24"), (4.0, "01", "64 × 8 × 8")):
        a, b = start + 0.85, start + 3.15
        arrow(ax, (a, 1.45), (b, 1.45), ArrowStyle(gap=2.0))
        words(ax, (start + 2.0, 2.15), rf"$\mathcal{{P}}(W^{{\rm conv}}_{{{low}}} * h^{{{low[1]}}})$", size=10.0)
        words(ax, (start + 2.0, 1.72), f"5 × 5, {size}; pool 2 × 2", "#555555", 7.5)
    arrow(ax, (7.15, 0.95), (4.85, 0.95), ArrowStyle(RED, gap=2.0))
    words(ax, (6.0, 0.5), r"$\tilde{W}^{\rm conv}_{01} * \mathcal{P}^{-1}(h^0)$", RED, 10.0)
    words(ax, (2.0, 0.6), "static input: one way", GREY, 8.0)
    arrow(ax, (8.85, 1.45), (10.4, 1.45), ArrowStyle(gap=2.0))
    arrow(ax, (10.4, 0.95), (8.85, 0.95), ArrowStyle(RED, gap=2.0))
    words(ax, (9.62, 2.0), r"$W^{\rm fc}_{01} \cdot s^1$", size=10.0)
    words(ax, (9.62, 0.45), r"$W^{{\rm fc}\top}_{01} \cdot s^0$", RED, 10.0)
    said = r"$\mathcal{P}$ keeps the largest of each 2 × 2; $\mathcal{P}^{-1}$ puts a value back where it came from, "
    words(
        ax, (5.5, -0.35), said + r"zeros elsewhere; $\tilde{W}$ is $W$ flipped. No padding, stride 1.", "#333333", 8.5
    )
    return figure


STEPS, SHOWN = 4, 10
"""Time steps drawn in a graph, and of the measured processes."""
Traces = Mapping[str, Any]


@drawn
def saw_teeth(prototypical: Traces, energy_based: Traces) -> Figure:
    """A two-layer net unfolded forward, back and nudged; processes of one sample in each kind of net  [saw_teeth]."""
    figure = new_figure(10.4, 5.4)
    grid = figure.add_gridspec(2, 3, width_ratios=(1.25, 1.0, 1.0))
    forward, saw, smooth = (figure.add_subplot(grid[0, n]) for n in range(3))
    _draw_paths(forward, "Forward: grey nodes do not reach the loss")
    draw_relative(saw, prototypical, "every other step is zero")
    draw_relative(smooth, energy_based, "the leak fills the gaps")
    saw.set_ylabel("root mean square over the layer,\nrelative to its largest")
    saw.legend(loc="upper right", fontsize=8)
    _draw_paths(figure.add_subplot(grid[1, 0]), "BPTT: the gradient's path; zero in grey nodes", backward=True)
    _draw_nudged(figure.add_subplot(grid[1, 1:]))
    return figure


def _draw_paths(ax: Axes, title: str, backward: bool = False) -> None:
    """s^0 and s^1 unfolded in time, connected in zigzag."""
    blank(ax, STEPS + 0.6, 1.6, title)
    for t in range(STEPS):
        for layer in (0, 1):
            counts = (STEPS - 1 - t) % 2 == layer
            when = "T" if t == STEPS - 1 else f"T-{STEPS - 1 - t}"
            face, edge = (BLUE if layer == 0 else ORANGE, "black") if counts else (PALE, GREY)
            node(ax, (t, 1 - layer), f"$s^{layer}_{{{when}}}$", face, edge, 8.0)
            if t + 1 < STEPS:
                _path(ax, (t, 1 - layer), (t + 1, layer), counts, backward)
    words(ax, (STEPS + 0.05, 1), r"$\mathcal{L}$", size=12.0)
    _path(ax, (STEPS - 1, 1), (STEPS, 1), True, backward)


def _path(ax: Axes, start: Point, end: Point, counts: bool, backward: bool) -> None:
    """An arrow from one step to the next, pale where it does not reach the loss."""
    if backward and not counts:
        return
    look = ArrowStyle(RED, 1.6) if backward else ArrowStyle() if counts else ArrowStyle("#cccccc", 0.8)
    arrow(ax, *((end, start) if backward else (start, end)), look)


def _draw_nudged(ax: Axes) -> None:
    """The second phase: s^0 moves at odd, s^1 at even times, so that two nodes after another have one value."""
    last = 2 * STEPS - 3
    blank(ax, last + 0.6, 1.6, "EP: nodes of one colour have the same value, so every other update is zero")
    for t in range(last + 1):
        for layer in (0, 1):
            moved = (t + 1 - layer) // 2  # how often this layer has moved by then
            face = COLOURS[(2 * moved - 2 + layer) % len(COLOURS)] if moved else AT_REST[layer]
            node(ax, (t, 1 - layer), rf"$s^{{{layer},\beta}}_{{{t}}}$", face, size=7.5)
            if t < last:
                arrow(ax, (t, 1 - layer), (t + 1, layer), ArrowStyle(width=0.9))
    words(ax, (0.0, -0.52), "pale: at rest", "#555555", 7.5)


def draw_relative(ax: Axes, traces: Traces, remark: str) -> None:
    """How large each layer's measured processes are, relative to the largest step of BPTT."""
    from eqprop.report.gdu import symbol

    layers = list(traces["neurons"].items())[:2]
    for (name, trace), colour in zip(layers, (BLUE, ORANGE), strict=False):
        for key, label, line in (("rms_bptt", r"$-\nabla$", "-"), ("rms_ep", r"$\Delta$", "--")):
            values = trace[key][:SHOWN]
            largest = max(trace["rms_bptt"][:SHOWN]) or 1.0
            solid = line == "-"
            ax.plot(
                range(len(values)),
                [v / largest for v in values],
                line,
                color=colour,
                linewidth=2.6 if solid else 1.1,
                alpha=0.4 if solid else 1.0,
                marker=None if solid else "o",
                markersize=3,
                label=f"{label[:-1]}_{{{symbol(name)}}}$",
            )
    ax.set_xlabel("t")
    ax.set_ylim(-0.05, 1.1)
    ax.set_title(f"{as_text(traces['name'])}: {remark}", fontsize=9)

"""A net as a table of its layers and connections, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eqprop.models.connections import Connection
    from eqprop.models.graph import Graph

COLOURS = ("#cfe3f5", "#fbe0c3", "#d5edd0", "#ecd5ea", "#f6f0bf", "#d9d9d9")
WIDE, HIGH, ACROSS, DOWN = 130, 52, 190, 96


def table(net: Graph) -> str:
    """The layers with their groups, and the connections with their weights and operations."""
    count = sum(p.numel() for p in net.parameters())
    kind = f"energy-based, eps {net.eps}" if net.energy_based else "prototypical"
    head = f"{net.title}, {kind}: {count:,} parameters, {net.operations() / 1e6:,.1f} M operations per step and sample"
    turns = ", then ".join(f"({', '.join(group)})" for group in net.groups)
    sweep = f"A sweep has {len(net.groups)} group update{'s'[: len(net.groups) > 1]}: {turns}"
    group_of = {name: k + 1 for k, group in enumerate(net.groups) for name in group}
    layers = [("layer", "shape", "activation", "group")]
    for name, sigma in zip(net.names, net.activations, strict=True):
        layers.append((name, _times(net.layers[name]), sigma.name, str(group_of[name])))
    layers.append(("x", _times(net.input_shape), getattr(net.input_activation, "name", ""), ""))
    rows = [("connection", "kind", "weights", "operations")]
    for c, weights in net.weights_of():
        once = c.operations(net.shape(c.pre), net.shape(c.post))
        work = f"{once:,} per phase" if c.pre == "x" else f"{2 * once:,}"
        rows.append((str(c), c.describe(), f"{sum(w.numel() for w in weights.values()):,}", work))
    return "\n".join([head, sweep, "", *_lines(layers), "", *_lines(rows)])


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class Drawing(str):
    """A picture as SVG text."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self, encoding="utf-8")


def _columns(net: Graph) -> dict[str, int]:
    """How many connections each layer is away from the input, along the longest way without turning back."""
    column = {"x": 0}
    for _ in net.names:  # a longest way has no more connections than there are layers
        for c in net.connections:
            if c.pre in column and c.pre != c.post and column[c.pre] < len(net.names):
                column[c.post] = max(column.get(c.post, 0), column[c.pre] + 1)
    return {name: column.get(name, 1) for name in ("x", *net.names)}


def drawing(net: Graph) -> Drawing:
    column = _columns(net)
    place: dict[str, tuple[int, int]] = {}
    for name in ("x", *reversed(net.names)):
        row = sum(column[other] == column[name] for other in place)
        place[name] = (20 + ACROSS * column[name], 60 + DOWN * row)
    group_of = {name: k for k, group in enumerate(net.groups) for name in group}
    sigma = {name: a.name for name, a in zip(net.names, net.activations, strict=True)}
    parts = [_edge(c, place) for c in net.connections]
    for name, (x, y) in place.items():
        colour = "#ffffff" if name == "x" else COLOURS[group_of[name] % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="6" fill="{colour}" stroke="#555"/>')
        lines = (name, _times(net.shape(name)), sigma.get(name, ""))
        for k, line in enumerate(lines):
            weight = ' font-weight="bold"' if k == 0 else ""
            parts.append(f'<text x="{x + WIDE // 2}" y="{y + 16 + 15 * k}"{weight}>{escape(line)}</text>')
    width = max(x for x, _ in place.values()) + WIDE + 20
    height = max(y for _, y in place.values()) + HIGH + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return Drawing(f'{head} font-family="sans-serif" font-size="12" text-anchor="middle">{"".join(parts)}</svg>')


def _edge(c: Connection, place: Mapping[str, tuple[int, int]]) -> str:
    """A line from pre to post, an arc over layers in between or back to the layer itself; what it is as a tooltip."""
    (x, y), (u, v) = place[c.pre], place[c.post]
    if c.pre == c.post:
        path = f"M{x + 40} {y} C{x + 30} {y - 36} {x + WIDE - 30} {y - 36} {x + WIDE - 40} {y}"
    elif u - x == ACROSS:
        path = f"M{x + WIDE} {y + HIGH // 2} L{u} {v + HIGH // 2}"
    else:
        path = f"M{x + WIDE // 2} {y} C{x + WIDE} {y - 60} {u} {v - 60} {u + WIDE // 2} {v}"
    return f'<path d="{path}" fill="none" stroke="#555"><title>{escape(f"{c}: {c.describe()}")}</title></path>'

"""Three nets for CIFAR-10 from the literature, written as graphs; run it to see their tables.

python examples/field_nets.py
"""

from __future__ import annotations

from typing import Any

from eqprop.models import Connection, Conv, Dense, Network

CHANNELS = (128, 256, 512, 512)


def laborieux(channels: tuple[int, ...] = CHANNELS, side: int = 32, **options: Any) -> Network:
    """Laborieux et al. (2021), squared error: four convolutions, the last without padding."""
    a, b, c, d = channels
    last = (side // 8 - 2) // 2
    return Network(
        (3, side, side),
        {"out": 10, "h4": (d, last, last)}
        | {f"h{n}": (m, side // 2**n, side // 2**n) for n, m in ((3, c), (2, b), (1, a))},
        [Conv(pre, post, padding=1, pool=2) for pre, post in (("x", "h1"), ("h1", "h2"), ("h2", "h3"))]
        + [Conv("h3", "h4", pool=2), Dense("h4", "out")],
        "half-hard-sigmoid",
        nudge_site="inside",
        **options,
    )


def dchn(channels: tuple[int, ...] = CHANNELS, side: int = 32, **options: Any) -> Network:
    """Scellier et al. (2023): padded throughout, a linear output, first, third and last layer in turn with the rest."""
    names, gains = ["x", "h1", "h2", "h3", "h4"], (0.4, 0.7, 0.6, 0.3)
    maps = {f"h{n}": (channels[n - 1], side // 2**n, side // 2**n) for n in (4, 3, 2, 1)}
    links = zip(names, names[1:], gains, strict=False)
    return Network(
        (3, side, side),
        {"out": 10} | maps,
        [*(Conv(a, b, padding=1, pool=2, gain=g) for a, b, g in links), Dense("h4", "out", gain=0.4)],
        {"out": "identity", "*": "hard-sigmoid"},
        groups=[("h1", "h3", "out"), ("h2", "h4")],
        bias_gain=0.5,
        **options,
    )


def resnet13(width: int = 128, side: int = 32, **options: Any) -> Network:
    """Hopfield-ResNet13 (2025): strided convolutions with 1 x 1 skips over every other layer."""
    sizes = [(1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8), (4, 8), (4, 16)]  # of h1 to h8: channels, division of side
    maps = {f"h{n}": (m * width, side // d, side // d) for n, (m, d) in reversed([*enumerate(sizes, start=1)])}
    edges = ["x-h1", "h1-h2", "x-h2", "h2-h3", "h2-h4", "h3-h4", "h4-h5", "h4-h6", "h5-h6", "h6-h7", "h6-h8", "h7-h8"]
    gains = (0.6, 0.6, 0.7, 0.6, 0.7, 0.6, 0.6, 0.7, 0.6, 0.6, 0.7, 0.6)
    side_of = {name: shape[1] for name, shape in maps.items()} | {"x": side}
    links: list[Connection] = []
    for (a, b), gain in zip((edge.split("-") for edge in edges), gains, strict=True):
        skip = int(b[1:]) - int(a[1:] or 0) == 2
        kernel, stride = (1 if skip else 3), side_of[a] // side_of[b]
        links.append(Conv(a, b, kernel=kernel, stride=stride, padding=kernel // 2, gain=gain))
    links.append(Dense("h8", "out", gain=0.8))
    turns = [("h1", "h3", "h5", "h7", "out"), ("h2", "h4", "h6", "h8")]
    return Network((3, side, side), {"out": 10} | maps, links, "relu6", groups=turns, **options)


if __name__ == "__main__":
    for net in (laborieux(), dchn(), resnet13()):
        print(net, end="\n\n")

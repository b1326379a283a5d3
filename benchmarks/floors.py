"""Lower bounds on the time of an iteration: its arithmetic and its chain of dependent steps, from the sizes alone.

Arithmetic counts the multiplications and additions of matrix products and convolutions, 2 per product: the input's
drive once, every step, the gradient. Steps count even after the state has settled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from eqprop.models.convolutional import ConvolutionalNet
from eqprop.models.layered import LayeredNet
from eqprop.run.spec import Spec


@dataclass(frozen=True)
class Work:
    """Floating-point operations for one sample of one network.

    drive       W x, once per iteration     step        all layers, once
    contrast    EP's gradient: from both states for weights between layers, from their difference for the input's
    unrolled    BPTT's gradient of one step for weights between layers; the input's is taken once, from the sum
    """

    drive: int
    step: int
    contrast: int
    unrolled: int

    def flops(self, experiment: Spec, method: str, trials: int) -> int:
        """Operations of one iteration of all trials."""
        free = experiment.phases.T * self.step // (2 if experiment.phases.schedule == "alternating" else 1)
        if method == "ep":
            own = free + experiment.phases.K * self.step + self.contrast
        else:
            # The K differentiated steps are synchronous; going back through each takes as many products.
            alternating = (
                (experiment.phases.T - experiment.phases.K)
                * self.step
                // (2 if experiment.phases.schedule == "alternating" else 1)
            )
            own = alternating + experiment.phases.K * (2 * self.step + self.unrolled) + self.drive
        return trials * experiment.optimizer.batch * (own + self.drive)


def dependent_steps(experiment: Spec) -> int:
    """T + K for EP; for BPTT T forward and K backward."""
    return experiment.phases.T + experiment.phases.K


def work(experiment: Spec) -> Work:
    net = experiment.model
    if isinstance(net, LayeredNet):
        return _layered(net.sizes)
    if isinstance(net, ConvolutionalNet):
        return _convolutional(net)
    raise ValueError(f"The work of {net} is not known; expected a layered or convolutional net.")


def _layered(sizes: tuple[int, ...]) -> Work:
    *between, visible = [2 * rows * columns for rows, columns in pairwise(sizes)]
    return Work(visible, 2 * sum(between), 2 * sum(between) + visible, sum(between))


def _convolutional(net: ConvolutionalNet) -> Work:
    """An unpooled map has one nonzero number per pooling zone: only those are counted on the way back."""
    shapes = _map_shapes(net)
    flat = (*net.flat, math.prod(shapes[0]))
    fully = sum(2 * rows * columns for rows, columns in pairwise(flat))
    area = net.kernel**2
    forward, spread = [], []
    for (channels, height, width), (inputs, _, _) in zip(shapes, (*shapes[1:], net.input_shape), strict=True):
        pooled = 2 * channels * inputs * area * height * width
        forward.append(pooled * net.pool**2)
        spread.append(pooled)
    step = 2 * fully + sum(forward[:-1]) + sum(spread[:-1])
    return Work(forward[-1], step, 2 * fully + 2 * sum(spread[:-1]) + spread[-1], fully + sum(spread[:-1]))


def _map_shapes(net: ConvolutionalNet) -> list[tuple[int, int, int]]:
    """The shapes of h0, h1, ..."""
    _, height, width = net.input_shape
    shapes: list[tuple[int, int, int]] = []
    for channels in reversed(net.channels):
        height, width = ((side + 2 * net.padding - net.kernel + 1) // net.pool for side in (height, width))
        shapes.insert(0, (channels, height, width))
    return shapes


@dataclass(frozen=True)
class Floors:
    """Lower bounds for an iteration on a machine, in microseconds; None if the machine's figure is not known."""

    arithmetic: float
    latency: float | None

    @property
    def higher(self) -> float:
        return max(self.arithmetic, self.latency or 0.0)


def floors(experiment: Spec, method: str, trials: int, peaks: dict[str, float | None]) -> Floors:
    """Compute the bounds from a machine's figures (see `benchmarks.machine`).

    On a GPU a net with one hidden layer runs a sample within one block. The weights of larger nets do not fit one
    multiprocessor, so each step ends with an exchange between several.
    """
    rate = peaks["float32_flops"]
    assert rate is not None, "measured on every machine"
    half = peaks.get("half_flops")
    # Three half-precision products of high and low parts are as accurate as one in float32.
    rate = max(rate, half / 3) if half else rate
    net = experiment.model
    alone = isinstance(net, LayeredNet) and len(net.sizes) <= 3
    step = peaks.get("block_step_us") if alone else peaks.get("exchange_us")
    latency = None if step is None else step * dependent_steps(experiment)
    return Floors(1e6 * work(experiment).flops(experiment, method, trials) / rate, latency)

"""What training does around the gradient: inputs made of stored samples, decay of weights, averaged weights."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eqprop.cost import Cost
from eqprop.data.augment import Augmentation
from eqprop.dynamics import Dynamics
from eqprop.optimizers import optimizer_class
from eqprop.run.spec import READOUT, Optimizer, Spec

DECOUPLED = "decoupled_decay"
"""Key of an optimizer's groups: how fast their weights shrink before each step, per learning rate."""


def make_optimizer(spec: Spec, model: Dynamics, cost: Cost | None = None) -> torch.optim.Optimizer:
    """The spec's optimizer, with one group and rate per parameter: the network's, then the cost's."""
    of = spec.optimizer
    named = [*model.named_parameters(), *([] if cost is None else cost.named_parameters())]
    rates = spec.rates((name for name, _ in named), model.layer_parameters)
    decay = _decay(of, model, dict(named))
    groups = [{"params": [p], "lr": rates[name], **decay.get(name, {})} for name, p in named]
    options = dict(of.options)
    try:
        optimizer: torch.optim.Optimizer = optimizer_class(of.kind)(groups, **options)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        raise ValueError(f"The optimizer {of.kind} does not take the options {options}: {error}.") from error
    if any(DECOUPLED in group for group in groups):
        optimizer.register_step_pre_hook(_shrink)
    elif of.weight_decay and "weight_decay" not in optimizer.defaults:
        raise ValueError(
            f"The optimizer {of.kind} has no weight decay of its own; expected one that has, such as SGD. Set "
            "weight_decay_kind to decoupled, which works with every optimizer."
        )
    return optimizer


def _decay(of: Optimizer, model: Dynamics, named: dict[str, nn.Parameter]) -> dict[str, dict[str, float]]:
    """What each parameter's group says about the decay of its weights."""
    if not of.weight_decay:
        return {}
    decoupled, own = of.weight_decay_kind == "decoupled", of.kind == "AdamW"
    if own and not decoupled:
        raise ValueError(
            "AdamW decays weights apart from the gradient; expected weight_decay_kind decoupled, or the optimizer Adam."
        )
    biases = {layer.bias for layer in (*model.layer_parameters, READOUT)}
    dims = 1 if model.networks is None else 2

    def spared(name: str) -> bool:
        """Biases; where a user's network does not name them, vectors and numbers."""
        is_bias = name in biases or (not model.layer_parameters and named[name].dim() <= dims)
        return is_bias and not of.weight_decay_biases

    key = DECOUPLED if decoupled and not own else "weight_decay"
    return {name: {key: 0.0 if spared(name) else of.weight_decay} for name in named}


@torch.no_grad()
def _shrink(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    """w <- (1 - rate * decay) w, before the optimizer's own step."""
    for group in optimizer.param_groups:
        if group[DECOUPLED]:
            for p in group["params"]:
                p.mul_(1.0 - group["lr"] * group[DECOUPLED])


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(C, H, W) of a sample: grey images have one channel, other samples are a row of pixels."""
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return (1, *shape) if len(shape) == 2 else (1, 1, torch.Size(shape).numel())


class Preparation:
    """Inputs of stored samples (..., pixels) and their rows (...): augmented, then made floats and normalised.

    `epoch` is on the device and changed in place, so that a captured iteration sees it.

    inputs      makes the model's inputs of samples, without chance
    shape       of one sample, (C, H, W)
    seeds       one per stacked network, or the only one
    """

    def __init__(
        self,
        augmentation: Augmentation | None,
        inputs: Callable[[Tensor], Tensor],
        shape: tuple[int, int, int],
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        self.augmentation, self.inputs, self.shape = augmentation, inputs, shape
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=device)
        self.epoch = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, stored: Tensor, rows: Tensor) -> Tensor:
        if self.augmentation is not None:
            images = stored.reshape(*rows.shape, *self.shape)
            seeds = self.seeds if rows.dim() > 1 else self.seeds[0]
            stored = self.augmentation(images, rows, seeds, self.epoch).flatten(rows.dim())
        return self.inputs(stored)


ACROSS, DOWN, MAGNIFIED = 8, 2, 3
"""The picture of augmented images: columns, rows, and pixels per pixel."""


def augmented_picture(augmentation: Augmentation, x: Tensor, shape: tuple[int, int, int], seed: int) -> bytes | None:
    """The first sixteen training samples as they are in the first epoch, as PNG; None where they are no pictures."""
    from PIL import Image

    if shape[0] not in (1, 3) or min(shape[1:]) < 2:
        return None
    stored = x[: ACROSS * DOWN].cpu()
    rows = torch.arange(len(stored))
    images = augmentation(stored.reshape(-1, *shape), rows, seed, 0)
    images = images if images.dtype == torch.uint8 else (images * 255).round().to(torch.uint8)
    channels, height, width = shape
    sheet = torch.full((channels, DOWN * (height + 1) + 1, ACROSS * (width + 1) + 1), 255, dtype=torch.uint8)
    for n, image in enumerate(images):
        top, left = 1 + n // ACROSS * (height + 1), 1 + n % ACROSS * (width + 1)
        sheet[:, top : top + height, left : left + width] = image
    large = sheet.repeat_interleave(MAGNIFIED, 1).repeat_interleave(MAGNIFIED, 2).permute(1, 2, 0).contiguous().numpy()
    out = io.BytesIO()
    Image.fromarray(large[:, :, 0] if channels == 1 else large).save(out, "PNG", optimize=True)
    return out.getvalue()


class Average:
    """a_n = sum over k = 1..n of decay^(n-k) w_k, divided by the sum of those factors: weights to evaluate with.

    Called after each step: a <- a + (1 - decay) / (1 - decay^n) (w - a), which forgets the initial weights at n = 1.
    Everything stays on the device, so that it can be captured. Before the first step the average is the weights.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = list(parameters), decay
        self.values = [p.detach().clone() for p in self.parameters]
        # decay^n, in float64: in float32 a decay of 0.9999 would drift.
        self.power = torch.ones((), dtype=torch.float64, device=self.values[0].device)

    @torch.no_grad()
    def __call__(self) -> None:
        self.power.mul_(self.decay)
        share = (1.0 - self.decay) / (1.0 - self.power)
        for value, p in zip(self.values, self.parameters, strict=True):
            value.lerp_(p, share.to(p.dtype))

    @property
    def tensors(self) -> list[Tensor]:
        """What changes with each step."""
        return [*self.values, self.power]

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Inside the block the network has the averaged weights; after it, its own, bit for bit."""
        kept = [p.detach().clone() for p in self.parameters]
        self._set(self.values)
        try:
            yield
        finally:
            self._set(kept)

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for p, value in zip(self.parameters, values, strict=True):
            p.copy_(value)

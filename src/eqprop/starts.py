"""Initial states of free phases: zero, an earlier steady state, or a feed-forward net's prediction of it."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from eqprop.autodiff import in_own_precision
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.state import State, per_sample

StartName = Literal["zero", "persistent", "initialised", "carried"]
"""Where free phases begin in training; "zero" is the model's own `init_state`."""


class Start(ABC):
    """Chooses where free phases begin, and learns from where they end.

        begun = start.begin(x, rows)
        free = ep.backward(model, cost, x, y, begun)
        start.end(x, rows, begun, free.state)

    rows are the indices of x's samples in the training set: (B,), or (R, B) for stacked networks. Samples whose state
    is not finite are ignored.
    """

    kind: ClassVar[StartName]

    @abstractmethod
    def begin(self, x: Tensor, rows: Tensor) -> State:
        """The initial state of each sample."""

    @abstractmethod
    def end(self, x: Tensor, rows: Tensor, begun: State, reached: State) -> None:
        """Learn from the states `reached` by free phases that began at `begun`."""

    def unseen(self, x: Tensor) -> State | None:
        """The initial state of samples outside the training set; None for the model's zero state."""
        return None

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save for a resume, by name, not copied. Stacked networks are the first dimension."""


def finite_samples(s: State, dims: int) -> Tensor:
    """Which samples are finite in every layer: (B,) or (R, B); dims is the number of sample dimensions."""
    layers = [torch.isfinite(layer).flatten(dims).all(-1) for layer in s]
    return torch.stack(layers).all(0)


@final
class Persistent(Start):
    """s_0 of a sample is the s_T of its last free phase, and the model's zero state before the first.

    model       one network, or several stacked; each keeps its own states
    x           (N, ...) all training inputs, as the model takes them
    source      fingerprint of the samples; None: that of x
    device      where the states are kept; None: where x is. On the CPU they may exceed the GPU's memory, and are
                copied back and forth for every mini-batch.

    Memory grows with N times the neurons of a network: 0.24 GB for 60,000 samples and 1,010 neurons in float32.
    Samples outside the training set (a test set) start from zero.
    """

    kind: ClassVar[StartName] = "persistent"

    @torch.no_grad()
    def __init__(
        self, model: Dynamics, x: Tensor, device: torch.device | str | None = None, source: str | None = None
    ) -> None:
        self.samples, self.networks = len(x), model.networks
        self.device = torch.device(x.device if device is None else device)
        whole = x if model.networks is None else x.expand(model.networks, *x.shape)
        try:
            self.layers: State = tuple(v.to(self.device, copy=True) for v in model.init_state(whole))
        except (MemoryError, RuntimeError) as error:
            if not _is_lack_of_memory(error):
                raise
            raise MemoryError(
                f"Out of memory on {self.device} for the states of {self.samples} samples in {model.networks or 1} "
                "network(s). Keep them on the CPU (states='cpu'), or train fewer networks at a time."
            ) from error
        self.source = fingerprint(x) if source is None else source
        self.touched = False

    def begin(self, x: Tensor, rows: Tensor) -> State:
        places = self._places(rows)
        return tuple(
            self._flat(layer).index_select(0, places).view(*rows.shape, *self._neurons(layer)).to(x.device)
            for layer in self.layers
        )

    def end(self, x: Tensor, rows: Tensor, begun: State, reached: State) -> None:
        places, good = self._places(rows), finite_samples(reached, rows.dim())
        self.touched = True
        for layer, old, new in zip(self.layers, begun, reached, strict=True):
            kept = torch.where(per_sample(good, new), new, old).detach().to(self.device)
            self._flat(layer).index_copy_(0, places, kept.reshape(-1, *self._neurons(layer)))

    def _places(self, rows: Tensor) -> Tensor:
        """The rows of a flattened layer, network after network, that hold these samples: (B,) or (R B,)."""
        rows = rows.to(self.device)
        if self.networks is not None:
            rows = rows + self.samples * torch.arange(self.networks, device=self.device).unsqueeze(1)
        return rows.flatten()

    def _flat(self, layer: Tensor) -> Tensor:
        return layer if self.networks is None else layer.flatten(0, 1)

    def _neurons(self, layer: Tensor) -> torch.Size:
        return layer.shape[1:] if self.networks is None else layer.shape[2:]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {f"s{n}": layer for n, layer in enumerate(self.layers)}


@final
class Carried(Start):
    """s_0 of the n-th sample of a mini-batch is the s_T of the n-th sample of the mini-batch before.

    The samples differ, but a state that the net has settled in is a better start than zero. A smaller mini-batch takes
    and replaces the first states; the rest wait for the next. Samples outside training, such as a test set, start from
    zero.

    model       one network, or several stacked; each keeps its own states
    x           inputs as the model takes them; only their shape and type are looked at
    batch       the size of a mini-batch
    """

    kind: ClassVar[StartName] = "carried"

    @torch.no_grad()
    def __init__(self, model: Dynamics, x: Tensor, batch: int) -> None:
        lead = () if model.networks is None else (model.networks,)
        self.dim = len(lead)
        self.layers: State = tuple(v.clone() for v in model.init_state(x.new_zeros(*lead, batch, *x.shape[1:])))

    def begin(self, x: Tensor, rows: Tensor) -> State:
        samples, most = rows.shape[-1], self.layers[0].shape[self.dim]
        if samples > most:
            raise ValueError(
                f"Got a mini-batch of {samples} samples, and the states of {most} are carried. Use "
                f"Carried(..., batch={samples})."
            )
        return tuple(layer.narrow(self.dim, 0, rows.shape[-1]).clone() for layer in self.layers)

    @torch.no_grad()
    def end(self, x: Tensor, rows: Tensor, begun: State, reached: State) -> None:
        good = finite_samples(reached, rows.dim())
        for layer, old, new in zip(self.layers, begun, reached, strict=True):
            layer.narrow(self.dim, 0, rows.shape[-1]).copy_(torch.where(per_sample(good, new), new, old))

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {f"s{n}": layer for n, layer in enumerate(self.layers)}


def fingerprint(x: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and values: saved states fit only these samples in this order."""
    found = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
    found.update(x.detach().cpu().contiguous().flatten().numpy().tobytes())
    return found.hexdigest()


def _is_lack_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "not enough memory" in str(error)


@final
class Initialised(Start):
    """s_0 = f(x): f^n = g(V_n f^{n+1} + c_n), from the layer next to the input up to the output, f^{N} = x.

    g is the model's squash and projection, so f^n has the same range as the states. After each free phase every
    layer learns locally, from its own error and input (the normalised delta rule, no backprop):

        V_n <- V_n + rate <(s^n - f^n) f^{n+1}^T> / <1 + |f^{n+1}|^2>,    c_n <- c_n + rate <s^n - f^n> / <...>

    where <> is the mean over the mini-batch. For monotone g with slopes up to 1 this is gradient descent on a convex
    loss, scaled by its smoothness, so rate < 2 is stable in any net. V and c start at zero, without random numbers.

    rate    learning rate of the feed-forward net
    model       one network, or several stacked; each has its own initialiser
    x           inputs as the model takes them; only their shape and dtype are used
    """

    kind: ClassVar[StartName] = "initialised"

    @torch.no_grad()
    def __init__(self, model: Dynamics, x: Tensor, rate: float = 1.0) -> None:
        if not (isinstance(rate, int | float) and math.isfinite(rate) and 0.0 < rate < 2.0):
            raise ValueError(f"The initialiser's rate is {rate!r}; expected a number above 0 and below 2, such as 1.")
        self.model, self.rate, self.networks = model, float(rate), model.networks
        one = x[:1] if model.networks is None else x[:1].expand(model.networks, 1, *x.shape[1:])
        zero = model.init_state(one)
        dims = model.sample_dims(one)
        sizes = [*(math.prod(layer.shape[dims:]) for layer in zero), math.prod(one.shape[dims:])]
        networks = model.networks or 1
        self.weights = [zero[0].new_zeros(networks, n, m) for n, m in pairwise(sizes)]
        self.offsets = [zero[0].new_zeros(networks, 1, n) for n in sizes[:-1]]

    @in_own_precision
    @torch.no_grad()
    def begin(self, x: Tensor, rows: Tensor | None = None) -> State:
        zero = self.model.init_state(x)
        layers = list(zero)
        signal = self._flat(x, self.model.sample_dims(x))
        for n in range(len(layers) - 1, -1, -1):
            inputs = torch.baddbmm(self.offsets[n], signal, self.weights[n].mT)  # (R, B, n)
            layers[n] = self._bounded(zero, n, inputs.view_as(zero[n]))
            signal = self._flat(layers[n], self.model.sample_dims(x))
        return tuple(layers)

    @in_own_precision
    @torch.no_grad()
    def end(self, x: Tensor, rows: Tensor | None, begun: State, reached: State) -> None:
        dims = self.model.sample_dims(x)
        good = finite_samples(reached, dims)
        # Samples that are not finite count as all zeros without error.
        signals = [self._flat(_where(good, v), dims) for v in (*begun, x)]
        for n, (f, s) in enumerate(zip(begun, reached, strict=True)):
            error = self._flat(_where(good, s - f), dims)  # (R, B, n)
            size = (1.0 + signals[n + 1].square().sum(-1)).sum(-1)  # (R,)
            step = error * (self.rate / size).view(-1, 1, 1)
            self.weights[n].baddbmm_(step.mT, signals[n + 1])
            self.offsets[n] += step.sum(1, keepdim=True)

    def unseen(self, x: Tensor) -> State:
        return self.begin(x)

    def _flat(self, layer: Tensor, dims: int) -> Tensor:
        """(R, B, neurons), with R = 1 for a single network."""
        flat = layer.flatten(dims)
        return flat if self.networks is not None else flat.unsqueeze(0)

    def _bounded(self, zero: State, n: int, inputs: Tensor) -> Tensor:
        """g: the model's squash and projection, applied to layer n."""
        if not isinstance(self.model, PrimitiveDynamics):
            return inputs
        return self.model.project(self.model.squash((*zero[:n], inputs, *zero[n + 1 :])))[n]

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = {f"V{n}": v for n, v in enumerate(self.weights)} | {f"c{n}": c for n, c in enumerate(self.offsets)}
        return found if self.networks is not None else {name: t[0] for name, t in found.items()}


def _where(good: Tensor, layer: Tensor) -> Tensor:
    return torch.where(per_sample(good, layer), layer, torch.zeros_like(layer))

"""Where free phases begin: at zero, at the sample's last steady state, or where a feed-forward net predicts it."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import ClassVar, Literal, final, get_args

import torch
from torch import Tensor

from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.state import State, per_sample

StartName = Literal["zero", "persistent", "initialised"]
"""Where the free phases of a training begin; "zero" is the model's own `init_state`."""

STARTS: tuple[str, ...] = get_args(StartName)


class Start(ABC):
    """Where free phases begin, and what is learnt from where they end.

        begun = start.begin(x, rows)
        free = ep.backward(model, cost, x, y, begun)
        start.end(x, rows, begun, free.state)

    rows are the numbers of the samples in x among all training samples: (B,), or (R, B) for stacked networks. A
    sample whose state is not finite teaches nothing.
    """

    kind: ClassVar[StartName]

    @abstractmethod
    def begin(self, x: Tensor, rows: Tensor) -> State:
        """The state each of these samples starts from."""

    @abstractmethod
    def end(self, x: Tensor, rows: Tensor, begun: State, reached: State) -> None:
        """Take in where the free phases ended that began at `begun`."""

    def unseen(self, x: Tensor) -> State | None:
        """Where samples start that are not trained on; None for the model's zero state."""
        return None

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What has to be saved to go on, by name: the memory itself. Stacked networks stand in the first dimension."""


def finite_samples(s: State, dims: int) -> Tensor:
    """Which samples have no NaN and no infinity in any layer: (B,) or (R, B); dims counts the sample dimensions."""
    layers = [torch.isfinite(layer).flatten(dims).all(-1) for layer in s]
    return torch.stack(layers).all(0)


@final
class Persistent(Start):
    """s_0 of a sample is the s_T of its last free phase, the model's own zero state before the first.

    model       one network, or several stacked; each keeps states of its own
    x           (N, ...) every training input, as the model takes it
    device      where the states are kept; None: where x is. On the CPU they may be larger than a GPU's memory, and
                are carried there and back for every mini-batch.

    The states take N times the neurons of a network in memory: 0.24 GB for 60,000 samples and 1,010 neurons in
    float32. Samples that are not trained on (a test set) start from zero.
    """

    kind: ClassVar[StartName] = "persistent"

    @torch.no_grad()
    def __init__(self, model: Dynamics, x: Tensor, device: torch.device | str | None = None) -> None:
        self.samples, self.networks = len(x), model.networks
        self.device = torch.device(x.device if device is None else device)
        whole = x if model.networks is None else x.expand(model.networks, *x.shape)
        try:
            self.layers: State = tuple(v.to(self.device, copy=True) for v in model.init_state(whole))
        except (MemoryError, RuntimeError) as error:
            if not _is_lack_of_memory(error):
                raise
            raise MemoryError(
                f"No memory on {self.device} for the states of {self.samples} samples in {model.networks or 1} "
                "networks. Keep them on the CPU (states='cpu'), or train fewer networks at a time."
            ) from error
        self.source = fingerprint(x)
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
        """Which rows of a layer, networks one after another, belong to these samples: (B,) or (R B,)."""
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


def fingerprint(x: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and numbers: states belong to these samples in this order."""
    found = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
    found.update(x.detach().cpu().contiguous().flatten().numpy().tobytes())
    return found.hexdigest()


def _is_lack_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "not enough memory" in str(error)


@final
class Initialised(Start):
    """s_0 = f(x): f^n = g(V_n f^{n+1} + c_n) from the layer next to the input to the output, f^{N} = x.

    g is the model's own squash and projection, so that f^n lies where the states do. After each free phase every
    layer learns by itself, from its own error and its own input (the normalised delta rule, without any backprop):

        V_n <- V_n + rate <(s^n - f^n) f^{n+1}^T> / <1 + |f^{n+1}|^2>,    c_n <- c_n + rate <s^n - f^n> / <...>

    <> being the mean over the mini-batch. For g monotone with slopes up to 1 this is gradient descent on a convex loss
    with its smoothness divided out, so that rate < 2 is stable in any net. V and c start at zero: nothing is drawn.

    model       one network, or several stacked; each has an initialiser of its own
    x           inputs as the model takes them; only their shape and type are looked at
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

    @torch.no_grad()
    def end(self, x: Tensor, rows: Tensor | None, begun: State, reached: State) -> None:
        dims = self.model.sample_dims(x)
        good = finite_samples(reached, dims)
        # A sample that is not finite counts as one that is all zero and has no error.
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
        """(R, B, neurons), R = 1 for a network that is not stacked."""
        flat = layer.flatten(dims)
        return flat if self.networks is not None else flat.unsqueeze(0)

    def _bounded(self, zero: State, n: int, inputs: Tensor) -> Tensor:
        """g: what the model's squash and projection make of layer n."""
        if not isinstance(self.model, PrimitiveDynamics):
            return inputs
        return self.model.project(self.model.squash((*zero[:n], inputs, *zero[n + 1 :])))[n]

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = {f"V{n}": v for n, v in enumerate(self.weights)} | {f"c{n}": c for n, c in enumerate(self.offsets)}
        return found if self.networks is not None else {name: t[0] for name, t in found.items()}


def _where(good: Tensor, layer: Tensor) -> Tensor:
    return torch.where(per_sample(good, layer), layer, torch.zeros_like(layer))

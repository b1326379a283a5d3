"""Persistent states: each training sample keeps its steady state for the next epoch (Scellier & Bengio 2017)."""

from __future__ import annotations

import hashlib
from typing import ClassVar, final

import torch
from torch import Tensor

from eqprop.dynamics import Dynamics
from eqprop.starts.base import Start, StartName, finite_samples, per_sample
from eqprop.state import State


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

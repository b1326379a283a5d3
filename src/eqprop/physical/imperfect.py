"""Imperfections of devices, a layer around any model or machine: noise, bits, limits, mismatch, drift, asymmetry."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from eqprop.cost import Nudge
from eqprop.dynamics import PrimitiveDynamics
from eqprop.physical.machine import Machine, Reading
from eqprop.relax import Phase, Relaxation, Stepper, Update, relax, settled_below, stepping
from eqprop.settings import LARGEST, Finite, Section, check_fields
from eqprop.state import State, distance

Deviation = Annotated[float, Meta(ge=0.0, le=LARGEST)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Bits = Annotated[int, Meta(ge=1, le=24)]
"""Finer grids are finer than float32."""


class Imperfections(Section, frozen=True, kw_only=True):
    """What a device does to a network. All zero, or None, is a perfect one, bit for bit.

    state_noise     standard deviation of normal noise added to every neuron at every step
    read_noise      of normal noise added to what is read, once per reading
    state_bits      neurons are rounded at every step to a grid of 2^bits levels over `state_range`, and limited to it
    read_bits       what is read is rounded to such a grid
    weight_bits     weights are rounded to a grid of 2^bits levels from -weight_limit to weight_limit
    weight_limit    weights beyond are cut; None: no limit, and a grid reaches to the largest weight of its kind
    mismatch        each weight is multiplied by 1 + mismatch z, z normal, fixed for the device
    drift           and by 1 + drift z more for every time weights are written, z normal and new each time, added up
    missing         share of weights that are 0, fixed for the device
    asymmetry       updates that raise a weight are multiplied by 1 + asymmetry, those that lower it by 1 - asymmetry
    weight_range    (least, most): the weights a device can hold, such as conductances; updates that lead out are cut
    on_grid         whether the weights themselves are kept on the grid, so that updates below half a step are lost; if
                    not, they are kept outside in full and rounded when they are written
    seed            of every draw

    Weights are the parameters with two or more dimensions; biases are left as they are.
    """

    state_noise: Deviation = 0.0
    read_noise: Deviation = 0.0
    state_bits: Bits | None = None
    read_bits: Bits | None = None
    state_range: tuple[Finite, Finite] = (0.0, 1.0)
    weight_bits: Bits | None = None
    weight_limit: Annotated[float, Meta(gt=0.0, le=LARGEST)] | None = None
    mismatch: Deviation = 0.0
    drift: Deviation = 0.0
    missing: Share = 0.0
    asymmetry: Share = 0.0
    weight_range: tuple[Finite, Finite] | None = None
    on_grid: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("state_range", "weight_range"):
            value = getattr(self, name)
            if value is not None and not value[0] < value[1]:
                raise ValueError(f"{name} is {value!r}; expected two numbers, the least and the most.")
        if self.on_grid and self.weight_bits is None:
            raise ValueError("on_grid is True and weight_bits is None; expected the bits of the grid.")

    @property
    def of_steps(self) -> bool:
        """Whether states change while the system settles, not only weights and readings."""
        return self.state_noise > 0.0 or self.state_bits is not None


def on_levels(v: Tensor, bits: int, low: float, high: float) -> Tensor:
    """The nearest of 2^bits levels from low to high; values beyond are cut."""
    step = (high - low) / (2**bits - 1)
    return low + step * torch.round((v.clamp(low, high) - low) / step)


class Device:
    """The draws of one device: what is fixed, and what changes with each write."""

    def __init__(self, imperfections: Imperfections) -> None:
        self.of = imperfections
        self.gain: dict[str, Tensor] = {}
        self.there: dict[str, Tensor] = {}
        self.noise = self._source("noise")

    def _source(self, *use: str) -> torch.Generator:
        digest = hashlib.sha256(" ".join(("eqprop device", str(self.of.seed), *use)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.noise, dtype=like.dtype).to(like)

    def grid(self, w: Tensor) -> Tensor:
        """w rounded to the grid of the weights, and cut at their limit."""
        of = self.of
        limit = of.weight_limit
        if of.weight_bits is None:
            return w if limit is None else w.clamp(-limit, limit)
        reach = float(w.abs().max()) if limit is None else limit
        return on_levels(w, of.weight_bits, -reach, reach) if reach else w

    def holds(self, name: str, w: Tensor, writes: int) -> Tensor:
        """What the device makes of a weight that is written for the n-th time, n from 0."""
        of, held = self.of, self.grid(w)
        if of.mismatch or of.drift:
            if name not in self.gain:
                self.gain[name] = 1.0 + of.mismatch * _drawn(w, self._source("mismatch", name))
            elif of.drift:
                self.gain[name] = self.gain[name] + of.drift * _drawn(w, self._source("drift", name, str(writes)))
            held = held * self.gain[name]
        if of.missing:
            if name not in self.there:
                drawn = torch.rand(w.shape, generator=self._source("missing", name), dtype=torch.float64)
                self.there[name] = (drawn >= of.missing).to(w)
            held = held * self.there[name]
        return held

    def moved(self, before: Tensor | None, w: Tensor) -> Tensor:
        """Where an update from `before` to w leads on this device."""
        of = self.of
        if of.asymmetry and before is not None:
            change = w - before
            w = before + change * (1.0 + of.asymmetry * change.sign())
        if of.weight_range is not None:
            w = w.clamp(*of.weight_range)
        return self.grid(w) if of.on_grid else w

    def steps(self, s: State) -> State:
        """Neurons as the device holds them after a step."""
        of = self.of
        if of.state_noise:
            s = tuple(v + of.state_noise * self.normal(v) for v in s)
        return s if of.state_bits is None else tuple(on_levels(v, of.state_bits, *of.state_range) for v in s)

    def reads(self, s: State) -> State:
        of = self.of
        if of.read_noise:
            s = tuple(v + of.read_noise * self.normal(v) for v in s)
        return s if of.read_bits is None else tuple(on_levels(v, of.read_bits, *of.state_range) for v in s)


def _drawn(like: Tensor, source: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=source, dtype=torch.float64).to(like)


class ImperfectStepper(Stepper):
    """The reference's step, and what the device does to its result; layers that it leaves alone stay as they were."""

    def __init__(self, device: Device, step: Stepper) -> None:
        super().__init__(step.model, step.drive, step.nudge)
        self.device = device

    def __call__(self, s: State, update: Update = None) -> State:
        new = super().__call__(s, update)
        if isinstance(update, tuple):
            held = self.device.steps(tuple(new[n] for n in update))
            changed = dict(zip(update, held, strict=True))
            return tuple(changed.get(n, v) for n, v in enumerate(new))
        return self.device.steps(new)


class Simulated(Machine):
    """Any model as a machine with imperfections, or any machine with more of them.

        device = Simulated(model, Imperfections(read_noise=0.01, weight_bits=8))

    Of a model a copy is run, with T and K as the estimator has them; of a machine the machine itself, whose states
    between start and rest are not at hand, so that imperfections of steps are refused. Without imperfections, training
    it is training the model, bit for bit. Noise is drawn anew by each process: a resumed run continues from the seed.

    inner           the model, or the machine
    imperfections   what is wrong with it
    """

    def __init__(self, inner: PrimitiveDynamics, imperfections: Imperfections | None = None) -> None:
        outer = inner.model if isinstance(inner, Machine) else inner
        super().__init__(deepcopy(outer) if isinstance(inner, Machine) else outer)
        self.imperfections = imperfections or Imperfections()
        if isinstance(inner, Machine):
            self.abilities = inner.abilities
            if self.imperfections.of_steps:
                raise ValueError(
                    f"{inner.title} is a machine, whose steps are not at hand; expected no state_noise and no "
                    "state_bits. Use read_noise and read_bits, or simulate the model."
                )
        # In a tuple: not a submodule, its parameters are what the device holds.
        self._inner = (inner if isinstance(inner, Machine) else deepcopy(inner),)
        self._device = Device(self.imperfections)

    def __repr__(self) -> str:
        return f"Simulated({self._inner[0]!r}, {self.imperfections})"

    @property
    def held(self) -> PrimitiveDynamics:
        """The model or machine inside, with the weights that the device made of those it was given."""
        return self._inner[0]

    @torch.no_grad()
    def write(self, theta: Mapping[str, Tensor]) -> None:
        device, inner, own = self._device, self._inner[0], dict(self.named_parameters())
        for name, value in theta.items():
            if value.dim() < 2:
                inner.get_parameter(name).copy_(value)
                continue
            held = device.moved(self._written.get(name), value)
            own[name].copy_(held)
            inner.get_parameter(name).copy_(device.holds(name, held, self.work.writes))

    def settle(self, x: Tensor, nudge: Nudge | None = None, start: State | None = None) -> Reading:
        found = self.relaxation(x, Phase(100), start, nudge)
        return Reading(found.state, found.residual)

    @torch.no_grad()
    def relaxation(
        self, x: Tensor, phase: Phase, state: State | None, nudge: Nudge | None, keep: int = 0
    ) -> Relaxation:
        self.program()
        inner, device = self._inner[0], self._device
        if isinstance(inner, Machine) and keep:
            return super().relaxation(x, phase, state, nudge, keep)
        with self._imperfect_steps():
            found = relax(inner, x, phase, state, nudge, keep)
        self.work.settles += len(x)
        self.work.reads += len(x)
        read = device.reads(found.state)
        if read is found.state:
            return found
        residual = found.residual + distance(read, found.state, self.sample_dims(x))
        settled = residual < settled_below(read[0].dtype, phase.tolerance)
        return Relaxation(read, found.steps, residual, settled, found.trail)

    @contextmanager
    def _imperfect_steps(self) -> Iterator[None]:
        if not self.imperfections.of_steps:
            yield
            return
        with stepping(
            lambda model, x, nudge, phase: ImperfectStepper(self._device, Stepper(model, model.drive(x), nudge))
        ):
            yield

    def _apply(self, fn: object, recurse: bool = True) -> Simulated:
        super()._apply(fn, recurse)
        self._inner[0]._apply(fn, recurse)
        return self

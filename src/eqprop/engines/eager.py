"""The reference engine: the time loop as in the equations, for any model, cost and estimator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eqprop.autodiff import in_own_precision
from eqprop.cost import Nudge, Problem
from eqprop.dynamics import Dynamics
from eqprop.engines.base import (
    PRECISIONS,
    Batch,
    Engine,
    Job,
    Precision,
    Runner,
    Tally,
    full_precision,
    has_bare_sgd,
)
from eqprop.estimators import EP, Estimator, Signs
from eqprop.relax import (
    DifferenceMaker,
    Phase,
    Relaxation,
    Stepper,
    Update,
    difference_stepper,
    relax,
    stepping,
)
from eqprop.state import State

_aten = torch.ops.aten
_FACTORS: dict[Any, tuple[int, ...]] = {
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.bmm.default: (0, 1),
    _aten.baddbmm.default: (1, 2),
    _aten.mv.default: (0, 1),
    _aten.addmv.default: (1, 2),
    _aten.dot.default: (0, 1),
    _aten.convolution.default: (0, 1),
    _aten.convolution_backward.default: (0, 1, 2),
}
"""Products by their operator: the places of their factors among its arguments."""

_ADDED: dict[Any, Any] = {
    _aten.addmm.default: torch.mm,
    _aten.baddbmm.default: torch.bmm,
    _aten.addmv.default: torch.mv,
}
"""Products with a sum, by their operator: the product alone. What is added stands first."""

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Products(TorchDispatchMode):
    """Every product takes its factors rounded to a lower precision and sums in float32; half products return half.

    It acts below automatic differentiation, so it covers a Phi that is differentiated at every step. On a CPU the
    rounding is real and the product is float32, which is slow and has the same values up to the order of sums; on a GPU
    tensor cores multiply, for TF32 by torch's own switch.
    """

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.precision = precision

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        places, options = _FACTORS.get(function), dict(kwargs or {})
        if places is None or not args[places[0]].is_floating_point():
            return function(*args, **options)
        on_gpu = args[places[0]].is_cuda
        if on_gpu and self.precision == "tf32":
            return function(*args, **options)
        given, dtype = list(args), args[places[0]].dtype
        for place in places:
            given[place] = given[place].to(HALVES[self.precision]) if on_gpu else self._rounded(given[place])
        if function in _ADDED:  # the sum itself stays float32
            added = given.pop(0)
            product = self._returned(_ADDED[function](*given), dtype)
            return options.pop("beta", 1) * added + options.pop("alpha", 1) * product
        bias = None
        if function is _aten.convolution.default:
            bias, given[2] = given[2], None
        found = function(*given, **options)
        if isinstance(found, tuple):
            return tuple(None if part is None else self._returned(part, dtype) for part in found)
        product = self._returned(found, dtype)
        return product if bias is None else product + bias.view(-1, *[1] * (product.dim() - 2))

    def _returned(self, product: Tensor, dtype: torch.dtype) -> Tensor:
        if product.dtype != dtype:
            return product.to(dtype)
        return product if self.precision == "tf32" else self._rounded(product)

    def _rounded(self, v: Tensor) -> Tensor:
        if self.precision in HALVES:
            return v.to(HALVES[self.precision]).to(v.dtype)
        # TF32 keeps 10 of 23 bits of the mantissa.
        bits = v.float().contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(v.dtype)


def outside_steps(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """The products of an update besides those of steps: the contrast, and what BPTT and RBP differentiate.

    In TF32 where less than float32 was declared: it rounds as float16 does, with the range of float32, which
    differences of states need.
    """
    if precision == "float32":
        return nullcontext()
    # On a GPU torch's switch is all it takes, and a mode would be in the way of a compiler.
    return products("tf32") if device.type == "cpu" else full_precision(tf32=True)


@contextmanager
def products(precision: Precision) -> Iterator[None]:
    """Products in this precision."""
    if precision == "float32":
        yield
        return
    with full_precision(tf32=precision == "tf32"), Products(precision):
        yield


class PreciseStepper(Stepper):
    """The reference's step with products in a declared precision."""

    def __init__(self, model: Dynamics, x: Tensor, nudge: Nudge | None, precision: Precision) -> None:
        with products(precision):
            drive = model.drive(x)
        super().__init__(model, drive, nudge)
        self.precision = precision

    def __call__(self, s: State, update: Update = None) -> State:
        with products(self.precision):
            return super().__call__(s, update)


class PreciseDifference(Stepper):
    """The difference form's step with products in a declared precision."""

    def __init__(self, model: Dynamics, x: Tensor, nudge: Nudge, s: State, precision: Precision) -> None:
        with products(precision):
            self.inner = difference_stepper(model, x, nudge, s)
        self.precision = precision

    def start(self, s: State) -> State:
        return self.inner.start(s)

    def __call__(self, d: State, update: Update = None) -> State:
        with products(self.precision):
            return self.inner(d, update)


def difference_in(precision: Precision) -> DifferenceMaker:
    """The steps of the difference form in this precision."""
    if precision == "float32":
        return difference_stepper
    return lambda model, x, nudge, s: PreciseDifference(model, x, nudge, s, precision)


def stepping_in(precision: Precision) -> AbstractContextManager[None]:
    """Let `relax` take the reference's steps in this precision."""
    if precision == "float32":
        return nullcontext()
    return stepping(lambda model, x, nudge, phase: PreciseStepper(model, x, nudge, precision), difference_in(precision))


CLIP_EPS = 1e-6
"""Added to a gradient's norm before dividing by it, as in torch."""


@dataclass(frozen=True)
class Agreement:
    """How far one update agrees with another: the cosine between them, and the ratio of their norms."""

    cosine: float
    norm: float

    @classmethod
    def of(cls, update: Tensor, reference: Tensor) -> Agreement:
        """nan where one of them is zero and the other is not; two that are zero agree."""
        a, b = update.detach().double().flatten(), reference.detach().double().flatten()
        size, other = float(a.norm()), float(b.norm())
        if size == other == 0.0:
            return cls(1.0, 1.0)
        if size == 0.0 or other == 0.0:
            return cls(math.nan, size / other if other else math.inf)
        return cls(float((a / size) @ (b / other)), size / other)

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, which knows no nan: None."""
        return {name: v if math.isfinite(v) else None for name, v in (("cosine", self.cosine), ("norm", self.norm))}


def agreements(update: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, Agreement]:
    """Of the whole update, under "", and of each parameter."""
    names = list(reference)
    if not names:
        return {"": Agreement(1.0, 1.0)}
    whole = [torch.cat([part[name].flatten().double() for name in names]) for part in (update, reference)]
    return {"": Agreement.of(*whole), **{name: Agreement.of(update[name], reference[name]) for name in names}}


def compare_precision(
    problem: Problem, estimator: Estimator, precision: Precision, begun: State | None = None
) -> dict[str, Agreement]:
    """The update of a mini-batch in this precision against that in the model's own, whole and per parameter."""
    return agreements(update_in(problem, estimator, precision, begun), update_in(problem, estimator, "float32", begun))


def compare_with_float64(problem: Problem, estimator: Estimator, begun: State | None = None) -> dict[str, Agreement]:
    """The update of a mini-batch in the model's own precision against that in float64."""
    exact = problem.double()
    start = None if begun is None else tuple(layer.double() for layer in begun)
    return agreements(update_in(problem, estimator, "float32", begun), update_in(exact, estimator, "float32", start))


@full_precision()
def update_in(
    problem: Problem, estimator: Estimator, precision: Precision, begun: State | None = None
) -> dict[str, Tensor]:
    """dL/dtheta of the model's parameters by name, with products in this precision."""
    if isinstance(estimator, EP) and estimator.nudging == "random-sign":
        estimator = estimator.with_sign(1.0)
    names = {p: name for name, p in problem.model.named_parameters()}
    with outside_steps(precision, problem.x.device), stepping_in(precision):
        _, grads = estimator.gradient(problem.model, problem.cost, problem.x, problem.y, begun)
    return {names[p]: g for p, g in grads.items() if p in names}


class EagerRunner(Runner):
    """Run iterations one by one, each with `Estimator.backward` and the optimizer."""

    def __init__(self, job: Job, precision: Precision = "float32") -> None:
        self.job, self.precision = job, precision
        self.estimator = replace(job.estimator, checked=False)
        self.tally = Tally.zeros(job.networks or 1, job.images.device)
        self.clock = torch.zeros((), dtype=torch.float64, device=job.images.device)
        self.signs = job.signs or Signs(tuple(range(job.networks or 1)))
        self.done = 0

    @in_own_precision
    @full_precision()
    def run(self, order: Tensor) -> None:
        signs = self.next_signs(len(order))
        stream = self.job.stream or self._gathered
        for n, batch in enumerate(stream(order)):
            self.iterate(batch, None if signs is None else signs[n])

    def _gathered(self, order: Tensor) -> Iterator[Batch]:
        return map(self.gather, order.to(self.job.images.device))

    def stepping(self) -> AbstractContextManager[None]:
        """The steps that the phases of an iteration take."""
        return stepping_in(self.precision)

    def gather(self, rows: Tensor) -> Batch:
        job = self.job
        stored = job.images[rows]
        x = stored if job.prepare is None else job.prepare(stored, rows)
        return Batch(x, job.targets[rows], job.labels[rows], rows)

    def take_estimator(self, estimator: Estimator) -> None:
        self.estimator = replace(estimator, checked=False)

    def next_signs(self, n: int) -> Tensor | None:
        """(n, R) signs of beta for the next n iterations, on the device; None if the estimator draws none."""
        first, self.done = self.done, self.done + n
        if not (isinstance(self.estimator, EP) and self.estimator.nudging == "random-sign"):
            return None
        return self.signs.rows(first, n).to(self.job.images.device)

    def iterate(self, batch: Batch, signs: Tensor | None = None) -> None:
        """Run one iteration. Everything stays on the device, even the iteration number, so that it can be captured."""
        loss = self.learn(batch, signs)
        if self.job.exchange is not None:
            loss = self.job.exchange(self.gradients(), loss)
        self.update(loss)

    def learn(self, batch: Batch, signs: Tensor | None = None) -> Tensor:
        """The first half: both phases and the gradient, in `.grad`. Returns the loss of each sample, (R, B)."""
        job = self.job
        job.optimizer.zero_grad(set_to_none=True)
        begun = None if job.start is None else job.start.begin(batch.x, batch.rows)
        estimator = self.estimator
        if isinstance(estimator, EP) and signs is not None:
            estimator = estimator.with_sign(signs if job.networks else signs[0])
        with outside_steps(self.precision, batch.x.device), self.stepping():
            free = self.backward(estimator, batch, begun)
        with torch.no_grad():
            theta = dict(job.model.named_parameters())
            dims = 2 if job.networks else 1
            loss = job.cost.values(free.state, batch.y, theta, dims).reshape(self.tally.bad.numel(), -1)
            self._count(free, loss, batch.labels, dims)
        if job.start is not None and begun is not None:
            job.start.end(batch.x, batch.rows, begun, free.state)
        return loss

    def backward(self, estimator: Estimator, batch: Batch, begun: State | None) -> Relaxation:
        """Add the gradient to `.grad`; return the free phase."""
        problem = Problem(self.job.model, self.job.cost, batch.x, batch.y)
        free, grads = estimator.gradient(problem.model, problem.cost, problem.x, problem.y, begun)
        estimator.fill_grad(problem, grads)
        return free

    def update(self, loss: Tensor) -> None:
        """The second half: freeze networks that are not finite, clip, and step."""
        job = self.job
        with torch.no_grad():
            self._guard(loss)
            if job.clip is not None:
                self._clip(job.clip)
        with self._frozen_kept():
            job.optimizer.step()
            job.model.constrain()
        if job.after is not None:
            job.after()
        self.clock += 1.0

    @contextmanager
    def _frozen_kept(self) -> Iterator[None]:
        """Keep the parameters of frozen networks: with momentum or decay a step moves them without a gradient too."""
        if has_bare_sgd(self.job):
            yield
            return
        before = [(p, p.detach().clone()) for p in self.learned()]
        yield
        with torch.no_grad():
            for p, old in before:
                p.copy_(torch.where(self._going(p), p, old))

    def _going(self, like: Tensor) -> Tensor:
        """Which networks are not frozen, shaped to choose from a parameter or its gradient."""
        going = self.tally.bad < 0
        return going.view(-1, *[1] * (like.dim() - 1)) if self.job.networks else going[0]

    def learned(self) -> list[Tensor]:
        """The optimizer's parameters that have a gradient."""
        return [p for group in self.job.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def gradients(self) -> list[Tensor]:
        """Their gradients."""
        return [p.grad for p in self.learned() if p.grad is not None]

    def _clip(self, most: float) -> None:
        """Scale each network's gradient down to norm `most`, as clip_grad_norm_ does, without reading it back."""
        networks = self.tally.bad.numel()
        grads = self.gradients()
        squares = torch.stack([g.double().square().reshape(networks, -1).sum(1) for g in grads]).sum(0)
        factor = (most / (squares.sqrt() + CLIP_EPS)).clamp(max=1.0)
        for g in grads:
            g.mul_(factor.view(-1, *[1] * (g.dim() - 1)).to(g.dtype) if self.job.networks else factor[0].to(g.dtype))

    def _guard(self, loss: Tensor) -> None:
        """Freeze networks whose loss or gradient is not finite: with a zero gradient, bare SGD changes nothing."""
        good = torch.isfinite(loss).all(1)
        grads = self.gradients()
        for grad in grads:
            good &= torch.isfinite(grad).reshape(good.numel(), -1).all(1)
        bad = self.tally.bad
        newly = ~good & (bad < 0)
        bad.copy_(torch.where(newly, self.clock, bad))
        for grad in grads:
            grad.copy_(torch.where(self._going(grad), grad, torch.zeros_like(grad)))

    def _count(self, free: Relaxation, loss: Tensor, labels: Tensor, sample_dims: int) -> None:
        tally, networks = self.tally, self.tally.bad.numel()
        scores = self.job.cost.scores(free.state).flatten(sample_dims)
        wrong = (scores.argmax(-1) != labels).reshape(networks, -1)
        residual = free.residual.reshape(networks, -1)
        tally.samples += wrong.shape[1]
        tally.errors += wrong.sum(1)
        tally.loss += loss.sum(1)
        tally.residual += residual.sum(1)
        tally.worst.copy_(torch.maximum(tally.worst, residual.amax(1).double()))
        tally.unsettled += (~free.settled).reshape(networks, -1).sum(1)


class Eager(Engine):
    name = "eager"
    reference = True
    steers = True
    computes = True
    starts = ("zero", "persistent", "initialised", "carried")
    precisions = PRECISIONS

    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        with full_precision(), stepping_in(self.precision):
            return relax(model, x, phase, state)

    def runner(self, job: Job) -> Runner:
        return EagerRunner(job, self.precision)

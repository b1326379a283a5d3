"""Trains the trials of one leg together: advances, measures, saves and restores them, and detects divergence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from eqprop.cost import Cost, Problem
from eqprop.data import Streamed
from eqprop.data.images import stacked_order
from eqprop.data.streamed import StreamedBatch
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.engines import Batch, Job, Tally
from eqprop.engines.eager import compare_precision, compare_with_float64
from eqprop.estimators import EP, Backprop, Estimator, Signs, random_sign
from eqprop.models import CrossEntropy, unstack, unstack_readout
from eqprop.optimizers import drowned
from eqprop.physical.machine import Machine, Work
from eqprop.relax import NotFiniteError, Relaxation, relax
from eqprop.run.audit import audited
from eqprop.run.checkpoint import (
    Checkpoint,
    DamagedError,
    Divergence,
    Position,
    check_weights,
    restore_start,
    saved_start,
    source_of,
)
from eqprop.run.distributed import SUMS, SharedStart, shared_start
from eqprop.run.evaluate import PARTS, Errors, Measure
from eqprop.run.extras import Average
from eqprop.run.log import Line
from eqprop.run.rest import MEASURED, Guard
from eqprop.run.session import ELEMENTWISE, Leg, Session
from eqprop.state import State

EXPLODED = 1e6
"""A residual above this means an exploding state, even if it is finite: bounded nets have residuals of at most 1."""

ADVICE = "Lower the learning rates (--lr), beta or eps, or use initial weights that settle (--init default)."


def diagnose(problem: Problem, begun: State | None, estimator: Estimator) -> str:
    """Repeat the iteration on one network with checks on, and say where it first goes wrong.

    The network is frozen with the parameters it had before that iteration, so the failure repeats. `begun` is where its
    free phase started, None for zero.
    """
    model = problem.model
    bad = next((name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())), None)
    if bad is not None:
        return f"The parameter {bad} is not finite. {ADVICE}"
    try:
        free, grads = replace(estimator, checked=True).gradient(model, problem.cost, problem.x, problem.y, begun)
    except NotFiniteError as error:
        return str(error)
    except ArithmeticError as error:
        return f"{error} {ADVICE}"
    except (ValueError, RuntimeError) as error:
        # Checks of the model and estimator passed before the run: now they fail at numbers that are out of bounds.
        return f"The gradient is not finite, and its checks fail ({error}) {ADVICE}"
    where = _largest_layer(model, free)
    names = {p: name for name, p in model.named_parameters()}
    for p, grad in grads.items():
        if not bool(torch.isfinite(grad).all()):
            return f"The gradient of {names.get(p, 'a parameter of the cost')} is not finite; {where}. {ADVICE}"
    return f"The state explodes: {where}, with a residual of {float(free.residual.max()):.3g}. {ADVICE}"


def _largest_layer(model: Dynamics, free: Relaxation) -> str:
    names = model.layer_names or tuple(f"s{n}" for n in range(len(free.state)))
    largest = [float(layer.abs().max()) for layer in free.state]
    worst = max(range(len(largest)), key=largest.__getitem__)
    return f"layer {names[worst]} reaches {largest[worst]:.3g}"


def _relative_change(before: Mapping[str, Tensor] | None, now: Mapping[str, Tensor]) -> float | None:
    """The largest |now - before| / |before| of any parameter."""
    if before is None:
        return None
    sizes = {name: float(value.norm()) for name, value in before.items()}
    return max((float((now[name] - before[name]).norm()) / size for name, size in sizes.items() if size), default=None)


class Trainer:
    """One leg of a session: networks, optimizer, runner and position.

    Starts from a checkpoint, or from the trials' seeds. `engine` replaces the one in the settings.
    """

    def __init__(
        self, session: Session, leg: Leg, engine: str | None = None, checkpoint: Checkpoint | None = None
    ) -> None:
        self.session, self.leg, self.ranks, self.spec = session, leg, session.ranks, session.spec
        parts = session.take(leg, engine or (None if checkpoint is None else checkpoint.engine))
        self.model, self.cost, self.estimator = parts.model, parts.cost, parts.estimator
        self.optimizer, self.engine, self.preparation = parts.optimizer, parts.engine, parts.preparation
        self.networks = len(leg.trials) if len(leg.trials) > 1 else None
        self._first_rates = [group["lr"] for group in self.optimizer.param_groups]
        averaged = self.spec.optimizer.average
        self.guard = self._guard() if self.spec.phases.steered and not isinstance(self.estimator, Backprop) else None
        self.average = Average([p for _, p in self._parameters()], averaged) if averaged else None
        self.x, self.labels = parts.x, parts.answers
        self.targets = session.targets(self.labels)
        self._reading: tuple[Position, Iterator[StreamedBatch]] | None = None
        self.start = parts.start
        self.shared = shared_start(self.start, self.ranks, self.networks)
        # Made once, so that they keep their runners from epoch to epoch.
        forward = isinstance(self.estimator, Backprop)
        self.test_measure, self.train_measure = (
            Measure(self.engine, self.model, session, part, self.networks, self.start, self.cost, forward)
            for part in PARTS
        )
        self.position = self._next = Position()
        self.diverged: dict[int, Divergence] = {}
        self.ended = False
        self.moved: float | None = None
        """How far the last epoch moved the weights, relative to their size; None where that is not known."""
        self.seconds = self.epoch_seconds = 0.0
        if checkpoint is not None:
            self._restore(checkpoint)
        elif self.guard is not None:
            self.guard.choose_beta(self._first_samples())
        self.runner = self.engine.runner(self._job())
        if checkpoint is not None:
            self._restore_counts(checkpoint)
        self._begun = self._iterations_done()
        self._order_epoch, self._order = -1, torch.empty(0)
        self._good, self._good_averages = self._weights(), self._averages()
        self._at_epoch = None if self.position.iteration else self._good

    @property
    def streams(self) -> bool:
        return isinstance(self.session.images, Streamed)

    def _read(self, order: Tensor) -> Iterator[Batch]:
        """The mini-batches of these rows, the next ones of the epoch: one iterator serves all of it."""
        images, place = self.session.images, self._next
        assert isinstance(images, Streamed), "others are gathered"
        if self._reading is None or self._reading[0] != place:
            rest = self.ranks.share(self._batches(place.epoch)[place.iteration :], -1)
            seeds = self._seeds if self.networks else self._seeds[0]
            self._reading = place, images.batches(rest, seeds, place.epoch)
        reading = self._reading[1]
        for n in range(len(order)):
            self._reading = Position(place.epoch, place.iteration + n + 1), reading
            yield self._batch_of(next(reading))

    def _batch_of(self, read: StreamedBatch) -> Batch:
        assert self.preparation is not None, "streamed samples are always prepared"
        rows = read.rows.to(self.session.device)
        y = self.session.targets(read.y)
        labels = read.y if self.session.images.labelled else y.argmax(-1)
        return Batch(self.preparation(read.x.flatten(rows.dim()), rows), y, labels, rows)

    def _samples(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs and targets of these training samples in this epoch."""
        if isinstance(images := self.session.images, Streamed):
            seeds = self._seeds if rows.dim() > 1 else self._seeds[0]
            batch = self._batch_of(next(images.batches(rows.unsqueeze(0), seeds, self.position.epoch)))
            return batch.x, batch.y
        x = self.x[rows] if self.preparation is None else self.preparation(self.x[rows], rows)
        return x, self.targets[rows]

    def _job(self) -> Job:
        return Job(
            self.model,
            self.cost,
            self.estimator if self.guard is None else self.guard.estimator,
            self.optimizer,
            self.x,
            self.targets,
            self.labels if self.session.images.labelled else self.targets.argmax(-1),
            self.networks,
            self.shared,
            Signs(self._seeds, self._iterations_done()),
            prepare=self.preparation,
            stream=self._read if self.streams else None,
            clip=self.spec.optimizer.clip_norm,
            exchange=self.ranks.average if self.ranks.several else None,
            after=self.average,
        )

    @property
    def _seeds(self) -> tuple[int, ...]:
        return tuple(self.spec.run.seed + trial for trial in self.leg.trials)

    @property
    def finished(self) -> bool:
        # An epoch in which all trials diverged still has to be closed, which writes why.
        closed = self.position.iteration == 0
        return self.ended or self.position.epoch >= self.spec.optimizer.epochs or (self.all_diverged and closed)

    @property
    def all_diverged(self) -> bool:
        return len(self.diverged) == len(self.leg.trials)

    @property
    def epoch_done(self) -> bool:
        return self.position.iteration >= self.session.iterations

    def advance(self, n: int) -> dict[str, list[float]]:
        """Run n iterations of the current epoch; return its counts so far."""
        start = time.perf_counter()
        epoch, first = self.position.epoch, self.position.iteration
        self._augment_as_in(epoch)
        self._run(self.ranks.share(self._batches(epoch)[first : first + n], -1))
        counts = self.counts()
        self.position = Position(epoch, first + n)
        self._look_for_divergence(counts)
        self._spend(time.perf_counter() - start)
        return counts

    def _augment_as_in(self, epoch: int) -> None:
        if self.preparation is not None:
            self.preparation.epoch.fill_(epoch)

    def match(self) -> None:
        """Take over the weights of rank 0, before the first iteration: a user's network may draw others."""
        if self.ranks.several:
            self._take_over()
            self._good, self._good_averages = self._weights(), self._averages()
            self._at_epoch = None if self.position.iteration else self._good

    def _complete(self) -> None:
        """Bring the states of all samples to every rank."""
        if isinstance(self.shared, SharedStart):
            self.shared.complete()

    def _take_over(self) -> None:
        averaged = [] if self.average is None else self.average.values
        self.ranks.from_first([*(p.detach() for _, p in self._parameters()), *averaged])

    def counts(self) -> dict[str, list[float]]:
        """The counts of the current epoch so far, over all ranks."""
        return self.ranks.counts(self.runner.tally)

    def _run(self, order: Tensor) -> None:
        """Run these iterations; during the warm-up one by one, each at its own rates."""
        warm = self.spec.optimizer.warmup * self.session.iterations
        done = self._iterations_done()
        rising = min(max(math.ceil(warm) - done, 0), len(order))
        epoch, first = self.position.epoch, self.position.iteration
        for n in range(rising):
            self._set_rates(min((done + n + 1) / warm, 1.0))
            self._next = Position(epoch, first + n)
            self.runner.run(order[n : n + 1])
        while rising < len(order):
            n = len(order) - rising
            n = n if self.guard is None else min(n, self.guard.until_look(done + rising))
            self._next = Position(epoch, first + rising)
            self.runner.run(order[rising : rising + n])
            rising += n
            if self.guard is not None and (done + rising) % self.guard.settings.every == 0:
                settle = self.engine.relaxation if self.engine.name == "xla" else relax
                self.guard.look(self.model, self._first_samples().x, self.counts(), settle)
                self._follow()

    def _guard(self) -> Guard:
        in_turn = self.estimator.schedule == "alternating" or self.model.first_moved is not None
        groups = self.session.groups or (2 if in_turn else 1)
        return Guard(self.spec.phases, self.estimator, groups)

    def _first_samples(self) -> Problem:
        """The network on the first training samples, as they are in this epoch."""
        rows = torch.arange(min(MEASURED, self.session.images.train_samples), device=self.x.device)
        return Problem(self.model, self.cost, *self._samples(rows))

    def _follow(self) -> None:
        """Let the runner and the optimizer take over what the guard has changed."""
        assert self.guard is not None
        self.runner.take_estimator(self.guard.estimator)
        self._set_rates()

    def _batches(self, epoch: int) -> Tensor:
        """(n, B), or (n, R, B) for stacked networks."""
        if self._order_epoch != epoch:
            order = stacked_order(self._seeds, epoch, self.session.images.train_samples, self.spec.optimizer.batch)
            self._order_epoch, self._order = epoch, order if self.networks else order[:, 0]
        return self._order

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds
        self.epoch_seconds += seconds

    @torch.no_grad()
    def _finite(self) -> list[bool]:
        """Whether the weights are finite, per trial."""
        good = torch.ones(len(self.leg.trials), dtype=torch.bool, device=self.x.device)
        for _, p in self._parameters():
            good &= torch.isfinite(p).reshape(len(good), -1).all(1)
        return good.tolist()

    def _look_for_divergence(self, counts: dict[str, list[float]]) -> None:
        finite = self._finite()
        for r, trial in enumerate(self.leg.trials):
            bad, worst = counts["bad"][r], counts["worst"][r]
            if trial in self.diverged or (bad < 0 and not worst > EXPLODED and finite[r]):
                continue
            # A runner counts from its own start; a large but finite state is only noticed at the end of a chunk.
            total = self._begun + int(bad) if bad >= 0 else self._iterations_done() - 1
            iteration = total % self.session.iterations
            rows = self._batches(self.position.epoch)[iteration].to(self.x.device)
            self._complete()
            reason = self._diagnose(r, rows, random_sign(self._seeds[r], total))
            self.diverged[trial] = Divergence(self.position.epoch + 1, iteration, reason)
            self.runner.tally.bad[r] = max(bad, 0.0)
            self._restore_good(r)

    def _diagnose(self, r: int, rows: Tensor, sign: int) -> str:
        """Diagnose network r on this mini-batch, (B,) or (R, B), with this sign of beta if it was drawn."""
        problem, begun = self._problem(r, rows)
        estimator = self.estimator
        if isinstance(estimator, EP) and estimator.nudging == "random-sign":
            estimator = estimator.with_sign(sign)
        return diagnose(problem, begun, estimator)

    def _problem(self, r: int, rows: Tensor) -> tuple[Problem, State | None]:
        """Network r on its part of this mini-batch, and where its free phase starts."""
        x, y = self._samples(rows)
        begun = None if self.start is None else self.start.begin(x, rows)
        if self.networks:
            x, y, begun = x[r], y[r], None if begun is None else tuple(layer[r] for layer in begun)
        return Problem(self._network(r), self._cost(r), x, y), begun

    def _iterations_done(self) -> int:
        return self.position.epoch * self.session.iterations + self.position.iteration

    def averaged(self) -> AbstractContextManager[None]:
        """Inside the block the networks have their averaged weights, if there are."""
        return nullcontext() if self.average is None else self.average.instead()

    def trial(self, trial: int) -> tuple[Dynamics, Cost]:
        """The network of a trial and its cost, with their weights as they are now."""
        r = self.leg.trials.index(trial)
        return self._network(r), self._cost(r)

    def settling(self) -> dict[int, dict[str, Any]]:
        """Where the free phases of the trials that ended well end; empty before the end."""
        with self.averaged():
            trials = enumerate(self.leg.trials) if self.finished else ()
            well = {trial: self._network(r) for r, trial in trials if trial not in self.diverged}
            found = {trial: audited(self.session, self.leg.estimator, network) for trial, network in well.items()}
        return {trial: rest for trial, rest in found.items() if rest is not None}

    def _network(self, r: int) -> Dynamics:
        if self.networks is None:
            return self.model
        assert isinstance(self.model, PrimitiveDynamics), "only these can be stacked"
        return unstack(self.model, r)

    def _cost(self, r: int) -> Cost:
        stacked = self.networks is not None and isinstance(self.cost, CrossEntropy)
        return unstack_readout(self.cost, r) if stacked and isinstance(self.cost, CrossEntropy) else self.cost

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters of the network and, as cost.NAME, of the cost."""
        return [*self.model.named_parameters(), *self.cost.named_parameters(prefix="cost")]

    def drowned(self) -> list[tuple[str, float]]:
        """The parameters whose gradients are below ten times the optimizer's epsilon, and their sizes."""
        return drowned(self.optimizer, {id(p): name for name, p in self._parameters()})

    def _weights(self) -> dict[str, Tensor]:
        """TRIAL.PARAMETER -> a copy on the CPU."""
        out = {}
        for r, trial in enumerate(self.leg.trials):
            for name, p in self._parameters():
                value = p.detach() if self.networks is None else p.detach()[r]
                out[f"{trial}.{name}"] = value.cpu().clone()
        return out

    def _averages(self) -> dict[str, Tensor]:
        """TRIAL.PARAMETER -> the averaged weights, copied to the CPU, and under "power" what they need to continue."""
        if self.average is None:
            return {}
        with self.average.instead():
            return {**self._weights(), "power": self.average.power.cpu().clone()}

    @torch.no_grad()
    def _set_averages(self, r: int, saved: dict[str, Tensor]) -> None:
        if self.average is None:
            return
        for (name, _), value in zip(self._parameters(), self.average.values, strict=True):
            place = value if self.networks is None else value[r]
            place.copy_(saved[f"{self.leg.trials[r]}.{name}"])

    @torch.no_grad()
    def _set_weights(self, r: int, weights: dict[str, Tensor]) -> None:
        trial = self.leg.trials[r]
        for name, p in self._parameters():
            place = p if self.networks is None else p[r]
            place.copy_(weights[f"{trial}.{name}"])

    def _restore_good(self, r: int) -> None:
        """Reset a stopped trial to the weights of its last good checkpoint."""
        self._set_weights(r, self._good)
        self._set_averages(r, self._good_averages)

    def end_epoch(self, between: Callable[[], None]) -> list[Line]:
        """Measure, move to the next epoch and return this one's lines; `between` may raise to postpone that."""
        epoch = self.position.epoch + 1
        test, train = self._measured(epoch, between)
        counts = self.counts()
        # Processors of another kind may round differently; they part by an epoch at most.
        self._take_over()
        lines = [
            self._line(
                r,
                epoch,
                {name: values[r] for name, values in counts.items()},
                {"test": test.top1[r], "top5": test.top5[r], "train": train[r]},
            )
            for r, trial in enumerate(self.leg.trials)
            if trial not in self.diverged or self.diverged[trial].epoch == epoch
        ]
        self.runner.reset()
        self.position = Position(epoch, 0)
        self.epoch_seconds = 0.0
        if self.spec.optimizer.decay != "none":
            self._set_rates()
        if self.guard is not None:
            self.guard.end_epoch()
            self.guard.choose_beta(self._first_samples())
            self._follow()
        now = self._weights()
        self.moved, self._at_epoch = _relative_change(self._at_epoch, now), now
        return lines

    def _set_rates(self, warmth: float = 1.0) -> None:
        """The learning rates of this epoch, computed from the initial ones so that a resumed run has the same bits."""
        for group, rate in zip(self.optimizer.param_groups, self._first_rates, strict=True):
            group["lr"] = self.spec.optimizer.rate_in(self.position.epoch, rate, warmth)
            group["lr"] *= 1.0 if self.guard is None else self.guard.factor
        self.runner.take_rates()

    def _train_error_due(self, epoch: int) -> bool:
        every = self.spec.run.train_error_every
        if not self.session.images.labelled:  # a runner counts labels only
            return True
        return epoch == self.spec.optimizer.epochs or bool(every and epoch % every == 0)

    def _measured(self, epoch: int, between: Callable[[], None]) -> tuple[Errors, list[float | None]]:
        """Errors per trial on the test set and, if due, on the training set; with averaged weights, if there are."""
        nothing: list[float | None] = [None] * len(self.leg.trials)
        if self.all_diverged:
            return Errors(nothing, nothing), nothing
        start = time.perf_counter()
        with self.averaged():
            test = self.test_measure.errors(between)
            train = self.train_measure.errors(between).top1 if self._train_error_due(epoch) else nothing
        self._spend(time.perf_counter() - start)
        return test, train

    def _line(self, r: int, epoch: int, counts: dict[str, float], measured: dict[str, float | None]) -> Line:
        trial, samples = self.leg.trials[r], max(counts["samples"], 1.0)
        stopped = self.diverged.get(trial)
        line: Line = {
            "estimator": self.leg.estimator,
            "trial": trial,
            "seed": self.spec.run.seed + trial,
            "epoch": epoch,
            "test_error": measured["test"],
            "train_error": 100.0 * counts["errors"] / samples if self.session.images.labelled else measured["train"],
            "train_error_measured": measured["train"],
            "loss": counts["loss"] / samples,
            "residual_mean": counts["residual"] / samples,
            "residual_worst": counts["worst"],
            "unsettled": counts["unsettled"] / samples,
            **({"test_error_top5": measured["top5"]} if self.spec.data.top5 else {}),
        }
        if stopped is not None:
            line.update(dict.fromkeys(list(line)[4:]))
        diverged = asdict(stopped) if stopped else None
        guarded = self.spec.run.precision != "float32" and epoch in (1, self.spec.optimizer.epochs)
        if guarded and stopped is None:
            line["precision"] = self._agreement(r, epoch)
        if self.guard is not None and stopped is None:
            line.update(self.guard.measured())
        if isinstance(self.model, Machine):
            line["work"] = self.model.work.to_dict()
        return {**line, "seconds": self.epoch_seconds, "diverged": diverged}

    def _agreement(self, r: int, epoch: int) -> dict[str, Any]:
        """How far the update of an epoch's first mini-batch agrees with float32's, and once with float64's."""
        self._complete()
        problem, begun = self._problem(r, self._batches(epoch - 1)[0].to(self.x.device))
        precision = self.spec.run.precision
        found = {"with_float32": compare_precision(problem, self.estimator, precision, begun)}
        if epoch == 1:
            found["float32_with_float64"] = compare_with_float64(problem, self.estimator, begun)
        record: dict[str, Any] = {"declared": precision}
        for what, parts in found.items():
            named = {name: one.to_dict() for name, one in parts.items()}
            record[what] = {"whole": named.pop(""), "parameters": named}
        return record

    def checkpoint(self) -> Checkpoint:
        self._complete()
        for r, trial in enumerate(self.leg.trials):
            if trial in self.diverged:
                self._restore_good(r)
        self._good, self._good_averages = self._weights(), self._averages()
        return Checkpoint(
            position=self.position,
            finished=self.finished,
            weights=self._good,
            optimizer=self.optimizer.state_dict(),
            tally=self.counts(),
            diverged=dict(self.diverged),
            seconds=self.seconds,
            epoch_seconds=self.epoch_seconds,
            engine=self.engine.name,
            run=self.session.identity,
            start=saved_start(self.start, self.leg.trials),
            start_source=source_of(self.start),
            average=self._good_averages,
            guard={} if self.guard is None else self.guard.to_dict(),
            work=self.model.work.to_dict() if isinstance(self.model, Machine) else {},
            settling=self.settling(),
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        check_weights(checkpoint, self._weights())
        for r in range(len(self.leg.trials)):
            self._set_weights(r, checkpoint.weights)
        self._restore_averages(checkpoint)
        self._restore_optimizer(checkpoint)
        restore_start(self.start, self.leg.trials, checkpoint)
        if self.guard is not None and checkpoint.guard:
            self.guard.restore(checkpoint.guard)
        if isinstance(self.model, Machine) and checkpoint.work:
            self.model.work = Work(**checkpoint.work)
        self.diverged = dict(checkpoint.diverged)
        self.position = checkpoint.position
        self._augment_as_in(self.position.epoch)
        self.seconds, self.epoch_seconds = checkpoint.seconds, checkpoint.epoch_seconds

    @torch.no_grad()
    def _restore_averages(self, checkpoint: Checkpoint) -> None:
        if self.average is None:
            return
        expected, saved = self._averages(), checkpoint.average
        wrong = next((n for n, v in expected.items() if n not in saved or saved[n].shape != v.shape), None)
        if wrong is not None:
            raise DamagedError(f"The checkpoint has no averaged weights {wrong} that fit. Restore it from a copy.")
        self.average.power.copy_(saved["power"])
        for r in range(len(self.leg.trials)):
            self._set_averages(r, saved)

    def _restore_optimizer(self, checkpoint: Checkpoint) -> None:
        """Load the optimizer's state. PyTorch takes a state of other shapes, and fails at the first step."""
        try:
            self.optimizer.load_state_dict(checkpoint.optimizer)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DamagedError(f"The optimizer in the checkpoint does not fit: {error}.") from error
        if self.spec.optimizer.kind not in ELEMENTWISE:
            return
        for p, state in self.optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape != p.shape:
                    raise DamagedError(
                        f"The optimizer's {name} in the checkpoint has shape {tuple(value.shape)}; expected "
                        f"{tuple(p.shape)}, like its parameter. Restore it from a copy."
                    )

    def _restore_counts(self, checkpoint: Checkpoint) -> None:
        """Restore the runner's counts of the unfinished epoch, and which networks it had frozen."""
        for name in Tally.names():
            if name in SUMS and not self.ranks.leads:
                continue
            counted = getattr(self.runner.tally, name)
            counted.copy_(torch.tensor(checkpoint.tally[name], dtype=counted.dtype))

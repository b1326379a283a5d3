"""Trains the trials of one leg together: advances, measures, saves and restores them, and detects divergence."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from eqprop.cost import Cost, Problem
from eqprop.data.images import stacked_order
from eqprop.dynamics import Dynamics, PrimitiveDynamics
from eqprop.engines import Job, Tally
from eqprop.estimators import EP, Estimator, Signs, random_sign
from eqprop.models import CrossEntropy, unstack, unstack_readout
from eqprop.relax import NotFiniteError, Relaxation
from eqprop.state import State
from eqprop.training.checkpoint import (
    Checkpoint,
    DamagedError,
    Position,
    check_weights,
    restore_start,
    saved_start,
    source_of,
)
from eqprop.training.evaluate import Measure
from eqprop.training.metrics import Line
from eqprop.training.plan import ELEMENTWISE, Leg, Plan, make_optimizer, make_start

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


_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_note_fork)


def check_not_forked(engine: str) -> None:
    """Raise in a forked process where torch would wait for threads that exist only in its parent."""
    if _forked and engine == "eager" and torch.get_num_threads() > 1:
        raise ValueError(
            "This process was forked, and torch's threads do not survive a fork: the eager engine would wait for them "
            "for ever. Train with threads=1, or start processes with multiprocessing.get_context('spawn')."
        )


@dataclass(frozen=True)
class Divergence:
    """Where and why a trial was stopped."""

    epoch: int
    iteration: int
    reason: str


def _relative_change(before: Mapping[str, Tensor] | None, now: Mapping[str, Tensor]) -> float | None:
    """The largest |now - before| / |before| of any parameter."""
    if before is None:
        return None
    sizes = {name: float(value.norm()) for name, value in before.items()}
    return max((float((now[name] - before[name]).norm()) / size for name, size in sizes.items() if size), default=None)


class Trainer:
    """One leg of a plan: networks, optimizer, runner and position.

    Starts from a checkpoint, or from the trials' seeds. `engine` replaces the one in the settings.
    """

    def __init__(self, plan: Plan, leg: Leg, engine: str | None = None, checkpoint: Checkpoint | None = None) -> None:
        self.plan, self.leg = plan, leg
        self.model = plan.network(leg.trials)
        self.networks = len(leg.trials) if plan.settings.stacked and len(leg.trials) > 1 else None
        self.cost = plan.cost(self.model, leg.trials)
        self.optimizer = make_optimizer(plan.experiment, self.model, self.cost)
        self._first_rates = [group["lr"] for group in self.optimizer.param_groups]
        task = plan.task(leg.estimator, self.model, self.cost, self.optimizer)
        assert task.estimator is not None, "every task of a plan has an estimator"
        self.estimator = task.estimator
        self.engine = plan.engine(engine or plan.settings.engine, task)
        check_not_forked(self.engine.name)
        images = plan.images
        self.x = plan.inputs(images.train_x, self.model)
        self.targets = images.targets(images.train_y, plan.dtype)
        self.start = make_start(plan.experiment, plan.settings, self.model, self.x)
        test_x = plan.inputs(images.test_x, self.model)
        # Made once, so that they keep their runners from epoch to epoch.
        self.test_measure, self.train_measure = (
            Measure(self.engine, self.model, plan.experiment, x, y, self.networks, self.start, self.cost)
            for x, y in ((test_x, images.test_y), (self.x, images.train_y))
        )
        self.position = Position()
        self.diverged: dict[int, Divergence] = {}
        self.ended = False
        self.moved: float | None = None
        """How far the last epoch moved the weights, relative to their size; None where that is not known."""
        self.seconds = self.epoch_seconds = 0.0
        if checkpoint is not None:
            self._restore(checkpoint)
        self.runner = self.engine.runner(self._job())
        if checkpoint is not None:
            self._restore_counts(checkpoint)
        self._begun = self._iterations_done()
        self._order_epoch, self._order = -1, torch.empty(0)
        self._good = self._weights()
        known = checkpoint is None or checkpoint.still
        self._at_epoch = self._good if known else None

    def _job(self) -> Job:
        return Job(
            self.model,
            self.cost,
            self.estimator,
            self.optimizer,
            self.x,
            self.targets,
            self.plan.images.train_y if self.plan.images.labelled else self.targets.argmax(-1),
            self.networks,
            self.start,
            Signs(self._seeds, self._iterations_done()),
        )

    @property
    def _seeds(self) -> tuple[int, ...]:
        return tuple(self.plan.experiment.seed + trial for trial in self.leg.trials)

    @property
    def finished(self) -> bool:
        # An epoch in which all trials diverged still has to be closed, which writes why.
        closed = self.position.iteration == 0
        return self.ended or self.position.epoch >= self.plan.experiment.epochs or (self.all_diverged and closed)

    @property
    def all_diverged(self) -> bool:
        return len(self.diverged) == len(self.leg.trials)

    @property
    def epoch_done(self) -> bool:
        return self.position.iteration >= self.plan.iterations

    def advance(self, n: int) -> dict[str, list[float]]:
        """Run n iterations of the current epoch; return its counts so far."""
        start = time.perf_counter()
        epoch, first = self.position.epoch, self.position.iteration
        self.runner.run(self._batches(epoch)[first : first + n])
        counts = self.runner.tally.read()
        self.position = Position(epoch, first + n)
        self._look_for_divergence(counts, first)
        self._spend(time.perf_counter() - start)
        return counts

    def _batches(self, epoch: int) -> Tensor:
        """(n, B), or (n, R, B) for stacked networks."""
        if self._order_epoch != epoch:
            order = stacked_order(self._seeds, epoch, len(self.x), self.plan.experiment.batch)
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

    def _look_for_divergence(self, counts: dict[str, list[float]], first: int) -> None:
        finite = self._finite()
        for r, trial in enumerate(self.leg.trials):
            bad, worst = counts["bad"][r], counts["worst"][r]
            if trial in self.diverged or (bad < 0 and not worst > EXPLODED and finite[r]):
                continue
            # A runner counts from its own start; a large but finite state is only noticed at the end of a chunk.
            total = self._begun + int(bad) if bad >= 0 else self._iterations_done() - 1
            epoch, iteration = divmod(total, self.plan.iterations)
            rows = self._batches(self.position.epoch)[iteration].to(self.x.device)
            reason = self._diagnose(r, rows, random_sign(self._seeds[r], total))
            self.diverged[trial] = Divergence(epoch + 1, iteration, reason)
            self.runner.tally.bad[r] = max(bad, 0.0)
            self._restore_good(r)

    def _diagnose(self, r: int, rows: Tensor, sign: int) -> str:
        """Diagnose network r on this mini-batch, (B,) or (R, B), with this sign of beta if it was drawn."""
        begun = None if self.start is None else self.start.begin(self.x[rows], rows)
        if self.networks:
            rows, begun = rows[r], None if begun is None else tuple(layer[r] for layer in begun)
        problem = Problem(self._network(r), self._cost(r), self.x[rows], self.targets[rows])
        estimator = self.estimator
        if isinstance(estimator, EP) and estimator.nudging == "random-sign":
            estimator = estimator.with_sign(sign)
        return diagnose(problem, begun, estimator)

    def _iterations_done(self) -> int:
        return self.position.epoch * self.plan.iterations + self.position.iteration

    def trial(self, trial: int) -> tuple[Dynamics, Cost]:
        """The network of a trial and its cost, with their weights as they are now."""
        r = self.leg.trials.index(trial)
        return self._network(r), self._cost(r)

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

    def _weights(self) -> dict[str, Tensor]:
        """TRIAL.PARAMETER -> a copy on the CPU."""
        out = {}
        for r, trial in enumerate(self.leg.trials):
            for name, p in self._parameters():
                value = p.detach() if self.networks is None else p.detach()[r]
                out[f"{trial}.{name}"] = value.cpu().clone()
        return out

    @torch.no_grad()
    def _set_weights(self, r: int, weights: dict[str, Tensor]) -> None:
        trial = self.leg.trials[r]
        for name, p in self._parameters():
            place = p if self.networks is None else p[r]
            place.copy_(weights[f"{trial}.{name}"])

    def _restore_good(self, r: int) -> None:
        """Reset a stopped trial to the weights of its last good checkpoint."""
        self._set_weights(r, self._good)

    def end_epoch(self, between: Callable[[], None]) -> list[Line]:
        """Measure, move to the next epoch and return this one's lines; `between` may raise to postpone that.

        Lines of later epochs follow if those need no training (see `_repeated`).
        """
        start = time.perf_counter()
        epoch = self.position.epoch + 1
        test, train = self._measured(epoch, between)
        self._spend(time.perf_counter() - start)
        counts = self.runner.tally.read()
        lines = [
            self._line(r, epoch, {name: values[r] for name, values in counts.items()}, (test[r], train[r]))
            for r, trial in enumerate(self.leg.trials)
            if trial not in self.diverged or self.diverged[trial].epoch == epoch
        ]
        self.runner.reset()
        self.position = Position(epoch, 0)
        self.epoch_seconds = 0.0
        if self.plan.experiment.decay != "none":
            self._let_rates_fall()
            self.runner.take_rates()
        return [*lines, *self._repeated(lines)]

    def _let_rates_fall(self) -> None:
        """Decay the learning rates, computed from the initial ones so that a resumed run has the same bits."""
        factor = self.plan.experiment.rate_factor(self.position.epoch)
        for group, rate in zip(self.optimizer.param_groups, self._first_rates, strict=True):
            group["lr"] = rate * factor

    def _repeated(self, lines: list[Line]) -> list[Line]:
        """If later epochs can only repeat this one, skip to the last one and return the lines of those in between.

        An epoch that changed no weight had a zero gradient on every mini-batch: clipped outputs are silent, or training
        has converged. If only the weights determine the next epoch, it does the same. The last epoch is still trained,
        as a check.
        """
        now = self._weights()
        self.moved = _relative_change(self._at_epoch, now)
        still, self._at_epoch = self._are_still(now), now
        epoch, last = self.position.epoch, self.plan.experiment.epochs
        measured = lines and lines[0]["train_error_measured"] is not None
        if (
            epoch + 1 >= last
            or not self._only_weights_decide
            or (self.plan.settings.train_error_every and not measured)
            or not still
        ):
            return []
        self.position = Position(last - 1, 0)
        unmeasured = {"train_error_measured": None}
        return [
            {**line, "epoch": e, "seconds": 0.0, "repeated": True, **({} if self._train_error_due(e) else unmeasured)}
            for e in range(epoch + 1, last)
            for line in lines
        ]

    def _are_still(self, weights: dict[str, Tensor]) -> bool:
        """Whether the weights have not changed since the epoch began."""
        before = self._at_epoch
        return before is not None and all(torch.equal(value, before[name]) for name, value in weights.items())

    @property
    def _only_weights_decide(self) -> bool:
        """Whether an epoch sees every sample and depends on earlier epochs through the weights alone."""
        experiment = self.plan.experiment
        drawn = isinstance(self.estimator, EP) and self.estimator.nudging == "random-sign"
        # With decaying rates, unchanged weights do not imply a zero gradient.
        bare = experiment.optimizer == "SGD" and not experiment.optimizer_options and experiment.decay == "none"
        whole = len(self.x) % experiment.batch == 0
        return bare and whole and not drawn and self.start is None and not self.diverged

    def _train_error_due(self, epoch: int) -> bool:
        every = self.plan.settings.train_error_every
        if not self.plan.images.labelled:  # a runner counts labels only
            return True
        return epoch == self.plan.experiment.epochs or bool(every and epoch % every == 0)

    def _measured(self, epoch: int, between: Callable[[], None]) -> tuple[list[float | None], list[float | None]]:
        """Errors per trial on the test set and, if due, on the training set."""
        nothing: list[float | None] = [None] * len(self.leg.trials)
        if self.all_diverged:
            return nothing, nothing
        test: list[float | None] = [*self.test_measure.error_rates(between)]
        if not self._train_error_due(epoch):
            return test, nothing
        return test, [*self.train_measure.error_rates(between)]

    def _line(self, r: int, epoch: int, counts: dict[str, float], measured: tuple[float | None, float | None]) -> Line:
        trial, samples = self.leg.trials[r], max(counts["samples"], 1.0)
        stopped = self.diverged.get(trial)
        line: Line = {
            "estimator": self.leg.estimator,
            "trial": trial,
            "seed": self.plan.experiment.seed + trial,
            "epoch": epoch,
            "test_error": measured[0],
            "train_error": 100.0 * counts["errors"] / samples if self.plan.images.labelled else measured[1],
            "train_error_measured": measured[1],
            "loss": counts["loss"] / samples,
            "residual_mean": counts["residual"] / samples,
            "residual_worst": counts["worst"],
            "unsettled": counts["unsettled"] / samples,
        }
        if stopped is not None:
            line.update(dict.fromkeys(list(line)[4:]))
        diverged = asdict(stopped) if stopped else None
        return {**line, "seconds": self.epoch_seconds, "repeated": False, "diverged": diverged}

    def checkpoint(self) -> Checkpoint:
        for r, trial in enumerate(self.leg.trials):
            if trial in self.diverged:
                self._restore_good(r)
        self._good = self._weights()
        return Checkpoint(
            position=self.position,
            finished=self.finished,
            weights=self._good,
            optimizer=self.optimizer.state_dict(),
            tally=self.runner.tally.read(),
            diverged={str(trial): asdict(d) for trial, d in self.diverged.items()},
            seconds=self.seconds,
            epoch_seconds=self.epoch_seconds,
            engine=self.engine.name,
            run=self.plan.identity,
            start=saved_start(self.start, self.leg.trials),
            start_source=source_of(self.start),
            still=self._are_still(self._good),
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        check_weights(checkpoint, self._weights())
        for r in range(len(self.leg.trials)):
            self._set_weights(r, checkpoint.weights)
        self._restore_optimizer(checkpoint)
        restore_start(self.start, self.leg.trials, checkpoint)
        self.diverged = {int(trial): Divergence(**d) for trial, d in checkpoint.diverged.items()}
        self.position = checkpoint.position
        self.seconds, self.epoch_seconds = checkpoint.seconds, checkpoint.epoch_seconds

    def _restore_optimizer(self, checkpoint: Checkpoint) -> None:
        """Load the optimizer's state. PyTorch takes a state of other shapes, and fails at the first step."""
        try:
            self.optimizer.load_state_dict(checkpoint.optimizer)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DamagedError(f"The optimizer in the checkpoint does not fit: {error}.") from error
        if self.plan.experiment.optimizer not in ELEMENTWISE:
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
            counted = getattr(self.runner.tally, name)
            counted.copy_(torch.tensor(checkpoint.tally[name], dtype=counted.dtype))

"""The training loop: legs, epochs and chunks, with checkpoints in between; it can stop after any chunk."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any

from eqprop.engines import Tally
from eqprop.engines.base import fixed_algorithms
from eqprop.experiments.architecture import OwnNet, is_own
from eqprop.messages import command
from eqprop.run.checkpoint import (
    BEST,
    CHECKPOINT,
    Checkpoint,
    DamagedError,
    has_checkpoint,
    kept,
    read_checkpoint,
    set_aside,
    survivors,
    write_checkpoint,
)
from eqprop.run.folder import Held, note_session, sessions
from eqprop.run.metrics import RESERVED, Line, Metrics, compare_lines, parse_line, to_text
from eqprop.run.plan import Leg, Plan
from eqprop.run.trainer import Trainer
from eqprop.run.watch import Course, EarlyStopping, Progress, Watch, counted, epoch_means


class Stopped(KeyboardInterrupt):
    """Raised after a signal, once the run is saved.

    `exit_code` is the shell's: 129 for SIGHUP, 130 for SIGINT, 143 for SIGTERM.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def _render_traceback_(self) -> list[str]:
        """What IPython and Jupyter show instead of a traceback."""
        return [f"Stopped: {self}"]


class Interruption:
    """Graceful shutdown: inside the block, SIGINT, SIGTERM and SIGHUP only set `signal`.

    A second Ctrl-C interrupts at once. A SIGHUP that is ignored, as under nohup, stays ignored. Does nothing outside
    the main thread, where Python allows no handlers.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return 128 + (self.signal or signal.SIGINT)


CHUNK_SECONDS = 0.5
"""Target duration of a chunk: short enough for Ctrl-C and the display, long enough that its overhead is negligible."""


GUARD = 0.95
"""A cosine with float32's update below which a run in lower precision warns."""


class Pace:
    """Chooses the iterations per chunk: a power of two that takes about CHUNK_SECONDS."""

    def __init__(self) -> None:
        self.n = 1
        self.per_second = 0.0

    def took(self, n: int, seconds: float) -> None:
        self.per_second = n / max(seconds, 1e-9)
        if seconds < CHUNK_SECONDS / 2 and n == self.n:
            self.n = min(2 * self.n, 1024)
        elif seconds > 2 * CHUNK_SECONDS:
            self.n = max(self.n // 2, 1)


class _PutOff(Exception):
    """Raised to postpone measuring to the next session."""


@dataclass(frozen=True)
class Turn:
    """What one session runs.

    engine      use it instead of the recorded one
    only        train only these estimators
    restart     start estimators again whose checkpoint is lost or damaged
    earlier     numbers of epochs after which the run was complete before they were raised
    """

    engine: str | None = None
    only: Sequence[str] | None = None
    restart: bool = False
    earlier: tuple[int, ...] = ()


class Loop:
    """Trains a plan in a run folder and reports to a watch.

    Among several ranks that divide each mini-batch, all run this loop in step: rank 0 writes, and decides what depends
    on time or on the user; the others follow.
    """

    def __init__(self, plan: Plan, held: Held, watch: Watch, interruption: Interruption, shared: bool = False) -> None:
        self.plan, self.held, self.folder, self.watch, self.interruption = plan, held, held.folder, watch, interruption
        self.ranks = plan.ranks
        self.metrics = Metrics(self.folder, writes=self.ranks.leads, shared=shared)
        self.legs = plan.legs()
        self._pointed: set[Leg] = set()
        self.agreed: int | None = None

    def run(self, session: dict[str, Any], turn: Turn) -> None:
        """Train every unfinished leg. Raises Stopped after a signal.

        `session` is written to the environment, with the engine of each estimator.
        """
        left = self.unfinished(turn)
        before = sessions(self.folder)
        for n, leg in enumerate(left):
            trainer = self._open(leg, turn)
            session["engines"][leg.estimator] = trainer.engine.name
            with self._writing() as writes:
                if writes:
                    note_session(self.folder, before, session)
            self.watch.begin_leg(leg, trainer.engine.name, trainer.position.epoch)
            self._run(trainer, len(left) - n - 1)

    def run_leg(self, leg: Leg, turn: Turn) -> None:
        """Train one leg of a run whose others belong to other processes."""
        trainer = self._open(leg, turn)
        trainer.engine.notice = self.watch.note
        self.watch.begin_leg(leg, trainer.engine.name, trainer.position.epoch)
        self._run(trainer, 0)

    def _run(self, trainer: Trainer, legs_after: int) -> None:
        trainer.engine.notice = self.watch.note
        if trainer.engine.remark:
            self.watch.note(trainer.engine.remark)
        self._tell_whether_bits_repeat(trainer)
        with fixed_algorithms(self.plan.settings.deterministic):
            self._train(trainer, legs_after)

    def unfinished(self, turn: Turn) -> list[Leg]:
        """The wanted legs that are not finished, with the metrics brought in line with their checkpoints."""
        with self.ranks.in_step():
            # Without the tensors, which are read again one leg at a time.
            reached = {leg: _bare(self._reached(leg, turn.restart)) for leg in self.legs}
        with self.ranks.in_step():
            self._settle_metrics(reached)
        wanted = [leg for leg in self.legs if turn.only is None or leg.estimator in turn.only]
        return [leg for leg in wanted if not self._is_finished(leg, reached[leg], turn)]

    def _is_finished(self, leg: Leg, checkpoint: Checkpoint | None, turn: Turn) -> bool:
        if checkpoint is None or not checkpoint.finished:
            return False
        epoch = checkpoint.position.epoch
        if epoch >= self.plan.experiment.epochs or len(checkpoint.diverged) == len(leg.trials):
            return True
        # It may end early with the very epoch that was its last.
        lines, patience = self.metrics.of(leg, epoch), self.plan.settings.patience
        early = epoch not in turn.earlier or (patience and EarlyStopping(patience).stop(lines) is not None)
        if early and turn.earlier:
            self.watch.note(f"{leg.folder} ended early after epoch {epoch}, as it would have in a longer run.")
        return bool(early)

    @contextmanager
    def _writing(self) -> Iterator[bool]:
        """Wrap every write: yields whether this rank writes. Where that fails, every rank raises."""
        with self.ranks.in_step(), self.held.writing():
            yield self.ranks.leads

    def _reached(self, leg: Leg, restart: bool) -> Checkpoint | None:
        """The verified checkpoint of a leg, None if it has not started. Raises if it is lost or damaged."""
        try:
            checkpoint = self._read(leg)
        except DamagedError as error:
            if not restart:
                raise self._with_restart(leg, error) from error
            self._start_again(leg, error)
            return None
        if checkpoint is not None and checkpoint.run != self.plan.identity:
            raise ValueError(
                f"The checkpoint in {self.folder / leg.folder} does not match experiment.json. One of them was changed "
                "or copied from another run: restore it, or start a new run."
            )
        return checkpoint

    def _read(self, leg: Leg) -> Checkpoint | None:
        place = self.folder / leg.folder
        if not has_checkpoint(place):
            self._check_not_lost(leg)
            return None
        checkpoint = read_checkpoint(place)
        position, trials = checkpoint.position, len(leg.trials)
        known = checkpoint.tally.keys() == set(Tally.names()) and all(
            len(counts) == trials for counts in checkpoint.tally.values()
        )
        if not known or position.epoch > self.plan.experiment.epochs or position.iteration > self.plan.iterations:
            raise DamagedError(
                f"{place / CHECKPOINT} does not fit its run of {counted(self.plan.experiment.epochs, 'epoch')} and "
                f"{counted(trials, 'trial')}. Restore it from a copy."
            )
        return checkpoint

    def _check_not_lost(self, leg: Leg) -> None:
        """Raise if a leg without checkpoint.json was trained: to start it anew would delete what is left of it."""
        place = self.folder / leg.folder
        left = survivors(place)
        lines = self.metrics.of(leg, self.plan.experiment.epochs)
        if left or lines:
            what = left[0] if left else f"{counted(len(lines), 'line')} of metrics"
            raise DamagedError(
                f"{place / CHECKPOINT} is missing, but {leg.estimator} was trained: {what} of it "
                f"{'remains' if left or len(lines) == 1 else 'remain'}. Restore it from a copy."
            )

    def _with_restart(self, leg: Leg, error: DamagedError) -> DamagedError:
        return DamagedError(
            f"{error} Nothing has been changed. To train {leg.folder} again from the beginning, and keep what is left "
            f"of it in {leg.folder}.old: {command('resume', self.folder, '--restart')}"
        )

    def _start_again(self, leg: Leg, error: DamagedError) -> None:
        place, kept = self.folder / leg.folder, ""
        if self.ranks.leads:
            with self.held.writing():
                kept = f"; what was left is in {set_aside(place).name}" if place.is_dir() else ""
        self.watch.warn(f"{error} Training {leg.folder} again from the beginning{kept}.")

    def _settle_metrics(self, reached: Mapping[Leg, Checkpoint | None]) -> None:
        """Drop lines newer than the checkpoints, which training writes again; repair what does not match them."""
        settled: list[Line] = []
        for leg, checkpoint in reached.items():
            if checkpoint is not None:
                settled += self._settled(leg, checkpoint)
        if sorted(map(to_text, settled)) != sorted(map(to_text, self.metrics.lines)):
            with self.held.writing():
                self.metrics.replace(settled)

    def _settled(self, leg: Leg, checkpoint: Checkpoint) -> list[Line]:
        """The lines of a leg up to its checkpoint, which holds a copy unless an earlier version wrote it."""
        found = self.metrics.of(leg, checkpoint.position.epoch)
        wrong = compare_lines(found, leg, checkpoint.to_dict())
        if not wrong:
            return found
        where = f"{self.metrics.path} does not match the checkpoint of {leg.folder}: lines: {', '.join(wrong)}"
        if checkpoint.lines is None:
            once = list({to_text(line): line for line in found}.values())
            if compare_lines(once, leg, checkpoint.to_dict()):
                raise ValueError(f"{where}. Restore it from a copy, or start a new run.")
            found = once
        else:
            found = [parse_line(text, f"{self.folder / leg.folder / CHECKPOINT}") for text in checkpoint.lines]
        self.watch.warn(f"{where}. It was repaired from the checkpoint.")
        return found

    def _open(self, leg: Leg, turn: Turn) -> Trainer:
        with self.ranks.in_step():
            trainer, begun = self._made(leg, turn)
        trainer.match()
        if not begun:
            self._save(trainer)
        return trainer

    def _made(self, leg: Leg, turn: Turn) -> tuple[Trainer, bool]:
        """The trainer of a leg, and whether it continues a checkpoint."""
        checkpoint = self._reached(leg, turn.restart)
        if checkpoint is not None:
            try:
                return Trainer(self.plan, leg, turn.engine or checkpoint.engine, checkpoint), True
            except DamagedError as error:
                if not turn.restart:
                    raise self._with_restart(leg, error) from error
                self._start_again(leg, error)
                with self.held.writing():
                    self.metrics.drop(leg, after=0)
        return Trainer(self.plan, leg, turn.engine), False

    def _save(self, trainer: Trainer) -> None:
        lines = tuple(map(to_text, self.metrics.of(trainer.leg, trainer.position.epoch)))
        checkpoint = replace(trainer.checkpoint(), lines=lines)
        with self._writing() as writes:
            if writes:
                write_checkpoint(self.folder / trainer.leg.folder, checkpoint)

    def _train(self, trainer: Trainer, legs_after: int) -> None:
        pace, saved = Pace(), time.monotonic()
        while not trainer.finished:
            while not (trainer.epoch_done or trainer.all_diverged):
                n = min(pace.n, self.plan.iterations - trainer.position.iteration)
                before, known = time.perf_counter(), len(trainer.diverged)
                counts = trainer.advance(n)
                pace.took(n, time.perf_counter() - before)
                self._tell_divergence(trainer, known)
                self.watch.progress(_progress(trainer, counts, pace, legs_after))
                due = time.monotonic() - saved > self.plan.settings.checkpoint_every
                pace.n, due = self._agree(pace.n, due)
                self._stop_if_asked(trainer)
                if due:
                    self._save(trainer)
                    saved = time.monotonic()
            self._close_epoch(trainer, pace, legs_after)
            saved = time.monotonic()
            self._agree()
            if not trainer.finished:
                self._stop_if_asked(trainer, save=False)

    def _agree(self, n: int = 1, flag: bool = False) -> tuple[int, bool]:
        """Take over rank 0's number and flag, and a signal that any rank has received. All ranks call this together."""
        if not self.ranks.several:
            return n, flag
        own = (n, flag) if self.ranks.leads else (0, False)
        heard, n_first, flag_first = map(
            int, self.ranks.largest([float(self.interruption.signal or 0), *map(float, own)])
        )
        self.agreed = heard or None
        return n_first, bool(flag_first)

    @property
    def _asked(self) -> bool:
        """Whether to stop: among several ranks, as they last agreed."""
        return self.agreed is not None if self.ranks.several else self.interruption.requested

    def _close_epoch(self, trainer: Trainer, pace: Pace, legs_after: int) -> None:
        def between() -> None:
            self._agree()
            if self._asked:
                raise _PutOff

        counts = trainer.counts()
        try:
            lines = trainer.end_epoch(between)
        except _PutOff:
            self._stop_if_asked(trainer)
            raise AssertionError("a postponed measurement stops the run") from None
        with self.ranks.in_step():
            self._measure(trainer, lines)
            with self.held.writing():
                self.metrics.append(lines)
        self._stop_early(trainer)
        # First the copies: an epoch is never trained again once it is saved.
        self._keep(trainer)
        self._save(trainer)
        trained = [line for line in lines if line["epoch"] == lines[0]["epoch"]]
        self._point_to_doctor(trainer)
        if len(lines) > len(trained):
            self._tell_repeated(trained[0], lines[-1]["epoch"])
        self.watch.epoch(trained, _progress(trainer, counts, pace, legs_after))
        self._look_at_precision(trained)

    def _tell_whether_bits_repeat(self, trainer: Trainer) -> None:
        """Only torch's own operations on a GPU may add in another order from run to run."""
        if trainer.engine.reference and self.plan.settings.device != "cpu" and not self.plan.settings.deterministic:
            self.watch.note(
                f"The engine {trainer.engine.name} on {self.plan.settings.device} does not repeat every bit; with "
                "deterministic=True (--deterministic) it does, and is slower."
            )

    def _look_at_precision(self, lines: list[Line]) -> None:
        """Warn if lower precision turns the update away from float32's; raise if it points away from it."""
        for line in lines:
            guard = line.get("precision")
            if guard is None:
                continue
            # None: one of the two updates is zero, and the other is not.
            cosine = _or_zero(guard["with_float32"]["whole"]["cosine"])
            if cosine >= GUARD:
                continue
            parts = {name: _or_zero(one["cosine"]) for name, one in guard["with_float32"]["parameters"].items()}
            worst = min(parts, key=lambda name: parts[name])
            where = (
                f"{line['estimator']} epoch {line['epoch']}, trial {line['trial']}: in {guard['declared']} the update "
                f"has a cosine of {cosine:.3f} with float32's, {parts[worst]:.3f} for {worst}"
            )
            if not cosine > 0.0:
                raise ValueError(
                    f"{where}: it points away. Train with precision float32, or a larger beta. The run is saved."
                )
            self.watch.warn(f"{where}; expected {GUARD} or more. A larger beta, or precision float32, mends that.")

    def _measure(self, trainer: Trainer, lines: list[Line]) -> None:
        """Add the watch's own metrics to the lines."""
        for trial in {line["trial"] for line in lines}:
            own = [line for line in lines if line["trial"] == trial]
            with trainer.averaged():
                found = self.watch.measure(*trainer.trial(trial), own[0])
            clash = next((name for name in found if name in own[0] or name in RESERVED), None)
            if clash is not None:
                raise ValueError(f"The watch measures {clash!r}, a name that runs use themselves. Rename it.")
            for line in own:
                line.update({name: float(value) for name, value in found.items()})

    def _stop_early(self, trainer: Trainer) -> None:
        lines = self.metrics.of(trainer.leg, trainer.position.epoch)
        patience = self.plan.settings.patience
        reason = self.watch.stop(lines) or (EarlyStopping(patience).stop(lines) if patience else None)
        _, ends = self._agree(flag=reason is not None)
        if ends and not trainer.finished:
            trainer.ended = True
            self.watch.warn(f"{trainer.leg.estimator} ends early after epoch {trainer.position.epoch}: {reason}.")

    def _keep(self, trainer: Trainer) -> None:
        """Keep copies of the checkpoint: the best so far, and every few epochs."""
        settings, epoch = self.plan.settings, trainer.position.epoch
        place = self.folder / trainer.leg.folder
        means = epoch_means(self.metrics.of(trainer.leg, epoch), "test_error")
        best = settings.keep_best and epoch in means and means[epoch] == min(means.values())
        due = bool(settings.keep_every and epoch % settings.keep_every == 0)
        if not (best or due):
            return
        checkpoint = trainer.checkpoint()
        with self._writing() as writes:
            if writes and best:
                write_checkpoint(place / BEST, checkpoint)
            if writes and due:
                write_checkpoint(place / kept(epoch), checkpoint)

    def _stop_if_asked(self, trainer: Trainer, save: bool = True) -> None:
        if not self._asked:
            return
        if save:
            self._save(trainer)
        place, again = trainer.position, command("resume", self.folder, *self._own_model())
        raise Stopped(
            f"Stopped and saved: {trainer.leg.estimator}, {counted(place.epoch, 'epoch')} and "
            f"{counted(place.iteration, 'iteration')} done. Continue with: {again}",
            128 + self.agreed if self.agreed else self.interruption.exit_code,
        )

    def _tell_repeated(self, line: Line, until: int) -> None:
        self.watch.warn(
            f"{line['estimator']} epoch {line['epoch']} changed no weight: every mini-batch has a zero gradient. "
            f"Epochs up to {until} would do the same and are skipped; only the last is trained. If the errors are "
            "large, the outputs are silent: try --output-bias 0.1 --output-scale 0.1, or ask "
            f"{command('doctor', self.folder, *self._own_model())}."
        )

    def _tell_divergence(self, trainer: Trainer, known: int) -> None:
        for trial, d in list(trainer.diverged.items())[known:]:
            others = counted(len(trainer.leg.trials) - len(trainer.diverged), "other trial")
            self.watch.warn(
                f"{trainer.leg.estimator}, trial {trial} was stopped at epoch {d.epoch}, iteration {d.iteration}: "
                f"{d.reason} Its last good checkpoint is kept; still training: {others}."
            )

    def _point_to_doctor(self, trainer: Trainer) -> None:
        """Once per leg, if some trial does not go as a healthy one does."""
        leg = trainer.leg
        if leg in self._pointed:
            return
        lines = self.metrics.of(leg, trainer.position.epoch)
        labelled = self.plan.images.labelled
        chance = 100.0 * (1.0 - 1.0 / max(self.plan.images.classes, 1)) if labelled else 100.0
        for trial in leg.trials:
            own = [line for line in lines if line["trial"] == trial and not line["repeated"]]
            if not own or own[-1]["diverged"] is not None:
                continue
            concern = Course(own, self.plan.iterations, chance, trainer.moved, labelled).concern()
            if concern is not None:
                self._pointed.add(leg)
                which = ("--estimator", leg.estimator, "--trial", trial, *self._own_model())
                self.watch.warn(
                    f"{leg.estimator} epoch {own[-1]['epoch']}, trial {trial}: {concern}. Find out why: "
                    f"{command('doctor', self.folder, *which)}"
                )
                return

    def _own_model(self) -> tuple[str, ...]:
        """The option that names a run's own network: its folder does not."""
        net = self.plan.experiment.architecture
        return ("--model", net.source) if isinstance(net, OwnNet) and is_own(net.source) else ()


def _bare(checkpoint: Checkpoint | None) -> Checkpoint | None:
    return None if checkpoint is None else replace(checkpoint, weights={}, optimizer={}, start={}, average={})


def _or_zero(cosine: float | None) -> float:
    return 0.0 if cosine is None else cosine


def _progress(trainer: Trainer, counts: dict[str, list[float]], pace: Pace, legs_after: int) -> Progress:
    plan = trainer.plan
    errors = tuple(
        None if trial in trainer.diverged or not samples or not plan.images.labelled else 100.0 * wrong / samples
        for trial, wrong, samples in zip(trainer.leg.trials, counts["errors"], counts["samples"], strict=True)
    )
    place = trainer.position
    done = place.epoch * plan.iterations + place.iteration
    total = plan.experiment.epochs * plan.iterations
    # Measured over the leg so far, including evaluation; later legs are assumed to take as long.
    each = trainer.seconds / max(done, 1)
    left = each * (total - done + legs_after * total)
    return Progress(place.epoch, place.iteration, errors, pace.per_second, left, each * total)

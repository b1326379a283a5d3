"""The training loop: legs, epochs and chunks, with checkpoints in between; it can stop after any chunk."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from eqprop.engines import Tally
from eqprop.engines.base import fixed_algorithms
from eqprop.messages import command
from eqprop.run.checkpoint import (
    BEST,
    Checkpoint,
    DamagedError,
    Head,
    checkpoint_file,
    kept,
    read_checkpoint,
    write_checkpoint,
)
from eqprop.run.folder import note_session, saving, sessions
from eqprop.run.log import RESERVED, Line, Log
from eqprop.run.own import OwnNet, is_own
from eqprop.run.session import Leg, Session
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
    """Raised to postpone measuring to the next process."""


@dataclass(frozen=True)
class Scope:
    """What one process trains of a run.

    engine      use it instead of the recorded one
    only        train only these estimators
    earlier     numbers of epochs after which the run was complete before they were raised
    """

    engine: str | None = None
    only: Sequence[str] | None = None
    earlier: tuple[int, ...] = ()


class Loop:
    """Trains a session in a run folder and reports to a watch.

    Among several ranks, which divide each mini-batch, all run this loop in step: rank 0 writes, and decides what
    depends on time or on the user; the others follow.
    """

    def __init__(self, session: Session, folder: Path, watch: Watch, interruption: Interruption) -> None:
        self.session, self.folder, self.watch, self.interruption = session, folder, watch, interruption
        self.spec = session.spec
        self.ranks = session.ranks
        self.log = Log(folder, writes=self.ranks.leads)
        self.legs = session.legs()
        self.reached: dict[Leg, Head] = {}
        """Where each leg that was begun has come to."""
        self._pointed: set[Leg] = set()
        self._drowned: set[Leg] = set()
        self.agreed: int | None = None

    def run(self, entry: dict[str, Any], scope: Scope) -> None:
        """Train every unfinished leg. Raises Stopped after a signal.

        `entry` is written to the environment, with the engine of each estimator.
        """
        left = self._unfinished(scope)
        before = sessions(self.folder)
        for n, leg in enumerate(left):
            trainer = self._open(leg, scope)
            entry["engines"][leg.estimator] = trainer.engine.name
            with self._writing() as writes:
                if writes:
                    note_session(self.folder, before, entry)
            self.watch.begin_leg(leg, trainer.engine.name, trainer.position.epoch)
            trainer.engine.notice = self.watch.note
            for sentence in trainer.model.notices():
                self.watch.note(sentence)
            if trainer.engine.remark:
                self.watch.note(trainer.engine.remark)
            self._tell_whether_bits_repeat(trainer)
            with fixed_algorithms(self.spec.run.deterministic):
                self._train(trainer, len(left) - n - 1)

    def _unfinished(self, scope: Scope) -> list[Leg]:
        """The wanted legs that are not finished, with the log cut to their checkpoints."""
        with self.ranks.in_step():
            # Without the tensors, which are read again one leg at a time.
            read = {leg: self._read(leg) for leg in self.legs}
            self.reached = {leg: checkpoint.head for leg, checkpoint in read.items() if checkpoint is not None}
        with self.ranks.in_step(), saving(self.folder):
            self.log.cut(self.reached)
        wanted = [leg for leg in self.legs if scope.only is None or leg.estimator in scope.only]
        return [leg for leg in wanted if not self._is_finished(leg, scope)]

    def _is_finished(self, leg: Leg, scope: Scope) -> bool:
        head = self.reached.get(leg)
        if head is None or not head.finished:
            return False
        epoch = head.position.epoch
        if epoch >= self.spec.optimizer.epochs or len(head.diverged) == len(leg.trials):
            return True
        # It may end early with the very epoch that was its last.
        lines, patience = self.log.of(leg, epoch), self.spec.run.patience
        early = epoch not in scope.earlier or (patience and EarlyStopping(patience).stop(lines) is not None)
        if early and scope.earlier:
            self.watch.note(f"{leg.folder} ended early after epoch {epoch}, as it would have in a longer run.")
        return bool(early)

    @contextmanager
    def _writing(self) -> Iterator[bool]:
        """Wrap every write: yields whether this rank writes. Where that fails, every rank raises."""
        with self.ranks.in_step(), saving(self.folder):
            yield self.ranks.leads

    def _read(self, leg: Leg) -> Checkpoint | None:
        """The verified checkpoint of a leg, None if it has not started. Raises if it is lost, damaged or another's."""
        place = self.folder / leg.folder
        path = checkpoint_file(place)
        try:
            if not path.exists():
                self._check_not_lost(leg)
                return None
            checkpoint = read_checkpoint(place)
            self._check_fits(leg, checkpoint)
        except DamagedError as error:
            raise _with_remedy(error, place) from error
        if checkpoint.run != self.session.identity:
            raise ValueError(
                f"{path} does not match experiment.json. One of them was changed or copied from another run: restore "
                "it, or start a new run."
            )
        return checkpoint

    def _check_fits(self, leg: Leg, checkpoint: Checkpoint) -> None:
        position, trials = checkpoint.position, len(leg.trials)
        known = checkpoint.tally.keys() == set(Tally.names()) and all(
            len(counts) == trials for counts in checkpoint.tally.values()
        )
        if not known or position.epoch > self.spec.optimizer.epochs or position.iteration > self.session.iterations:
            raise DamagedError(
                f"{checkpoint_file(self.folder / leg.folder)} does not fit its run of "
                f"{counted(self.spec.optimizer.epochs, 'epoch')} and {counted(trials, 'trial')}. Restore it from a "
                "copy."
            )

    def _check_not_lost(self, leg: Leg) -> None:
        """Raise if a leg without a checkpoint was trained, unless its folder was deleted to train it again."""
        place = self.folder / leg.folder
        lines = self.log.of(leg, self.spec.optimizer.epochs)
        if place.is_dir() and lines:
            raise DamagedError(
                f"{checkpoint_file(place)} is missing, but {leg.estimator} was trained: {counted(len(lines), 'line')} "
                f"of metrics {'remains' if len(lines) == 1 else 'remain'}. Restore it from a copy."
            )

    def _open(self, leg: Leg, scope: Scope) -> Trainer:
        with self.ranks.in_step():
            checkpoint = self._read(leg)
            try:
                trainer = Trainer(self.session, leg, scope.engine, checkpoint)
            except DamagedError as error:
                raise _with_remedy(error, self.folder / leg.folder) from error
        trainer.match()
        if checkpoint is None:
            self._save(trainer)
        return trainer

    def _save(self, trainer: Trainer) -> None:
        checkpoint = trainer.checkpoint()
        with self._writing() as writes:
            if writes:
                write_checkpoint(self.folder / trainer.leg.folder, checkpoint)
        self.reached[trainer.leg] = checkpoint.head

    def _train(self, trainer: Trainer, legs_after: int) -> None:
        pace, saved = Pace(), time.monotonic()
        while not trainer.finished:
            while not (trainer.epoch_done or trainer.all_diverged):
                n = min(pace.n, self.session.iterations - trainer.position.iteration)
                before, known = time.perf_counter(), len(trainer.diverged)
                counts = trainer.advance(n)
                pace.took(n, time.perf_counter() - before)
                self._tell_divergence(trainer, known)
                self.watch.progress(_progress(trainer, counts, pace, legs_after))
                due = time.monotonic() - saved > self.spec.run.checkpoint_every
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
            with saving(self.folder):
                self.log.append(lines)
        self._stop_early(trainer)
        # First the copies: an epoch is never trained again once it is saved.
        self._keep(trainer)
        self._save(trainer)
        self._point_to_doctor(trainer)
        self._look_at_epsilon(trainer)
        self.watch.epoch(lines, _progress(trainer, counts, pace, legs_after))
        self._look_at_precision(lines)

    def _tell_whether_bits_repeat(self, trainer: Trainer) -> None:
        """Only torch's own operations on a GPU may add in another order from run to run."""
        if trainer.engine.reference and self.spec.run.device != "cpu" and not self.spec.run.deterministic:
            self.watch.note(
                f"The engine {trainer.engine.name} on {self.spec.run.device} does not repeat every bit; with "
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
            self.watch.warn(f"{where}; expected {GUARD} or more. A larger beta, or precision float32, fixes that.")

    def _measure(self, trainer: Trainer, lines: list[Line]) -> None:
        """Add the watch's own metrics to the lines."""
        for line in lines:
            with trainer.averaged():
                found = self.watch.measure(*trainer.trial(line["trial"]), line)
            clash = next((name for name in found if name in line or name in RESERVED), None)
            if clash is not None:
                raise ValueError(f"The watch measures {clash!r}, a name that runs use themselves. Rename it.")
            line.update({name: float(value) for name, value in found.items()})

    def _stop_early(self, trainer: Trainer) -> None:
        lines = self.log.of(trainer.leg, trainer.position.epoch)
        patience = self.spec.run.patience
        reason = self.watch.stop(lines) or (EarlyStopping(patience).stop(lines) if patience else None)
        _, ends = self._agree(flag=reason is not None)
        if ends and not trainer.finished:
            trainer.ended = True
            self.watch.warn(f"{trainer.leg.estimator} ends early after epoch {trainer.position.epoch}: {reason}.")

    def _keep(self, trainer: Trainer) -> None:
        """Keep copies of the checkpoint: the best so far, and every few epochs."""
        run, epoch = self.spec.run, trainer.position.epoch
        place = self.folder / trainer.leg.folder
        means = epoch_means(self.log.of(trainer.leg, epoch), "test_error")
        best = run.keep_best and epoch in means and means[epoch] == min(means.values())
        due = bool(run.keep_every and epoch % run.keep_every == 0)
        if not (best or due):
            return
        checkpoint = trainer.checkpoint()
        with self._writing() as writes:
            if writes and best:
                write_checkpoint(place, checkpoint, BEST)
            if writes and due:
                write_checkpoint(place, checkpoint, kept(epoch))

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
        lines = self.log.of(leg, trainer.position.epoch)
        labelled = self.session.images.labelled
        chance = 100.0 * (1.0 - 1.0 / max(self.session.images.classes, 1)) if labelled else 100.0
        for trial in leg.trials:
            own = [line for line in lines if line["trial"] == trial]
            if not own or own[-1]["diverged"] is not None:
                continue
            concern = Course(own, self.session.iterations, chance, trainer.moved, labelled).concern()
            if concern is not None:
                self._pointed.add(leg)
                which = ("--estimator", leg.estimator, "--trial", trial, *self._own_model())
                self.watch.warn(
                    f"{leg.estimator} epoch {own[-1]['epoch']}, trial {trial}: {concern}. Find out why: "
                    f"{command('doctor', self.folder, *which)}"
                )
                return

    def _look_at_epsilon(self, trainer: Trainer) -> None:
        """Warn once per leg of updates so small that the optimizer's epsilon holds them back."""
        found = [] if trainer.leg in self._drowned else trainer.drowned()
        if not found:
            return
        self._drowned.add(trainer.leg)
        sizes = ", ".join(f"{name} ({size:.0e})" for name, size in found[:4])
        self.watch.warn(
            f"{trainer.leg.estimator} epoch {trainer.position.epoch}: the optimizer's epsilon is above a tenth of the "
            f"gradients of {counted(len(found), 'parameter')}: {sizes}{', ...' if len(found) > 4 else ''}. It holds "
            f"them back. Give --optimizer-option eps={0.01 * found[0][1]:.0e}, or use --optimizer Lion at a tenth of "
            "the rates."
        )

    def _own_model(self) -> tuple[str, ...]:
        """The option that names a run's own network: its folder does not."""
        net = self.spec.model
        return ("--model", net.function) if isinstance(net, OwnNet) and is_own(net.function) else ()


def _with_remedy(error: DamagedError, place: Path) -> DamagedError:
    return DamagedError(f"{error} Or delete {place} to train that estimator again. Nothing has been changed.")


def _or_zero(cosine: float | None) -> float:
    return 0.0 if cosine is None else cosine


def _progress(trainer: Trainer, counts: dict[str, list[float]], pace: Pace, legs_after: int) -> Progress:
    session = trainer.session
    errors = tuple(
        None if trial in trainer.diverged or not samples or not session.images.labelled else 100.0 * wrong / samples
        for trial, wrong, samples in zip(trainer.leg.trials, counts["errors"], counts["samples"], strict=True)
    )
    place = trainer.position
    done = place.epoch * session.iterations + place.iteration
    total = session.spec.optimizer.epochs * session.iterations
    # Measured over the leg so far, including evaluation; later legs are assumed to take as long.
    each = trainer.seconds / max(done, 1)
    left = each * (total - done + legs_after * total)
    return Progress(place.epoch, place.iteration, errors, pace.per_second, left, each * total)

"""The training loop: legs, epochs and chunks, with checkpoints in between; it can stop after any chunk."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from eqprop.training.checkpoint import Checkpoint, has_checkpoint, read_checkpoint, write_checkpoint
from eqprop.training.folder import explain_full_disk, note_session, sessions
from eqprop.training.metrics import Line, Metrics
from eqprop.training.plan import Leg, Plan
from eqprop.training.trainer import Trainer
from eqprop.training.watch import Progress, Watch, counted


class Stopped(KeyboardInterrupt):
    """Raised after a signal, once the run is saved. `exit_code` is the shell's: 130 for SIGINT, 143 for SIGTERM."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interruption:
    """Graceful shutdown: inside the block, SIGINT and SIGTERM only set `signal`; a second Ctrl-C interrupts at once.

    Does nothing outside the main thread, where Python allows no handlers.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._wish)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _wish(self, number: int, frame: FrameType | None) -> None:
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


class Loop:
    """Trains a plan in a run folder and reports to a watch."""

    def __init__(self, plan: Plan, folder: Path, watch: Watch, interruption: Interruption) -> None:
        self.plan, self.folder, self.watch, self.interruption = plan, folder, watch, interruption
        self.metrics = Metrics(folder)
        self.legs = plan.legs()

    def run(self, session: dict[str, Any], engine: str | None = None, only: Sequence[str] | None = None) -> None:
        """Train every unfinished leg. Raises Stopped after a signal.

        `session` is written to the environment, with the engine of each estimator. `engine` replaces the one a leg
        started with. `only` selects estimators.
        """
        self._drop_later_lines()
        before = sessions(self.folder)
        wanted = [leg for leg in self.legs if only is None or leg.estimator in only]
        left = [leg for leg in wanted if not self._is_finished(leg)]
        for n, leg in enumerate(left):
            trainer = self._open(leg, engine)
            session["engines"][leg.estimator] = trainer.engine.name
            try:
                note_session(self.folder, before, session)
            except OSError as error:
                raise explain_full_disk(self.folder, error) from error
            self.watch.begin_leg(leg, trainer.engine.name, trainer.position.epoch)
            self._train(trainer, len(left) - n - 1)

    def _is_finished(self, leg: Leg) -> bool:
        place = self.folder / leg.folder
        return has_checkpoint(place) and read_checkpoint(place).finished

    def _drop_later_lines(self) -> None:
        """Drop metrics newer than the checkpoints, which training writes again. Verifies every checkpoint first."""
        reached = {}
        for leg in self.legs:
            place = self.folder / leg.folder
            checkpoint = self._read(place) if has_checkpoint(place) else None
            for trial in leg.trials:
                reached[leg.estimator, trial] = 0 if checkpoint is None else checkpoint.position.epoch
        self.metrics.keep(lambda line: line["epoch"] <= reached.get((line["estimator"], line["trial"]), 0))

    def _open(self, leg: Leg, engine: str | None) -> Trainer:
        place = self.folder / leg.folder
        if not has_checkpoint(place):
            trainer = Trainer(self.plan, leg, engine)
            self._save(trainer)
            return trainer
        checkpoint = self._read(place)
        return Trainer(self.plan, leg, engine or checkpoint.engine, checkpoint)

    def _read(self, place: Path) -> Checkpoint:
        checkpoint = read_checkpoint(place)
        if checkpoint.run != self.plan.identity:
            raise ValueError(
                f"The checkpoint in {place} does not match experiment.json. One of them was changed or copied from "
                "another run: restore it, or start a new run."
            )
        return checkpoint

    def _save(self, trainer: Trainer) -> None:
        try:
            write_checkpoint(self.folder / trainer.leg.folder, trainer.checkpoint())
        except OSError as error:
            raise explain_full_disk(self.folder, error) from error

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
                self._stop_if_asked(trainer)
                if time.monotonic() - saved > self.plan.settings.checkpoint_every:
                    self._save(trainer)
                    saved = time.monotonic()
            self._close_epoch(trainer, pace, legs_after)
            saved = time.monotonic()
            if not trainer.finished:
                self._stop_if_asked(trainer, save=False)

    def _close_epoch(self, trainer: Trainer, pace: Pace, legs_after: int) -> None:
        def between() -> None:
            if self.interruption.requested:
                raise _PutOff

        counts = trainer.runner.tally.read()
        try:
            lines = trainer.end_epoch(between)
        except _PutOff:
            self._stop_if_asked(trainer)
            raise AssertionError("a postponed measurement stops the run") from None
        try:
            self.metrics.append(lines)
        except OSError as error:
            raise explain_full_disk(self.folder, error) from error
        self._save(trainer)
        trained = [line for line in lines if line["epoch"] == lines[0]["epoch"]]
        self._warn_unsettled(trained, trainer.model.bipartite)
        if len(lines) > len(trained):
            self._tell_repeated(trained[0], lines[-1]["epoch"])
        self.watch.epoch(trained, _progress(trainer, counts, pace, legs_after))

    def _stop_if_asked(self, trainer: Trainer, save: bool = True) -> None:
        if not self.interruption.requested:
            return
        if save:
            self._save(trainer)
        place = trainer.position
        raise Stopped(
            f"Stopped and saved: {trainer.leg.estimator}, {counted(place.epoch, 'epoch')} and "
            f"{counted(place.iteration, 'iteration')} done. Continue with: eqprop resume {self.folder}",
            self.interruption.exit_code,
        )

    def _tell_repeated(self, line: Line, until: int) -> None:
        self.watch.warn(
            f"{line['estimator']} epoch {line['epoch']} changed no weight: every mini-batch has a zero gradient. "
            f"Epochs up to {until} would do the same and are skipped; only the last is trained. If the errors are "
            "large, the outputs are silent: try --output-bias 0.1 --output-scale 0.1."
        )

    def _tell_divergence(self, trainer: Trainer, known: int) -> None:
        for trial, d in list(trainer.diverged.items())[known:]:
            others = counted(len(trainer.leg.trials) - len(trainer.diverged), "other trial")
            self.watch.warn(
                f"{trainer.leg.estimator}, trial {trial} was stopped at epoch {d.epoch}, iteration {d.iteration}: "
                f"{d.reason} Its last good checkpoint is kept; still training: {others}."
            )

    def _warn_unsettled(self, lines: list[Line], bipartite: bool) -> None:
        shares = [line["unsettled"] for line in lines if line["unsettled"]]
        if shares:
            worst = max(line["residual_worst"] for line in lines if line["unsettled"])
            other = bipartite and self.plan.experiment.schedule == "synchronous"
            advice = "Raise T, or try --schedule alternating." if other else "Raise T."
            self.watch.warn(
                f"{lines[0]['estimator']} epoch {lines[0]['epoch']}: {100 * sum(shares) / len(lines):.2g} % of the "
                f"free phases had not settled (worst residual {worst:.2g}). {advice}"
            )


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

"""`Machine`: a system that can only be written to, left to settle and read; EP trains it, and the work is counted."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from eqprop.cost import Nudge, Problem
from eqprop.dynamics import Drive, Dynamics, PrimitiveDynamics
from eqprop.estimators import EP
from eqprop.gdu.verdict import Diagnosis, Voice
from eqprop.messages import shown
from eqprop.physical.examination import examine_machine
from eqprop.relax import Phase, Relaxation, settled_below
from eqprop.state import State, distance


@dataclass(frozen=True)
class Abilities:
    """What a machine declares that it can do.

    signs       of beta that its nudge can take; symmetric nudging needs both
    continues   whether it can settle from a state that is given to it, as the nudged phase would from the free one
    """

    signs: tuple[int, ...] = (1, -1)
    continues: bool = True


@dataclass(frozen=True)
class Reading:
    """What a machine read of each sample once it had settled.

    state       one tensor per layer, (B, n), the output first
    residual    how far each sample is from rest, if the machine knows, (B,); else it is asked of the model
    runs        how often the machine settled and was read for it; None: once per sample
    """

    state: State
    residual: Tensor | None = None
    runs: int | None = None


@dataclass
class Work:
    """The physical work of a machine.

    settles         samples settled
    reads           samples read
    writes          times that its weights were written
    calibrations    times that it was calibrated
    """

    settles: int = 0
    reads: int = 0
    writes: int = 0
    calibrations: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        return ", ".join(f"{n} {name}" for name, n in self.to_dict().items())


class Machine(PrimitiveDynamics):
    """A system in the loop: dL/dtheta = -(1/beta) (dPhi/dtheta(s^beta) - dPhi/dtheta(s^0))  [eq:ep-grad], both states
    read from it, Phi that of the network it is meant to be.

    A subclass writes weights, lets the system settle, and reads it:

        class Board(Machine):
            abilities = Abilities(signs=(1, -1), continues=True)

            def write(self, theta):
                send(theta["W01"], theta["b0"])

            def settle(self, x, nudge=None, start=None):
                apply(x, None if nudge is None else (nudge.y, nudge.beta))
                return Reading((read_outputs(), read_hidden()))

        board = Board(model)
        EP(1, 1, 0.1, "symmetric").backward(board, cost, x, y)

    model   the network it is meant to be: it gives names and first values of the parameters, which are shared with it,
            the shapes of its layers, and the updates that follow from what is read. It is not run.

    It trains, evaluates and is examined like any model, on the engine `eager`. T and K mean nothing to it. Weights are
    written when they have changed. `work` counts what was asked of it.
    """

    abilities: Abilities = Abilities()

    def __init__(self, model: PrimitiveDynamics) -> None:
        super().__init__()
        if not isinstance(model, PrimitiveDynamics):
            raise TypeError(
                f"A machine was given a {type(model).__name__}; expected the network that it is meant to be, with a "
                "primitive or an energy, of which its updates follow. Build one with eqprop.from_energy, or take one "
                "of eqprop.models."
            )
        object.__setattr__(self, "model", model)  # not a submodule: parameters would have two names
        for name, p in model.named_parameters():
            if "." in name:
                raise ValueError(f"The parameter {name} of {model.title} is that of a module in it; expected its own.")
            self.register_parameter(name, p)
        self.work = Work()
        self._written: dict[str, Tensor] = {}
        self.input_shape, self.networks = model.input_shape, model.networks
        self.nudge_scale, self.nudge_site = model.nudge_scale, model.nudge_site
        self.bipartite, self.least_curvature = model.bipartite, model.least_curvature
        if model.networks is not None:
            raise ValueError(f"{model.title} is {model.networks} stacked networks; a machine is one. Unstack it.")

    model: PrimitiveDynamics

    @abstractmethod
    def write(self, theta: Mapping[str, Tensor]) -> None:
        """Bring the parameters, by name, into the machine."""
        raise NotImplementedError(f"{self.title} must define write(theta), which sets its weights.")

    @abstractmethod
    def settle(self, x: Tensor, nudge: Nudge | None = None, start: State | None = None) -> Reading:
        """Let every sample of x (B, ...) settle, and read it.

        nudge   None, or what pulls the outputs: towards nudge.y (B, n) with strength nudge.beta, a number
        start   the state to settle from, if the machine declares that it can
        """
        raise NotImplementedError(f"{self.title} must define settle(x, nudge, start), which returns a Reading.")

    def program(self) -> None:
        """Write the parameters if they are not those that were written last."""
        theta = {name: p.detach() for name, p in self.named_parameters()}
        same = self._written.keys() == theta.keys() and all(
            torch.equal(value, self._written[name]) for name, value in theta.items()
        )
        if not same:
            self.write(theta)
            self.work.writes += 1
            # Again from the parameters: a machine that cannot take every value may have moved them.
            self._written = {name: p.detach().clone() for name, p in self.named_parameters()}

    def relaxation(
        self, x: Tensor, phase: Phase, state: State | None, nudge: Nudge | None, keep: int = 0
    ) -> Relaxation:
        if keep:
            raise TypeError(
                f"{self.title} can only be read at rest, so it has no states before the last. Train it by EP; BPTT, "
                "RBP and comparisons step by step need a model."
            )
        self.program()
        start = state if self.abilities.continues else None
        alike = list(self._by_beta(x, nudge))
        parts = [self._read(x[rows], part, _rows(start, rows)) for rows, part in alike]
        order = torch.argsort(torch.cat([rows for rows, _ in alike]))
        found = tuple(torch.cat(layers)[order] for layers in zip(*(part.state for part in parts), strict=True))
        told = [part.residual for part in parts if part.residual is not None]
        residual = torch.cat(told)[order] if len(told) == len(parts) else self._residual(x, nudge, found)
        return Relaxation(found, 1, residual, residual < settled_below(found[0].dtype, phase.tolerance))

    def _by_beta(self, x: Tensor, nudge: Nudge | None) -> Iterator[tuple[Tensor, Nudge | None]]:
        """The samples that are nudged alike, each with their nudge: its beta is a number."""
        everyone = torch.arange(len(x))
        if nudge is None or not isinstance(nudge.beta, Tensor):
            yield everyone, self._allowed(nudge)
            return
        beta = nudge.beta.flatten().expand(len(x))
        for value in dict.fromkeys(beta.tolist()):
            rows = everyone[beta == value]
            yield rows, self._allowed(replace(nudge, y=nudge.y[rows], beta=value))

    def _allowed(self, nudge: Nudge | None) -> Nudge | None:
        if nudge is not None:
            assert not isinstance(nudge.beta, Tensor | complex), "a number by now"
            if (1 if nudge.beta > 0 else -1) not in self.abilities.signs:
                raise ValueError(
                    f"{self.title} got a nudge with beta = {nudge.beta:g}, and declares the signs "
                    f"{self.abilities.signs}. Use nudging='one-sided' with a beta of that sign."
                )
        return nudge

    def _read(self, x: Tensor, nudge: Nudge | None, start: State | None) -> Reading:
        reading = self.settle(x, nudge, start)
        expected = [tuple(v.shape) for v in self.model.init_state(x)]
        if not isinstance(reading, Reading) or [tuple(v.shape) for v in reading.state] != expected:
            got = [tuple(v.shape) for v in reading.state] if isinstance(reading, Reading) else shown(reading)
            raise ValueError(
                f"{self.title} read {got}; expected a Reading with layers of shapes {expected}, the output first."
            )
        runs = len(x) if reading.runs is None else reading.runs
        self.work.settles += runs
        self.work.reads += runs
        state = tuple(v.to(like) for v, like in zip(reading.state, self.model.init_state(x), strict=True))
        if not all(bool(torch.isfinite(v).all()) for v in state):
            raise ValueError(f"{self.title} read numbers that are not finite; expected voltages, spins or the like.")
        return replace(reading, state=state)

    @torch.no_grad()
    def _residual(self, x: Tensor, nudge: Nudge | None, s: State) -> Tensor:
        """How far a step of the model would move what was read; no work of the machine."""
        return distance(one_step(self.model, x, s, nudge), s, self.sample_dims(x))

    def examined(self, problem: Problem, ep: EP, voice: Voice) -> Diagnosis:
        return examine_machine(self, problem, ep, voice)

    def init_state(self, x: Tensor) -> State:
        return self.model.init_state(x)

    def primitive(self, x: Tensor, s: State) -> Tensor:
        return self.model.primitive(x, s)

    def contrast(self, x: Tensor, s_plus: State, s_minus: State) -> dict[str, Tensor]:
        return self.model.contrast(x, s_plus, s_minus)

    def drive(self, x: Tensor) -> Drive:
        return self.model.drive(x)

    def step(self, drive: Drive, s: State, push: Sequence[Tensor | None] | None = None) -> State:
        return self.model.step(drive, s, push)

    def constrained(self) -> dict[str, Tensor]:
        return self.model.constrained()

    def check_nudge(self, beta: float) -> None:
        self.model.check_nudge(beta)

    def notices(self) -> tuple[str, ...]:
        return self.model.notices()

    @property
    def layer_parameters(self) -> Any:
        return self.model.layer_parameters

    @property
    def layer_names(self) -> tuple[str, ...] | None:
        return self.model.layer_names

    def _apply(self, fn: Any, recurse: bool = True) -> Machine:
        super()._apply(fn, recurse)
        self.model._apply(fn, recurse)
        return self


def one_step(model: Dynamics, x: Tensor, s: State, nudge: Nudge | None) -> State:
    """F(x, s), nudged if there is a nudge."""
    drive = model.drive(x)
    if nudge is None:
        return model.step(drive, s)
    if isinstance(model, PrimitiveDynamics) and model.nudge_site == "implicit":
        target, strength = nudge.implicit(s[0], model.nudge_scale, model.least_curvature)
        return model.implicit_step(drive, s, target, strength)
    return model.step(drive, s, nudge.push(s, dict(model.named_parameters()), model.nudge_scale))


def _rows(s: State | None, rows: Tensor) -> State | None:
    return None if s is None else tuple(v[rows] for v in s)


def question(x: Tensor, nudge: Nudge | None, theta: Mapping[str, Tensor]) -> str:
    """A digest of what a machine is asked: weights, inputs and nudge."""
    found = hashlib.sha256()
    targets = () if nudge is None else (nudge.y, torch.as_tensor(nudge.beta, dtype=torch.float64))
    for v in (x, *targets, *theta.values()):
        found.update(f"{v.dtype} {tuple(v.shape)}".encode())
        found.update(v.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


class Recorded(Machine):
    """A machine whose answers are kept: `save(path)` writes them for `Replay`.

    machine     the machine that answers
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.model)
        self.machine, self.abilities = (machine,), machine.abilities  # in a tuple: not a submodule
        self.log: list[tuple[str, Reading]] = []

    def write(self, theta: Mapping[str, Tensor]) -> None:
        self.machine[0].write(theta)

    def settle(self, x: Tensor, nudge: Nudge | None = None, start: State | None = None) -> Reading:
        reading = self.machine[0].settle(x, nudge, start)
        self.log.append((question(x, nudge, dict(self.named_parameters())), reading))
        return reading

    def save(self, path: str | Path) -> Path:
        """Write an .npz file of every question's digest and the answer to it, in order."""
        arrays: dict[str, Any] = {"questions": np.array(json.dumps([asked for asked, _ in self.log]))}
        for n, (_, reading) in enumerate(self.log):
            arrays |= {f"{n}.s{k}": layer.detach().cpu().numpy() for k, layer in enumerate(reading.state)}
            if reading.residual is not None:
                arrays[f"{n}.residual"] = reading.residual.detach().cpu().numpy()
        with Path(path).open("wb") as stream:
            np.savez_compressed(stream, **arrays)
        return Path(path)


class Replay(Machine):
    """A recorded session, played back: the same questions in the same order get the same answers.

    model       the network that was run
    path        the file that `Recorded.save` wrote
    abilities   what the machine can do; None: as recorded
    """

    def __init__(self, model: PrimitiveDynamics, path: str | Path, abilities: Abilities | None = None) -> None:
        super().__init__(model)
        self.abilities, self.path, self.next = abilities or Abilities(), Path(path), 0
        try:
            with np.load(path, allow_pickle=False) as file:
                self.questions = list(json.loads(str(file["questions"])))
                self.arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "questions"}
        except (ValueError, KeyError, EOFError, OSError, BadZipFile) as error:
            raise ValueError(
                f"{path} is no recorded session ({error}); expected a file that Recorded.save wrote."
            ) from error

    def write(self, theta: Mapping[str, Tensor]) -> None:
        """Nothing: the weights are part of each question."""

    def settle(self, x: Tensor, nudge: Nudge | None = None, start: State | None = None) -> Reading:
        n = self.next
        if n >= len(self.questions):
            raise ValueError(f"{self.path} holds {n} settlings, and one more was asked. Record a longer session.")
        if question(x, nudge, dict(self.named_parameters())) != self.questions[n]:
            raise ValueError(
                f"Settling {n + 1} of {self.path} was recorded for other weights, inputs or nudge. Replay the session "
                "with the seed, data and settings it was recorded with."
            )
        self.next += 1
        layers = tuple(self.arrays[f"{n}.s{k}"] for k in range(len(self.model.init_state(x))))
        return Reading(layers, self.arrays.get(f"{n}.residual"))

"""An Ising machine in the loop: simulated annealing by dwave-samplers, or a sampler of D-Wave."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eqprop.cost import Nudge
from eqprop.physical.machine import Abilities, Machine, Reading
from eqprop.physical.spins import SpinError, Spins
from eqprop.state import State

RISE, HOLD = 10.0, 20.0
"""Of a reverse anneal on a D-Wave machine: microseconds to its turning point, and to its end."""


def annealer() -> Any:
    """The sampler of dwave-samplers; raises ImportError where it is not installed."""
    try:
        return importlib.import_module("dwave.samplers").SimulatedAnnealingSampler()
    except ImportError as error:
        raise ImportError(
            "The Ising machine needs dwave-samplers, which is not installed: python -m pip install 'eqprop[ising]'."
        ) from error


class Ising(Machine):
    """A spin net with an Ising machine as the network: each sample is annealed, and the lowest of the states is read.

    model       its parameters are trained
    sampler     anything that takes dimod's models, such as an EmbeddingComposite of a DWaveSampler; by default the
                simulated annealing of dwave-samplers
    reads       anneals per sample; each counts as a settle and a read
    sweeps      of a simulated anneal, whose temperature falls geometrically over the range that the fields suggest
    fraction    how much of an anneal a nudged phase keeps from the free state: it is annealed in reverse down to that
                share of the schedule, and up again
    field_limit fields of biases, inputs and nudges are cut at it, as they are on the machine
    seed        of simulated anneals, drawn from it and from how many there were
    options     for the sampler, such as chain_strength of a D-Wave machine

    A sample whose free outputs are the target already is not annealed again.
    """

    def __init__(
        self,
        model: Spins,
        sampler: Any = None,
        *,
        reads: int = 10,
        sweeps: int = 100,
        fraction: float = 0.25,
        field_limit: float = 4.0,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, Spins):
            raise TypeError(f"Ising got a {type(model).__name__}; expected an eqprop.physical.spins.Spins.")
        for name, count in (("reads", reads), ("sweeps", sweeps)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"{name} is {count!r}; expected a whole number, 1 or more.")
        if not 0.0 <= fraction < 1.0:
            raise ValueError(f"fraction is {fraction!r}; expected a share of the schedule, from 0 to below 1.")
        if not (math.isfinite(field_limit) and field_limit > 0.0):
            raise ValueError(f"field_limit is {field_limit!r}; expected a positive number.")
        super().__init__(model)
        self.net = (model,)
        self.sampler = annealer() if sampler is None else sampler
        self.reads, self.sweeps, self.fraction, self.seed = reads, sweeps, fraction, seed
        self.field_limit, self.options = field_limit, dict(options or {})
        known = self.sampler.parameters
        self.simulated = "beta_schedule" in known
        self.abilities = Abilities(continues=self.simulated or "anneal_schedule" in known)
        self._couplings: tuple[Any, Any, Any] = (np.empty(0),) * 3

    def __repr__(self) -> str:
        return f"Ising({self.model!r}, {type(self.sampler).__name__})"

    def write(self, theta: Mapping[str, Tensor]) -> None:
        """Dimod minimises E = sum h s + sum J s s, so signs are reversed here."""
        sizes, first = self.net[0].sizes, 0
        rows: list[Any] = []
        columns: list[Any] = []
        values: list[Any] = []
        for n in range(len(sizes) - 2):
            i, j = np.indices((sizes[n], sizes[n + 1]))
            rows.append(first + i.ravel())
            columns.append(first + sizes[n] + j.ravel())
            values.append(-theta[f"W{n}{n + 1}"].double().numpy().ravel())
            first += sizes[n]
        joined = [np.concatenate(each) if each else np.empty(0) for each in (rows, columns, values)]
        self._couplings = joined[0], joined[1], joined[2]

    def settle(self, x: Tensor, nudge: Nudge | None = None, start: State | None = None) -> Reading:
        model = self.net[0]
        with torch.no_grad():
            fields = list(model.fields(model.drive(x)))
            if nudge is not None:
                if not isinstance(nudge.cost, SpinError):
                    raise ValueError(
                        f"{self.title} got a nudge by {nudge.cost.title}; expected an "
                        "eqprop.physical.spins.SpinError, whose nudge is a field on each output."
                    )
                target = nudge.cost.target(nudge.y, fields[0])
                fields[0] = fields[0] + float(nudge.beta) * target  # type: ignore[arg-type]
        h = torch.cat(fields, 1).double().clamp(-self.field_limit, self.field_limit).numpy()
        begun = None if nudge is None or start is None else torch.cat(list(start), 1)
        states, annealed = [], 0
        for k, row in enumerate(h):
            if begun is not None and torch.equal(begun[k, : model.sizes[0]], target[k]):
                states.append(begun[k])
                continue
            first = None if begun is None else begun[k].to(torch.int8).numpy()
            states.append(torch.from_numpy(self._anneal(-row, first, self.work.settles + annealed)).to(x))
            annealed += self.reads
        return Reading(torch.stack(states).split(model.sizes[:-1], dim=1), runs=annealed)

    def _anneal(self, h: Any, first: Any, anneals: int) -> Any:
        """The lowest state that is read."""
        rows, columns, values = self._couplings
        dimod = importlib.import_module("dimod")
        of = dimod.BinaryQuadraticModel.from_numpy_vectors(h, (rows, columns, values), 0.0, dimod.SPIN)
        asked: dict[str, Any] = {"num_reads": self.reads, **self.options}
        if self.simulated:
            asked |= self._simulated(h, first)
            asked["seed"] = int(np.random.SeedSequence((self.seed, anneals)).generate_state(1)[0]) % (2**31 - 1) + 1
        elif first is not None:
            asked |= {
                "anneal_schedule": [[0.0, 1.0], [RISE, self.fraction], [HOLD, 1.0]],
                "initial_state": dict(enumerate(first.tolist())),
                "reinitialize_state": True,
            }
        found = self.sampler.sample(of, **asked)
        lowest = found.record.sample[int(np.argmin(found.record.energy))]
        return lowest[np.argsort(np.array(list(found.variables)))]

    def _simulated(self, h: Any, first: Any) -> dict[str, Any]:
        """The inverse temperatures, one per sweep: from where the largest field turns half of the time to where the
        smallest does in one of a hundred."""
        rows, columns, values = self._couplings
        total = np.abs(h)
        np.add.at(total, rows.astype(int), np.abs(values))
        np.add.at(total, columns.astype(int), np.abs(values))
        sizes = np.abs(np.concatenate([h, values]))
        sizes = sizes[sizes > 0.0]
        least, most = (float(sizes.min()), float(total.max())) if len(sizes) else (1.0, 1.0)
        schedule = np.geomspace(math.log(2.0) / most, math.log(100.0) / least, self.sweeps)
        if first is None:
            return {"beta_schedule_type": "custom", "beta_schedule": schedule}
        back = schedule[int(self.fraction * self.sweeps) :]
        return {
            "beta_schedule_type": "custom",
            "beta_schedule": np.concatenate([back[::-1], back[1:]]),
            "initial_states": np.tile(first, (self.reads, 1)),
        }

"""The fast CPU engine: whole phases and whole training iterations in C, every core busy, Python outside the loop."""

from __future__ import annotations

import ctypes
import functools
import warnings

import torch
from torch import Tensor

from eqprop.cost import Cost, SquaredError
from eqprop.dynamics import Dynamics
from eqprop.engines.base import Engine, Job, Runner, nudges_otherwise
from eqprop.engines.cpu_library import NoLibraryError, library
from eqprop.engines.cpu_nets import net_of, networks_of, refuses_model, unit_of
from eqprop.engines.cpu_runner import CpuRunner
from eqprop.estimators import BPTT, EP, Estimator
from eqprop.relax import Phase, Relaxation, prepare, relax, settled_below
from eqprop.state import State, first_bad_layer


class Cpu(Engine):
    """The paper's nets, the squared error, EP and BPTT, in float32 or float64, on a machine with a C compiler.

    Results do not depend on the number of threads (torch.get_num_threads), bit for bit. With stop="settled" each
    sample leaves its free phase by itself, when it is at a fixed point bit for bit.
    """

    name = "cpu"
    starts = ("zero", "persistent", "initialised")

    def refuses(
        self,
        model: Dynamics,
        cost: Cost | None = None,
        estimator: Estimator | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> str | None:
        return (
            refuses_model(model)
            or _refuses_task(model, cost, estimator)
            or _refuses_machine(unit_of(model), next(model.parameters()).dtype)
        )

    def relaxation(self, model: Dynamics, x: Tensor, phase: Phase, state: State | None = None) -> Relaxation:
        start = prepare(model, x, state, None)
        if not _serves(model, x, phase):
            return relax(model, x, phase, state)
        end, residual, steps = _relax(model, x, phase, None if state is None else start)
        if phase.checked and first_bad_layer(end) is not None:
            # The reference runs it again to say where it went wrong.
            return relax(model, x, phase, state)
        settled = residual < settled_below(residual.dtype, phase.tolerance)
        return Relaxation(end, int(steps.max()), residual, settled)

    def runner(self, job: Job) -> Runner:
        reason = self.refuses(job.model, job.cost, job.estimator)
        if reason is not None:
            raise ValueError(f"The engine 'cpu' cannot serve: {reason} Use engine='auto'.")
        return CpuRunner(job)


def _refuses_task(model: Dynamics, cost: Cost | None, estimator: Estimator | None) -> str | None:
    if cost is not None and type(cost) is not SquaredError:
        return f"it has the squared error written out, not {type(cost).__name__}."
    if estimator is not None and not isinstance(estimator, EP | BPTT):
        return f"it has EP and BPTT written out, not {type(estimator).__name__}."
    drawn = isinstance(estimator, EP) and estimator.nudging == "random-sign"
    if not drawn and (reason := nudges_otherwise(estimator)) is not None:
        return reason
    if estimator is not None and estimator.schedule == "alternating" and not model.bipartite:
        return "an energy-based net cannot alternate."
    return None


def _refuses_machine(unit: str, dtype: torch.dtype) -> str | None:
    try:
        library(unit, dtype)
    except NoLibraryError as error:
        _say_once(str(error))
        return str(error)
    return None


@functools.cache
def _say_once(reason: str) -> None:
    warnings.warn(f"The fast CPU engine is not available: {reason} The reference engine is used.", stacklevel=2)


def _serves(model: Dynamics, x: Tensor, phase: Phase) -> bool:
    """Phases left to the reference: those it answers with an error, tolerant stops, and stacks of another shape."""
    impossible = phase.schedule == "alternating" and not model.bipartite
    return networks_of(model, x) is not None and x.numel() > 0 and not impossible and phase.still == 0.0


@torch.no_grad()
def _relax(model: Dynamics, x: Tensor, phase: Phase, start: State | None) -> tuple[State, Tensor, Tensor]:
    """The end of the free phase, and of each sample the residual and the steps used."""
    net = net_of(model, networks_of(model, x) or 1)
    for held in net.held:
        held.fetch()
    lead = x.shape[: model.sample_dims(x)]
    end = net.to_c(model.init_state(x))
    residual, steps = x.new_empty(lead), torch.empty(lead, dtype=torch.int64)
    table = net.table
    table.set(batch=lead[-1], threads=torch.get_num_threads(), T=phase.T)
    table.set(alternating=phase.schedule == "alternating", settled=phase.stop == "settled")
    table.point("images", net.images(x))
    net.describe_state(None if start is None else net.to_c(start), end)
    table.point("residuals", residual)
    table.point("steps", steps)
    if library(net.unit, x.dtype).relax(ctypes.byref(table.struct)):
        raise MemoryError(f"No memory to relax a batch of shape {tuple(x.shape)}. Relax fewer samples at a time.")
    return net.from_c(end), residual, steps

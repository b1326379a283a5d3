"""The plain and the difference form of the nudged phase: what each keeps of the update, and what it costs.

python -m benchmarks.forms cosines      nets x beta x numbers: the least cosine of a layer with the exact gradient
python -m benchmarks.forms precision    P-3h at the paper's settings with 16-bit products: cosines with float64
python -m benchmarks.forms theorem      Theorem 1 on the toy net in float32 with beta = 1e-5
python -m benchmarks.forms beta         the best beta against the residual that a free phase ends with
python -m benchmarks.forms speed        CPU time of a training iteration, difference over plain, measured in turns

Each writes its part of results/deep/forms.json. The exact gradient is that of recurrent backprop at the state of rest,
in float64.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import eqprop
import eqprop.papers
from benchmarks.collect import rounded, write_compact
from eqprop import EP, RBP, Phase, SquaredError, relax
from eqprop.cost import Nudge, Problem
from eqprop.data.images import epoch_order, mnist, one_hot
from eqprop.engines.base import Job, Precision, load_engine
from eqprop.engines.eager import Agreement, update_in
from eqprop.estimators import Nudging
from eqprop.gdu.beta import best_beta
from eqprop.gdu.comparison import Options, compare
from eqprop.models import Dense, Layered, Network
from eqprop.provenance import provenance
from eqprop.relax import PhaseForm, Relaxation, end_of_phase

RECORD = Path("results/deep/forms.json")
BETAS = (1.0, 0.1, 1e-2, 1e-3, 1e-4)
FORMS: tuple[PhaseForm, ...] = ("plain", "difference")
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
SAMPLES, TURNS, ITERATIONS = 20, 9, 3


def chain(depth: int, gain: float = 1.0) -> Network:
    """Tanh layers of 64 in a row, as in deep-10."""
    names = [f"s{n}" for n in range(depth)]
    ways = [Dense(pre, post, feedback_gain=gain) for post, pre in pairwise(names)]
    return Network(
        784,
        dict.fromkeys(names, 64) | {"s0": 10},
        [Dense("x", names[-1]), *ways],
        activation="tanh",
        bias=False,
        nudge_site="inside",
        init="glorot",
        seed=0,
    )


def paper(name: str) -> Callable[[], tuple[eqprop.Dynamics, int, int]]:
    def build() -> tuple[eqprop.Dynamics, int, int]:
        spec = eqprop.papers.find(name)
        return spec.model.build(0, torch.float32), spec.phases.T, spec.phases.K

    return build


NETS: dict[str, Callable[[], tuple[eqprop.Dynamics, int, int]]] = {
    "EB-1h": paper("EB-1h"),
    "EB-2h": paper("EB-2h"),
    "P-1h": paper("P-1h"),
    "P-2h": paper("P-2h"),
    "P-3h": paper("P-3h"),
    **{f"chain of {n}, feedback 0.1": lambda n=n: (chain(n, 0.1), 3 * n, 2 * n) for n in (4, 10, 16)},  # type: ignore[misc]
}


def digits(n: int = SAMPLES) -> tuple[Tensor, Tensor]:
    images = mnist()
    return images.train_x[:n], one_hot(images.train_y[:n], 10)


def at(problem: Problem, T: int) -> Relaxation:
    return relax(problem.model, problem.x, Phase(T, checked=False))


def exact(problem: Problem, T: int) -> dict[str, Tensor]:
    """Recurrent backprop at rest, in float64."""
    wide = problem.double()
    rest = relax(wide.model, wide.x, Phase(40 * T, stop="settled", still=1e-14, checked=False))
    return RBP(0, 400, stop="settled", checked=False).estimate(wide, rest)[1]


def least(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float | None:
    """The least cosine over weights; None where an update is zero or not finite."""
    each = [Agreement.of(found[n], g).cosine for n, g in reference.items() if g.dim() > 1]
    return min(each) if all(map(math.isfinite, each)) else None


def cosines() -> dict[str, Any]:
    """By net, beta, type of numbers and form."""
    x, y = digits()
    out: dict[str, Any] = {}
    for name, build in NETS.items():
        model, T, K = build()
        problem = Problem(model, SquaredError(), x, y)
        reference, rows = exact(problem, T), {}
        for beta in BETAS:
            for precision in PRECISIONS:
                for form in FORMS:
                    ep = EP(T, K, beta=beta, form=form, checked=False)
                    rows[f"{beta:g} {precision} {form}"] = least(update_in(problem, ep, precision), reference)
        out[name] = {"T": T, "K": K, "least_cosine": rows}
        print(name, json.dumps(rounded(rows, 3)), flush=True)
    return out


def precision() -> dict[str, Any]:
    """Each layer's update with products of fewer bits, against that of the same form in float64."""
    spec = eqprop.papers.find("P-3h")
    x, y = digits()
    problem = Problem(spec.model.build(0, torch.float32), SquaredError(), x, y)
    out: dict[str, Any] = {}
    for form in FORMS:
        phases = spec.phases
        ep = EP(phases.T, phases.K, beta=phases.beta, form=form, checked=False)
        wide = update_in(problem.double(), ep, "float32")
        for dtype in ("float32", "float16", "bfloat16"):
            found = update_in(problem, ep, dtype)  # type: ignore[arg-type]
            out[f"{form} {dtype}"] = {n: Agreement.of(found[n], g).cosine for n, g in wide.items()}
            print(form, dtype, json.dumps(rounded(out[f"{form} {dtype}"], 5)), flush=True)
    return out


def theorem() -> dict[str, Any]:
    """RMSE of synapses per layer, in float32."""
    spec = eqprop.papers.find("toy", "gdu")
    source = torch.Generator().manual_seed(0)
    model = spec.model.build(0, torch.float32)
    x = torch.rand(1, model.input_shape[0] if model.input_shape else 10, generator=source)
    y = torch.rand(1, 5, generator=source)
    found = compare(model, SquaredError(), x, y, 5000, 80, 1e-5, Options(form="difference"))
    out = {name: m.rmse for name, m in found.synapses.items()}
    print(out, flush=True)
    return {"beta": 1e-5, "rmse": out}


def beta() -> dict[str, Any]:
    """The beta of a fine sweep with the least error: against the residual, and against the resolution of states.

    drift       the free phase ends away from rest by r, float64. Both phases of a centered nudge drift alike, which
                cancels; then no beta is too small.
    resolution  states are read to multiples of r, as of a machine or in few bits
    proposed    float32, phases of T steps: the error that `best_beta` leads to over the least of the sweep
    """
    out: dict[str, Any] = {}
    for name, model in small_nets().items():
        source = torch.Generator().manual_seed(3)
        x = torch.rand(16, 10, generator=source, dtype=torch.float64)
        y = torch.rand(16, 5, generator=source, dtype=torch.float64)
        problem = Problem(model, SquaredError(), x, y)
        rest = relax(model, x, Phase(20_000, stop="settled", checked=False))
        nudgings: tuple[Nudging, ...] = ("one-sided", "symmetric")
        for nudging in nudgings:
            ep = EP(0, 100, nudging=nudging, checked=False)
            limit = replace(ep, beta=1e-7, nudging="symmetric", form="difference").estimate(problem, rest)[1]
            found = out.setdefault(name, {}).setdefault(nudging, {})
            sizes = [10.0 ** (-n / 2) for n in range(6, 15)]
            drifts = [best(partial(estimated, problem, ep, moved(problem, rest, r)), limit) for r in sizes]
            read = [best(partial(resolved, problem, ep, rest, r), limit) for r in sizes]
            found["drift"] = {"r": sizes, "beta_and_error": drifts}
            found["resolution"] = {"r": sizes, "beta_and_error": read, "exponent": fitted(sizes, read)}
            if nudging == "one-sided":
                found["drift"]["exponent"] = fitted(sizes, drifts)
            found["proposed"] = {str(T): proposed(problem, replace(ep, T=T)) for T in (15, 40, 400)}
            print(name, nudging, json.dumps(rounded(found, 3)), flush=True)
    return out


GRID = [10.0 ** (-n / 12) for n in range(-4, 85)]
"""Betas of the sweep, 12 to a decade, the largest first."""


def small_nets() -> dict[str, Layered]:
    wide = {"dtype": torch.float64}
    return {
        "energy-based, tanh": Layered((5, 20, 10), "energy-based", "tanh", eps=0.2, seed=0, **wide),  # type: ignore[arg-type]
        "energy-based, logistic": Layered((5, 20, 10), "energy-based", "logistic", eps=0.2, seed=1, **wide),  # type: ignore[arg-type]
        "prototypical, tanh": Layered((5, 20, 20, 10), "prototypical", "tanh", seed=2, **wide),  # type: ignore[arg-type]
    }


def best(run: Callable[[float], dict[str, Tensor]], limit: dict[str, Tensor]) -> tuple[float, float]:
    """The beta with the least error, and that error."""
    errors = {b: off(run(b), limit) for b in GRID}
    beta = min(errors, key=errors.__getitem__)
    return beta, errors[beta]


def moved(problem: Problem, rest: Relaxation, away: float) -> Relaxation:
    """A free phase that is this far from rest, in the direction that 40 steps after a push leave."""
    source = torch.Generator().manual_seed(0)
    push = [torch.randn(v.shape, generator=source, dtype=torch.float64) for v in rest.state]
    start = tuple([v + 0.1 * p for v, p in zip(rest.state, push, strict=True)])
    far = relax(problem.model, problem.x, Phase(40, checked=False), start)
    share = away / float(far.residual.max())
    state = tuple([v + share * (w - v) for v, w in zip(rest.state, far.state, strict=True)])
    return relax(problem.model, problem.x, Phase(0, checked=False), state)


def estimated(problem: Problem, ep: EP, free: Relaxation, beta: float) -> dict[str, Tensor]:
    return replace(ep, beta=beta).estimate(problem, free)[1]


def resolved(problem: Problem, ep: EP, free: Relaxation, r: float, beta: float) -> dict[str, Tensor]:
    """EP's update of states that are read to multiples of r."""
    model, sides = problem.model, (1.0, -1.0) if ep.nudging == "symmetric" else (1.0,)
    assert isinstance(model, eqprop.PrimitiveDynamics)
    ends = [
        end_of_phase(model, problem.x, Phase(ep.K), free.state, Nudge(problem.cost, problem.y, s * beta)) for s in sides
    ]
    read = [tuple([(v / r).round() * r for v in s]) for s in (*ends, free.state)]
    unit = -1.0 / (len(sides) * beta * model.nudge_scale)
    return {n: unit * g for n, g in model.contrast(problem.x, read[0], read[1]).items()}


def proposed(problem: Problem, ep: EP) -> dict[str, float]:
    """What `best_beta` says in float32, its error, and the least error of the sweep."""
    single = Problem(copy.deepcopy(problem.model).float(), problem.cost, problem.x.float(), problem.y.float())
    free = relax(single.model, single.x, ep.free_phase())
    wide = replace(free, state=tuple(v.double() for v in free.state))
    limit = replace(ep, beta=1e-7, nudging="symmetric", form="difference").estimate(problem, wide)[1]
    beta = best_beta(single, ep, free).beta
    error = off(estimated(single, ep, free, beta), limit)
    sweep, least = best(partial(estimated, single, ep, free), limit)
    return {"residual": float(free.residual.max()), "beta": beta, "error": error, "best_beta": sweep, "least": least}


def off(found: dict[str, Tensor], limit: dict[str, Tensor]) -> float:
    a, b = (torch.cat([g[n].double().flatten() for n in limit]) for g in (found, limit))
    error = float((a - b).norm() / b.norm())
    return error if math.isfinite(error) else math.inf


def fitted(sizes: Sequence[float], points: Sequence[tuple[float, float]]) -> float:
    """The slope of log beta over log r, of betas within the sweep that leave an error below a tenth."""
    pairs = [(r, b) for r, (b, e) in zip(sizes, points, strict=True) if GRID[2] > b > GRID[-3] and e < 0.1]
    kept = [(math.log(r), math.log(b)) for r, b in pairs]
    if len(kept) < 3:
        return math.nan
    logs = torch.tensor(kept, dtype=torch.float64)
    r, b = (logs - logs.mean(0)).T
    return float((r * b).sum() / (r * r).sum())


def speed() -> dict[str, Any]:
    """Median over turns of CPU seconds, difference over plain, in one process on one thread."""
    torch.set_num_threads(1)
    images = mnist()
    targets = one_hot(images.train_y, 10)
    out: dict[str, Any] = {}
    nets = {**{n: NETS[n] for n in ("EB-2h", "P-1h", "P-2h", "P-3h")}, "chain of 10": lambda: (chain(10), 30, 20)}
    for engine in ("xla", "eager"):
        for name, build in nets.items():
            model, T, K = build()
            T, K, runners = min(T, 2 * K), K, {}
            for form in FORMS:
                net = copy.deepcopy(model)
                optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
                job = Job(
                    net, SquaredError(), EP(T, K, 0.5, form=form), optimizer, images.train_x, targets, images.train_y
                )
                runners[form] = load_engine(engine).runner(job)
            order = epoch_order(0, 0, len(targets), SAMPLES)
            spent: dict[str, list[float]] = {form: [] for form in FORMS}
            for turn in range(TURNS + 1):
                for form in FORMS[:: 1 if turn % 2 else -1]:
                    began = time.process_time()
                    runners[form].run(order[ITERATIONS * turn : ITERATIONS * (turn + 1)])
                    spent[form].append(time.process_time() - began)
            ratios = sorted(d / p for d, p in zip(spent["difference"][1:], spent["plain"][1:], strict=True))
            out[f"{engine} {name}"] = {
                "T": T,
                "K": K,
                "ratio": ratios[len(ratios) // 2],
                "least": ratios[0],
                "plain_seconds": min(spent["plain"][1:]) / ITERATIONS,
            }
            print(engine, name, json.dumps(rounded(out[f"{engine} {name}"], 3)), flush=True)
    return out


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "cosines": cosines,
    "precision": precision,
    "theorem": theorem,
    "beta": beta,
    "speed": speed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    for part in parser.parse_args().parts or PARTS:
        found = {**PARTS[part](), "provenance": provenance(torch.device("cpu"))}
        known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        write_compact(RECORD, known | {part: rounded(found)})


if __name__ == "__main__":
    main()

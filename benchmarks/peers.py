"""One gradient by `ep.backward` and by hand in torch, JAX and numpy; the loop of the README and `train`.

    python -m benchmarks peers --out results/bench/peers.json
    python -m benchmarks peers --peer NAME=FILE.py      beside them, an iteration by somebody else's code

All take turns in one process on one core; times are CPU times, the least over rounds. One text of an energy serves
torch and JAX. FILE.py defines make(case, theta, x, y, settings), which returns a function without arguments that runs
one iteration, or None for cases that it does not know; theta, x and y are numpy arrays.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import lax
from torch import Tensor

from benchmarks.cases import Case as TrainingCase
from benchmarks.cases import batch_order
from benchmarks.collect import write_compact
from benchmarks.run import experiments_named
from eqprop import BPTT, EP, SquaredError, from_energy, from_primitive, from_transition
from eqprop.data import mnist, one_hot
from eqprop.dynamics import Dynamics
from eqprop.estimators import Estimator
from eqprop.provenance import provenance

T, K, EPS, BETA = 50, 20, 0.3, 0.5
INPUTS, OUTPUTS = 784, 10
Arrays = Mapping[str, Any]
Run = Callable[[], object]


def _conv(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))


def _pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


TORCH = SimpleNamespace(
    tanh=torch.tanh,
    clip=lambda v: v.clamp(0.0, 1.0),
    softmax=lambda v: torch.softmax(v, -1),
    conv=lambda x, w: F.conv2d(x, w, padding="same"),
    pool=lambda x: F.max_pool2d(x, 2),
)
JAX = SimpleNamespace(
    tanh=jnp.tanh, clip=lambda v: jnp.clip(v, 0.0, 1.0), softmax=lambda v: jax.nn.softmax(v, -1), conv=_conv, pool=_pool
)


def half_squares(s: Any) -> Any:
    return 0.5 * sum((layer**2).reshape(len(layer), -1).sum(-1) for layer in s)


def skip_energy(f: Any, x: Any, s: Any, th: Any) -> Any:
    r0, r1, r2 = f.tanh(s[0]), f.tanh(s[1]), f.tanh(s[2])
    to_output = (r0 * (r1 @ th["W01"].T + r2 @ th["W02"].T)).sum(-1)
    return half_squares(s) - to_output - (r1 * (r2 @ th["W12"].T)).sum(-1) - (r2 * (x @ th["W2x"].T)).sum(-1)


def attention_energy(f: Any, x: Any, s: Any, th: Any) -> Any:
    seen = f.softmax(s[1] @ th["M"].T) @ th["N"]
    return half_squares(s) - (s[0] * (seen @ th["W"].T)).sum(-1) - (f.tanh(s[1]) * (x @ th["V"].T)).sum(-1)


def skip_phi(f: Any, x: Any, s: Any, th: Any) -> Any:
    to_output = (s[0] * (s[1] @ th["W01"].T + s[2] @ th["W02"].T)).sum(-1)
    return to_output + (s[1] * (s[2] @ th["W12"].T)).sum(-1) + (s[2] * (x @ th["W2x"].T)).sum(-1)


def pooled_phi(f: Any, x: Any, s: Any, th: Any) -> Any:
    upper = (s[1] * f.pool(f.conv(s[2], th["w1"]))).sum((1, 2, 3)) + (s[2] * f.conv(x, th["w2"])).sum((1, 2, 3))
    return upper + (s[0] * (s[1].reshape(len(x), -1) @ th["W"].T)).sum(-1)


def two_way_step(f: Any, x: Any, s: Any, th: Any) -> Any:
    hidden = x @ th["V"].T + s[0] @ th["B"].T
    return f.tanh(s[1] @ th["W"].T), f.tanh(hidden + s[1] @ th["R"].T)


def skips(width: int) -> dict[str, tuple[int, ...]]:
    return {"W01": (10, width), "W02": (10, width), "W12": (width, width), "W2x": (width, INPUTS)}


@dataclass(frozen=True)
class Peer:
    """A gradient that everybody computes.

    text        the energy, Phi or step, of a name space of functions, x, s and theta
    kind        which of them it is
    """

    name: str
    kind: str
    text: Callable[..., Any]
    shapes: Mapping[str, tuple[int, ...]]
    layers: Sequence[Any]
    batch: int
    bptt: bool = False
    squash: str = "tanh"
    inputs: tuple[int, ...] = (INPUTS,)

    def data(self) -> tuple[dict[str, np.ndarray[Any, Any]], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        source, f = np.random.default_rng(4), np.float32
        theta = {
            name: (0.5 * source.standard_normal(shape) / np.prod(shape[1:]) ** 0.5).astype(f)
            for name, shape in self.shapes.items()
        }
        return theta, source.random((self.batch, *self.inputs)).astype(f), source.random((self.batch, 10)).astype(f)

    def model(self, theta: Arrays) -> Dynamics:
        given = {name: torch.tensor(v) for name, v in theta.items()}

        def text(x: Tensor, s: Any, th: Any) -> Any:
            return self.text(TORCH, x, s, th)

        if self.kind == "energy":
            return from_energy(text, given, self.layers, eps=EPS, input_shape=self.inputs)
        if self.kind == "primitive":
            return from_primitive(text, given, self.layers, squash=getattr(TORCH, self.squash), input_shape=self.inputs)
        return from_transition(text, given, self.layers, input_shape=self.inputs)

    @property
    def estimator(self) -> Estimator:
        return BPTT(T, K) if self.bptt else EP(T, K, beta=BETA)

    def zeros(self, make: Callable[[tuple[int, ...]], Any]) -> tuple[Any, ...]:
        return tuple(make((self.batch, *(n if isinstance(n, tuple) else (n,)))) for n in self.layers)


def peers() -> list[Peer]:
    w = 256
    own = [
        Peer(f"own energy {n}", "energy", skip_energy, skips(n), (10, n, n), b)
        for n, b in ((64, 16), (w, 32), (1024, 128))
    ]
    attention = {"W": (10, w), "M": (64, w), "N": (64, w), "V": (w, INPUTS)}
    maps = {"W": (10, 16 * 49), "w1": (16, 8, 3, 3), "w2": (8, 1, 3, 3)}
    ways = {"W": (10, w), "B": (w, 10), "R": (w, w), "V": (w, INPUTS)}
    return [
        *own,
        Peer("own Phi, tanh", "primitive", skip_phi, skips(w), (10, w, w), 32),
        Peer("softmax attention", "energy", attention_energy, attention, (10, w), 32),
        Peer(
            "convolution, max-pooling",
            "primitive",
            pooled_phi,
            maps,
            (10, (16, 7, 7), (8, 14, 14)),
            32,
            squash="clip",
            inputs=(1, 14, 14),
        ),
        Peer("from_transition", "transition", two_way_step, ways, (10, w), 32),
        Peer("BPTT, own energy 256", "energy", skip_energy, skips(w), (10, w, w), 32, bptt=True),
    ]


def by_jax(peer: Peer) -> Callable[..., Any]:
    """What a user of JAX writes: grad of the text under jit, phases as loops."""

    def value(th: Any, x: Any, s: Any) -> Any:
        return peer.text(JAX, x, s, th).sum()

    slope = jax.grad(value, 2) if peer.kind != "transition" else None

    def step(th: Any, x: Any, s: Any, y: Any, beta: float) -> Any:
        if peer.kind == "transition":
            new = peer.text(JAX, x, s, th)
        elif peer.kind == "energy":
            assert slope is not None
            new = tuple(a - EPS * d for a, d in zip(s, slope(th, x, s), strict=True))
            beta = EPS * beta
        else:
            assert slope is not None
            new = tuple(getattr(JAX, peer.squash)(d) for d in slope(th, x, s))
        return (new[0] - beta * (s[0] - y), *new[1:]) if beta else new

    @jax.jit
    def run(th: Any, x: Any, y: Any) -> Any:
        size = len(x)
        s = peer.zeros(lambda shape: jnp.zeros(shape, jnp.float32))
        if peer.bptt:
            s = lax.fori_loop(0, T - K, lambda _, s: step(th, x, s, y, 0.0), s)

            def loss(th: Any) -> Any:
                end, _ = lax.scan(lambda s, _: (step(th, x, s, y, 0.0), None), lax.stop_gradient(s), length=K)
                return 0.5 * ((end[0] - y) ** 2).sum() / size

            return jax.grad(loss)(th)
        free = lax.fori_loop(0, T, lambda _, s: step(th, x, s, y, 0.0), s)
        if peer.kind == "transition":

            def both(_: Any, carried: Any) -> Any:
                s, total = carried
                new = step(th, x, s, y, BETA)
                back = jax.vjp(lambda th: peer.text(JAX, x, s, th), th)[1]
                moved = back(tuple(a - b for a, b in zip(new, s, strict=True)))[0]
                return new, jax.tree.map(lambda t, m: t - m / (BETA * size), total, moved)

            return lax.fori_loop(0, K, both, (free, jax.tree.map(jnp.zeros_like, th)))[1]
        nudged = lax.fori_loop(0, K, lambda _, s: step(th, x, s, y, BETA), free)
        sign = 1.0 if peer.kind == "energy" else -1.0
        plus, minus = jax.grad(value)(th, x, nudged), jax.grad(value)(th, x, free)
        return jax.tree.map(lambda a, b: sign * (a - b) / (BETA * size), plus, minus)

    return run


def by_numpy(th: Arrays, x: Any, y: Any) -> dict[str, Any]:
    """Formulas of the skip energy by hand."""
    W01, W02, W12, V = (th[name] for name in ("W01", "W02", "W12", "W2x"))
    drive, width, size = x @ V.T, len(W12), len(x)
    s0, s1, s2 = (np.zeros((size, n), np.float32) for n in (OUTPUTS, width, width))
    free: tuple[Any, ...] = ()
    for t in range(T + K):
        r0, r1, r2 = np.tanh(s0), np.tanh(s1), np.tanh(s2)
        if t == T:
            free = r0, r1, r2
        g0 = s0 - (1 - r0 * r0) * (r1 @ W01.T + r2 @ W02.T)
        g0 = g0 + BETA * (s0 - y) if t >= T else g0
        g1 = s1 - (1 - r1 * r1) * (r0 @ W01 + r2 @ W12.T)
        g2 = s2 - (1 - r2 * r2) * (r0 @ W02 + r1 @ W12 + drive)
        s0, s1, s2 = s0 - EPS * g0, s1 - EPS * g1, s2 - EPS * g2
    r0, r1, r2 = np.tanh(s0), np.tanh(s1), np.tanh(s2)
    f0, f1, f2 = free
    unit = -1.0 / (BETA * size)
    pairs = {"W01": (r0, r1, f0, f1), "W02": (r0, r2, f0, f2), "W12": (r1, r2, f1, f2), "W2x": (r2, x, f2, x)}
    return {name: unit * (a.T @ b - c.T @ d) for name, (a, b, c, d) in pairs.items()}


def contestants(peer: Peer, others: Mapping[str, Any]) -> tuple[dict[str, Run], dict[str, float]]:
    """Who computes it, and how far each gradient is from the reference's, relative to the largest number."""
    theta, x, y = peer.data()
    model, cost, estimator = peer.model(theta), SquaredError(), peer.estimator
    tx, ty = torch.tensor(x), torch.tensor(y)
    jth, jx, jy = {k: jnp.array(v) for k, v in theta.items()}, jnp.array(x), jnp.array(y)
    names = list(theta)

    def ours(engine: str) -> Run:
        def run() -> dict[str, np.ndarray[Any, Any]]:
            model.zero_grad(set_to_none=True)
            estimator.backward(model, cost, tx, ty, engine=engine)
            return {
                name: p.grad.numpy() for name, p in zip(names, model.parameters(), strict=True) if p.grad is not None
            }

        return run

    jitted = by_jax(peer)
    runs: dict[str, Run] = {
        "ours": ours("auto"),
        "torch": ours("eager"),
        "jax": lambda: jax.block_until_ready(jitted(jth, jx, jy)),
    }
    if peer.text is skip_energy and not peer.bptt:
        runs["numpy"] = lambda: by_numpy(theta, x, y)
    settings = {"T": T, "K": K, "eps": EPS, "beta": BETA, "bptt": peer.bptt}
    for name, module in others.items():
        if (made := module.make(peer.name, theta, x, y, settings)) is not None:
            runs[name] = made
    found = {name: run() for name, run in runs.items()}
    reference: Any = found["torch"]
    size = max(float(np.abs(v).max()) for v in reference.values())
    off = {}
    for name, grads in found.items():
        if isinstance(grads, dict) and grads.keys() == reference.keys():
            off[name] = max(float(np.abs(np.asarray(grads[k]) - v).max()) for k, v in reference.items()) / size
    return runs, off


def timed(runs: Mapping[str, Run], rounds: int, seconds: float) -> dict[str, float]:
    """CPU milliseconds of a call by each, in turns; the least over rounds, which other work disturbed least."""
    counts, times = {}, {name: list[float]() for name in runs}
    for name, run in runs.items():
        began = time.perf_counter()
        run()
        counts[name] = max(1, min(200, int(seconds / max(time.perf_counter() - began, 1e-9))))
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.process_time()
            for _ in range(counts[name]):
                run()
            times[name].append(1e3 * (time.process_time() - began) / counts[name])
    return {name: min(values) for name, values in times.items()}


def readme_loop(name: str) -> dict[str, Run]:
    """Twenty iterations by the loop of the README and by what `train` runs."""
    (spec,) = experiments_named((name,), "paper")
    images = mnist()
    case = TrainingCase(spec, "ep")
    order = batch_order(case, 20, len(images.train_x), 0)
    job = case.job(trained := case.build(torch.device("cpu")), images)
    runner = case.choose(trained).runner(job)
    model, cost, ep = case.build(torch.device("cpu")), SquaredError(), case.estimator()
    optimizer, targets = case.optimizer(model), one_hot(images.train_y, 10, torch.float32)
    x = images.train_x.view(-1, *(model.input_shape or ()))

    def loop() -> None:
        for rows in order:
            optimizer.zero_grad()
            ep.backward(model, cost, x[rows], targets[rows])
            optimizer.step()

    return {"loop": loop, "train": lambda: runner.run(order)}


FIRST = """
import resource, sys
import torch, eqprop
from benchmarks.peers import peers
torch.set_num_threads(1)
from eqprop import SquaredError
from time import perf_counter, process_time
began, seconds = 0.0, []
for peer in (peers()[1], peers()[3]):
    theta, x, y = peer.data()
    model = peer.model(theta)
    peer.estimator.backward(model, SquaredError(), torch.tensor(x), torch.tensor(y))
    seconds.append(process_time() - began)
    began = process_time()
print(*seconds)
"""


def first_calls() -> dict[str, float]:
    """CPU seconds until a first gradient in a new process, imports included, with an empty cache and a filled one."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "cached"):
            environment = {**os.environ, "EQPROP_CACHE": cache}
            done = subprocess.run(
                [sys.executable, "-c", FIRST], env=environment, capture_output=True, text=True, check=True
            )
            first, second = map(float, done.stdout.split())
            found |= {f"{state}, first model": first, f"{state}, second model": second}
    return found


def loaded(peer: str) -> tuple[str, Any]:
    name, _, path = peer.partition("=")
    spec = importlib.util.spec_from_file_location(f"peer_{name}", path)
    if not path or spec is None or spec.loader is None:
        raise SystemExit(f"--peer got {peer!r}; expected NAME=FILE.py.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return name, module


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=FILE.py")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="per turn")
    parser.add_argument("--only", action="append", default=[], help="rows whose name begins so")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # a call that wanders to another core takes twice the time
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    others = dict(map(loaded, given.peer))

    def asked(name: str) -> bool:
        return not given.only or any(name.startswith(word) for word in given.only)

    found: dict[str, Any] = {"settings": {"T": T, "K": K, "eps": EPS, "beta": BETA}, "gradients": [], "loops": []}

    def keep() -> None:
        if given.out is not None:
            write_compact(given.out, {**found, "provenance": provenance(torch.device("cpu"))})

    for peer in peers():
        if asked(peer.name):
            runs, off = contestants(peer, others)
            ms = timed(runs, given.rounds, given.seconds)
            row = {"name": peer.name, "batch": peer.batch, "ms": ms, "off": off, "ours/jax": ms["ours"] / ms["jax"]}
            found["gradients"].append(row)
            print(json.dumps(row), flush=True)
            keep()
    for name in ("P-1h", "P-2h", "EB-1h"):
        if asked(name):
            ms = {k: v / 20 for k, v in timed(readme_loop(name), given.rounds, given.seconds).items()}
            row = {"name": name, "ms": ms, "loop's rate": ms["train"] / ms["loop"]}
            found["loops"].append(row)
            print(json.dumps(row), flush=True)
            keep()
    if asked("first"):
        found["first_calls_s"] = first_calls()
        print(json.dumps(found["first_calls_s"]), flush=True)
        keep()


if __name__ == "__main__":
    main()

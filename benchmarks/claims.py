"""What the paper says in words, measured: how fast nets settle, two losses, energies, contractions.

python -m benchmarks.claims NAME            prints what is measured
python -m benchmarks.claims NAME --write    and writes results/claims/NAME.json; --device cuda for the two long ones

settling      steps until nine tenths of the samples have a residual below 1e-3 and 1e-6, for every net of Tables 2
              and 3 at its first weights; prototypical nets also with alternating steps  [sec:depth]
losses        L after T steps against L* at the steady state: values and gradients  [sec:loss-L-L*]
energy        whether E and Phi rise or fall along a free phase  [sec:primitive-energy]
contraction   whether nets whose Jacobian has a norm below 1 settle, and others  [sec:primitive-energy]
smallest      the train errors of P-1h by EP after five epochs of 20,000 images with the T and K of Table 3, and with
              half of each, in five trials  [subsec-train]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.collect import rounded, write_compact
from docs.build.claims.sources import gdu_net, training_net
from eqprop import BPTT, RBP, Dynamics, PrimitiveDynamics, SquaredError, papers
from eqprop.data import mnist
from eqprop.models import Layered, Toy
from eqprop.provenance import provenance
from eqprop.run import train
from eqprop.state import distance

RESULTS = Path(__file__).resolve().parents[1] / "results" / "claims"
Document = dict[str, Any]
State = tuple[Tensor, ...]
SEED = 0

SAMPLES, SHARE, BELOW, MOST = 50, 0.9, (1e-3, 1e-6), 30000
NETS = {
    "GDU": ("EB-1h", "EB-2h", "EB-3h", "P-1h", "P-2h", "P-3h"),
    "training": ("EB-1h", "EB-2h", "P-1h", "P-2h", "P-3h"),
}


def steps_to_rest(model: Dynamics, x: Tensor, schedule: str = "synchronous") -> dict[str, int]:
    """Steps until |F(s) - s| is below each threshold in the share of samples; `MOST` where that does not happen."""
    drive, s = model.drive(x), model.init_state(x)
    reached: dict[str, int] = {}
    for t in range(MOST):
        new = model.step(drive, s)
        still = distance(new, s, 1)
        for below in BELOW:
            if _name(below) not in reached and float((still < below).float().mean()) >= SHARE:
                reached[_name(below)] = t
        if len(reached) == len(BELOW):
            break
        turn = (lambda n, t=t: n % 2 == t % 2) if schedule == "alternating" else (lambda n: True)
        s = tuple(moved if turn(n) else stays for n, (moved, stays) in enumerate(zip(new, s, strict=True)))
    return {_name(below): reached.get(_name(below), MOST) for below in BELOW}


def _name(below: float) -> str:
    return f"{below:.0e}".replace("e-0", "e-")


@torch.no_grad()
def settling(device: str = "cpu") -> list[Document]:
    x = mnist(dtype=torch.float64).sample(SAMPLES, SEED)[0].to(device)
    found = []
    for settings, init, name in [(s, i, n) for s, names in NETS.items() for i in ("default", "glorot") for n in names]:
        make = gdu_net if settings == "GDU" else training_net
        model = make(name, init, SEED, torch.float64).to(device)
        for schedule in ("synchronous", "alternating") if name.startswith("P") else ("synchronous",):
            steps = steps_to_rest(model, x, schedule)
            row = {"name": name, "settings": settings, "init": init, "schedule": schedule, "steps": steps}
            print(row, flush=True)
            found.append({**row, "samples": SAMPLES, "share": SHARE, "most": MOST})
    return found


LARGE, SHORT, FEW = 600, 5, 5


def losses() -> list[Document]:
    """Three ways to T: large from zero, few steps from the steady state, too short from zero."""
    source = torch.Generator().manual_seed(SEED)
    model, cost = Toy((5, 50, 10), "tanh", eps=0.08, seed=SEED, dtype=torch.float64), SquaredError()
    x = torch.rand(20, 10, generator=source, dtype=torch.float64)
    y = torch.eye(5, dtype=torch.float64)[torch.randint(5, (20,), generator=source)]
    rest, exact = RBP(LARGE, LARGE).gradient(model, cost, x, y)
    value = cost(rest.state, y).mean()
    found = []
    for case, T, start in (
        ("T large, from zero", LARGE, None),
        (f"T = {FEW}, from the steady state", FEW, rest.state),
        ("T too short, from zero", SHORT, None),
    ):
        free, grads = BPTT(T, T).gradient(model, cost, x, y, start)
        a, b = (torch.cat([g.flatten() for g in own.values()]) for own in (grads, exact))
        gaps = {"value_gap": float((cost(free.state, y).mean() - value).abs() / value)}
        gaps["gradient_gap"] = float((a - b).norm() / b.norm())
        found.append({"case": case, "T": T, **gaps})
    return found


@torch.no_grad()
def energy() -> list[Document]:
    """Along the free phase of five nets with eps 0.08: E = (|s|^2/2 - Phi) / eps, and Phi itself."""
    source, found = torch.Generator().manual_seed(SEED), []
    for seed in range(5):
        model = Toy((5, 50, 10), "tanh", eps=0.08, seed=seed, dtype=torch.float64)
        x = torch.rand(20, 10, generator=source, dtype=torch.float64)
        s = tuple(torch.randn(v.shape, generator=source, dtype=v.dtype) for v in model.init_state(x))
        primitive, energies = [], []
        for _ in range(200):
            primitive.append(phi := model.primitive(x, s))
            energies.append((0.5 * sum(v.square().sum(-1) for v in s) - phi) / 0.08)
            s = model.transition(x, s)
        E, Phi = (torch.stack(own).diff(dim=0) for own in (energies, primitive))
        counted = {"energy_rises": E > 1e-10, "energy_falls": E < -1e-10}
        counted |= {"primitive_rises": Phi > 1e-10, "primitive_falls": Phi < -1e-10}
        found.append({"seed": seed, "steps": len(E), **{name: int(v.sum()) for name, v in counted.items()}})
    return found


@torch.no_grad()
def contraction() -> list[Document]:
    """Prototypical tanh nets of growing weights: a Jacobian's norm is nowhere above that of W, where sigma' is 1."""
    source = torch.Generator().manual_seed(SEED)
    x = torch.rand(20, 8, generator=source, dtype=torch.float64)
    counts = {"contracting": 0, "contracting_settled": 0, "others": 0, "others_settled": 0}
    for seed in range(24):
        model = Layered((4, 12, 12, 8), "prototypical", "tanh", init="default", seed=seed, dtype=torch.float64)
        for name in ("W01", "W12"):
            model.get_parameter(name).mul_(0.4 + 0.2 * seed)
        kind = "contracting" if norm_of(model) < 1 else "others"
        counts[kind] += 1
        counts[f"{kind}_settled"] += settles(model, x)
    return [counts]


def norm_of(model: Layered) -> float:
    """The largest singular value of the symmetric W over all layers but the visible one."""
    sizes = model.sizes[:-1]
    ends = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    W = torch.zeros(ends[-1], ends[-1], dtype=torch.float64)
    for n in range(len(sizes) - 1):
        W[ends[n] : ends[n + 1], ends[n + 1] : ends[n + 2]] = model.weight(n)
    return float(torch.linalg.matrix_norm(W + W.T, 2))


def settles(model: PrimitiveDynamics, x: Tensor, steps: int = 600) -> bool:
    drive, s = model.drive(x), model.init_state(x)
    for _ in range(steps):
        before, s = s, model.step(drive, s)
        if bool((distance(s, before, 1) < 1e-6).all()):
            return True
    return False


EPOCHS, TRIALS, IMAGES = 5, 5, 20000


def smallest(device: str = "cpu") -> list[Document]:
    """Running train errors of the last of a few epochs, in percent, by trial; those of one seed start alike."""
    whole = papers.find("P-1h").phases
    errors = {}
    for case, steps in (("whole", {}), ("T", {"T": whole.T // 2}), ("K", {"K": whole.K // 2})):
        with TemporaryDirectory() as folder:
            given = {
                "estimators": ("ep",),
                "trials": TRIALS,
                "epochs": EPOCHS,
                "samples": IMAGES,
                "device": device,
                **steps,
            }
            result = train("P-1h", Path(folder) / "run", **given)
        trials = result.summary["estimators"]["ep"]["trials"]
        errors[case] = {str(trial["seed"]): trial["train_error"][-1] for trial in trials}
        print(case, errors[case], flush=True)
    return [{"name": "P-1h", "epochs": EPOCHS, "samples": IMAGES, "whole": errors.pop("whole"), "half": errors}]


MEASURES: dict[str, Callable[..., list[Document]]] = {
    "settling": settling,
    "losses": losses,
    "energy": energy,
    "contraction": contraction,
    "smallest": smallest,
}
LONG = ("settling", "smallest")
"""Those that take minutes on a CPU, and a device."""


def main() -> None:
    parser = argparse.ArgumentParser(description="What the paper says in words, measured.")
    parser.add_argument("name", choices=MEASURES)
    parser.add_argument("--write", action="store_true", help="write results/claims/NAME.json")
    parser.add_argument("--device", default="cpu", help=f"cpu or cuda, for {' and '.join(LONG)}")
    given = parser.parse_args()
    found = MEASURES[given.name](*([given.device] if given.name in LONG else []))
    for row in found:
        print(row)
    if given.write:
        made = provenance(torch.device(given.device))
        write_compact(RESULTS / f"{given.name}.json", [{**rounded(row), "provenance": made} for row in found])


if __name__ == "__main__":
    main()

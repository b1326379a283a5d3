"""Deep chains: errors per epoch, residuals per layer, and per-layer cosines of the update before and after training.

python -m benchmarks.depth deep-10 --seed 0 --out results/deep          writes results/deep/deep-10-ep-0.json
python -m benchmarks.depth deep-10 --estimator backprop --seed 0        its feed-forward twin
python -m benchmarks.depth deep-10 --gain 1 --name deep-10-gain-1       with another feedback gain
python -m benchmarks.depth deep-10 --seed 0 1 2 --rates 5e-4 1e-3 2e-3 4e-3 --tune-epochs 4
                                                                        three seeds, the rate chosen on held-out images

python -m benchmarks.depth --collect runs/deep                           into results/deep/trainings.json

A command that was stopped goes on from its last epoch. Errors of the last epoch and of the best one on the test set are
both recorded; the second is what some papers print.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

import eqprop.papers
from benchmarks.collect import rounded, write_compact
from eqprop.autodiff import in_own_precision
from eqprop.cost import Cost, Problem, SquaredError
from eqprop.data.images import Images, epoch_order, mnist, one_hot, split_validation
from eqprop.dynamics import set_nudge_site
from eqprop.engines.base import Job, load_engine
from eqprop.engines.eager import Agreement
from eqprop.estimators import EP, RBP, Backprop, Estimator
from eqprop.models.readout import READOUT_SEED, CrossEntropy
from eqprop.provenance import provenance
from eqprop.relax import Phase, Relaxation, relax
from eqprop.run.spec import Spec

TRAININGS = Path("results/deep/trainings.json")
CLASSES, EXAMINED, HELD_OUT = 10, 100, 10_000
"""Classes of MNIST, samples for cosines and residuals, and images held out to choose rates."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", default="deep-10")
    parser.add_argument("--collect", type=Path, nargs="+", help="folders of records, to make one file of")
    parser.add_argument("--estimator", choices=("ep", "backprop"), default="ep")
    parser.add_argument("--form", choices=("plain", "difference"))
    for name in ("lr", "gain"):
        parser.add_argument(f"--{name}", type=float)
    for name in ("epochs", "T", "K", "samples"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--optimizer")
    parser.add_argument("--eps", type=float, help="epsilon of Adam")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="to choose from on held-out training images")
    parser.add_argument("--tune-epochs", type=int, default=3, help="of each rate, with seed 0")
    parser.add_argument("--out", type=Path, default=Path("results/deep"))
    parser.add_argument("--name", help="of the records, before the seed; by default experiment-estimator")
    parser.add_argument("--tuned", type=Path, help="a record whose rate was chosen by --rates, to take it from there")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", help="by default xla for EP on a CPU, otherwise eager")
    return parser.parse_args()


def chosen(given: argparse.Namespace) -> Spec:
    """The experiment with what was asked for otherwise."""
    spec = eqprop.papers.find(given.experiment)
    rates = None if given.lr is None else {"*": given.lr}
    spec = spec.override(T=given.T, K=given.K, epochs=given.epochs, rates=rates, optimizer=given.optimizer)
    if given.form is not None:
        spec = spec.override(estimator={"form": given.form, "kind": spec.estimator.kind})
    if given.eps is not None:
        spec = spec.override(optimizer_options={"eps": given.eps})
    if given.gain is not None:
        links = [{**c, "feedback_gain": given.gain} if c["pre"] != "x" else c for c in spec.model.connections]
        spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, connections=links))
    return spec


def ep_of(spec: Spec) -> EP:
    phases, own = spec.phases, spec.estimator
    form, held = getattr(own, "form", "plain"), getattr(own, "held", False)
    return EP(phases.T, phases.K, beta=phases.beta, schedule=phases.schedule, form=form, held=held)


class Training:
    """One seed of an experiment, with its records; it goes on from its checkpoint."""

    def __init__(self, spec: Spec, estimator: Estimator, images: Images, path: Path, engine: str | None = None) -> None:
        seed = spec.run.seed
        self.spec, self.estimator, self.images, self.path = spec, estimator, images, path
        simple = isinstance(estimator, Backprop) or images.train_x.is_cuda
        self.engine = engine or ("eager" if simple else "xla")
        self.model = spec.model.build(seed, torch.float32)
        set_nudge_site(self.model, spec.model.nudge_site)
        self.cost: Cost = SquaredError()
        if spec.cost.kind == "cross-entropy":
            inputs = self.model.init_state(images.train_x[:1])[0].numel()
            self.cost = CrossEntropy(inputs, CLASSES, init=spec.model.init, seed=seed + READOUT_SEED)
        self.model.to(images.train_x.device)
        self.cost.to(images.train_x.device)
        named = [*self.model.named_parameters(), *self.cost.named_parameters()]
        rates = spec.rates([name for name, _ in named], self.model.layer_parameters)
        groups = [{"params": [p], "lr": rates[name]} for name, p in named]
        self.optimizer = getattr(torch.optim, spec.optimizer.kind)(groups, **spec.optimizer.options)
        self.records: list[dict[str, Any]] = []
        self.cosines: dict[str, Any] = {}
        self.chosen: dict[str, Any] | None = None

    def run(self, examines: bool = True) -> None:
        """All epochs that are left; `examines` whether cosines are measured before the first and after the last."""
        first = [group["lr"] for group in self.optimizer.param_groups]
        self._resume()
        targets = one_hot(self.images.train_y, CLASSES)
        job = Job(
            self.model, self.cost, self.estimator, self.optimizer, self.images.train_x, targets, self.images.train_y
        )
        runner = load_engine(self.engine).runner(job)
        if examines and not self.cosines:
            self.cosines["before"] = self.examined()
        for epoch in range(len(self.records), self.spec.optimizer.epochs):
            for group, rate in zip(self.optimizer.param_groups, first, strict=True):
                group["lr"] = self.spec.optimizer.rate_in(epoch, rate, 1.0)
            runner.take_rates()
            began = time.process_time()
            runner.reset()
            runner.run(epoch_order(self.spec.run.seed, epoch, len(targets), self.spec.optimizer.batch))
            seconds, seen = time.process_time() - began, runner.tally.read()
            record = {
                "epoch": epoch + 1,
                "error": self.error(),
                "running_train_error": 100 * seen["errors"][0] / seen["samples"][0],
                "unsettled": seen["unsettled"][0] / seen["samples"][0],
                "cpu_seconds": round(seconds, 1),
                "residuals": self.residuals(),
            }
            self.records.append(record)
            if examines and epoch + 1 == self.spec.optimizer.epochs:
                self.cosines["after"] = self.examined()
            self._save()
            print(self.path.stem, json.dumps({k: v for k, v in record.items() if k != "residuals"}), flush=True)

    @torch.no_grad()
    def error(self) -> float:
        """On the test set, or on the images held out, in percent."""
        wrong = 0
        for x, y in zip(self.images.test_x.split(1000), self.images.test_y.split(1000), strict=True):
            wrong += int((self.cost.scores(self.free(x).state).flatten(1).argmax(1) != y).sum())
        return 100.0 * wrong / len(self.images.test_x)

    def free(self, x: Tensor) -> Relaxation:
        if isinstance(self.estimator, Backprop):
            state = self.model.feedforward(x)
            return Relaxation(state, 1, x.new_zeros(len(x)), x.new_ones(len(x)).bool())
        return relax(self.model, x, self.estimator.free_phase())

    @torch.no_grad()
    def residuals(self) -> dict[str, list[float]]:
        """|F(x, s) - s| at the end of the free phase per layer: its median and its largest over samples."""
        if isinstance(self.estimator, Backprop):
            return {}
        x = self.images.train_x[:EXAMINED]
        s = self.free(x).state
        new = self.model.transition(x, s)
        apart = [(a - b).abs().flatten(1).amax(1) for a, b in zip(new, s, strict=True)]
        return {"median": [float(v.median()) for v in apart], "largest": [float(v.max()) for v in apart]}

    def examined(self) -> dict[str, Any]:
        """Cosines of each layer's update: of both forms in float32 with float64, with recurrent and plain backprop."""
        if isinstance(self.estimator, Backprop):
            return {}
        x, y = self.images.train_x[:EXAMINED], one_hot(self.images.train_y[:EXAMINED], CLASSES)
        problem, wide = Problem(self.model, self.cost, x, y), Problem(self.model, self.cost, x, y).double()
        free = relax(self.model, x, self.estimator.free_phase())
        wide_free = relax(wide.model, wide.x, Phase(4 * self.spec.phases.T, stop="settled", still=1e-14))
        same = replace(free, state=tuple(v.double() for v in free.state))
        found: dict[str, Any] = {}
        exact = RBP(0, 200, stop="settled", checked=False).estimate(wide, wide_free)[1]
        twin = named_gradient(Backprop(), wide) if self._has_twin(wide) else None
        for form in ("plain", "difference"):
            ep = replace(self._ep(), form=form, checked=False)
            single, double = ep.estimate(problem, free)[1], ep.estimate(wide, same)[1]
            found[form] = {
                "float64": cosines(single, double),
                "recurrent backprop": cosines(single, exact),
                **({} if twin is None else {"backprop": cosines(single, twin)}),
                "norm": {name: float(g.norm()) for name, g in single.items()},
            }
        return found

    def _ep(self) -> EP:
        return self.estimator if isinstance(self.estimator, EP) else ep_of(self.spec)

    def _has_twin(self, wide: Problem) -> bool:
        try:
            wide.model.feedforward(wide.x[:1])
        except ValueError:
            return False
        return True

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = {
            "model": self.model.state_dict(),
            "cost": self.cost.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        aside = self.path.with_suffix(".tmp")
        torch.save(kept, aside)
        aside.replace(self.path.with_suffix(".pt"))
        errors = [r["error"] for r in self.records]
        summary = {
            "experiment": self.spec.to_dict(),
            "estimator": repr(self.estimator),
            **({"tuning": self.chosen} if self.chosen else {}),
            "engine": self.engine,
            "judged_on": self.images.name,
            "test_samples": len(self.images.test_x),
            "last": errors[-1],
            "best": min(errors),
            "cpu_seconds": round(sum(r["cpu_seconds"] for r in self.records), 1),
            "epochs": self.records,
            "cosines": self.cosines,
            "provenance": provenance(self.images.train_x.device),
        }
        self.path.write_text(json.dumps(summary, indent=1) + "\n")

    def _resume(self) -> None:
        kept = self.path.with_suffix(".pt")
        if not (self.path.exists() and kept.exists()):
            return
        known, state = json.loads(self.path.read_text()), torch.load(kept, weights_only=True, map_location="cpu")
        if known["experiment"] != json.loads(json.dumps(self.spec.to_dict())):
            raise SystemExit(f"{self.path} is of other settings. Give --name, or remove it.")
        self.records, self.cosines = known["epochs"], known["cosines"]
        self.model.load_state_dict(state["model"])
        self.cost.load_state_dict(state["cost"])
        self.optimizer.load_state_dict(state["optimizer"])


def named_gradient(estimator: Estimator, problem: Problem) -> dict[str, Tensor]:
    names = {p: name for name, p in problem.model.named_parameters()}
    grads = estimator.gradient(problem.model, problem.cost, problem.x, problem.y)[1]
    return {names[p]: g for p, g in grads.items() if p in names}


def cosines(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float | None]:
    return {name: Agreement.of(a[name], g).to_dict()["cosine"] for name, g in b.items()}


@in_own_precision
def main() -> None:
    given = parsed()
    if given.collect:
        collect(given.collect)
        return
    spec = chosen(given)
    images = mnist(given.device)
    if given.samples:
        images = replace(images, train_x=images.train_x[: given.samples], train_y=images.train_y[: given.samples])
    estimator: Estimator = Backprop() if given.estimator == "backprop" else ep_of(spec)
    name = given.name or f"{given.experiment}-{given.estimator}"
    tuning = tuned(spec, estimator, images, given, name) if given.rates else None
    if given.tuned is not None:
        tuning = json.loads(given.tuned.read_text())["tuning"]
    if tuning is not None:
        spec = spec.override(rates={"*": tuning["chosen"]})
    for seed in given.seed:
        training = Training(
            spec.override(seed=seed), estimator, images, given.out / f"{name}-{seed}.json", given.engine
        )
        training.chosen = tuning
        training.run()


def tuned(spec: Spec, estimator: Estimator, images: Images, given: argparse.Namespace, name: str) -> dict[str, Any]:
    """The rate with the least error on held-out training images after a few epochs, and the errors of all."""
    apart, found = split_validation(images, HELD_OUT), {}
    for rate in given.rates:
        one = spec.override(rates={"*": rate}, epochs=given.tune_epochs, decay="none")
        training = Training(one, estimator, apart, given.out / "tuning" / f"{name}-{rate:g}.json", given.engine)
        training.run(examines=False)
        found[f"{rate:g}"] = training.records[-1]["error"]
    chosen = float(min(found, key=found.__getitem__))
    return {"chosen": chosen, "held_out": HELD_OUT, "epochs": given.tune_epochs, "seed": 0, "errors": found}


def collect(folders: list[Path]) -> None:
    """The records in these folders in the place of those of the same name and seed, in results/deep/trainings.json."""
    known = {(d["record"], d["seed"]): d for d in (json.loads(TRAININGS.read_text()) if TRAININGS.exists() else [])}
    for path in sorted(p for folder in folders for p in folder.glob("*.json")):
        found = json.loads(path.read_text())
        record, _, seed = path.stem.rpartition("-")
        known[record, int(seed)] = rounded(kept(record, int(seed), found))
    TRAININGS.parent.mkdir(parents=True, exist_ok=True)
    write_compact(TRAININGS, [known[key] for key in sorted(known)])


def kept(record: str, seed: int, found: dict[str, Any]) -> dict[str, Any]:
    """What a page needs of a record."""
    spec, epochs = found["experiment"], found["epochs"]
    gains = {c.get("feedback_gain", 1.0) for c in spec["model"].get("connections", []) if c["pre"] != "x"}
    return {
        "record": record,
        "name": spec["name"],
        "preset": spec["preset"],
        "estimator": "backprop" if found["estimator"].startswith("Backprop") else "ep",
        "form": spec["estimator"].get("form", "plain"),
        "feedback_gain": gains.pop() if len(gains) == 1 else None,
        "seed": seed,
        "phases": {n: spec["phases"][n] for n in ("T", "K", "beta")},
        "rates": spec["optimizer"]["rates"],
        "epochs": spec["optimizer"]["epochs"],
        "decay": spec["optimizer"]["decay"],
        "tuning": found.get("tuning"),
        "engine": found["engine"],
        "last": found["last"],
        "best": found["best"],
        "test_error": [e["error"] for e in epochs],
        "running_train_error": [e["running_train_error"] for e in epochs],
        "unsettled": [e["unsettled"] for e in epochs],
        "largest_residual": [e["residuals"].get("largest") for e in epochs],
        "cpu_seconds": found["cpu_seconds"],
        "cosines": found["cosines"],
        "provenance": found["provenance"] | {"command": re.sub(r" --out \S+", "", found["provenance"]["command"])},
    }


if __name__ == "__main__":
    main()

"""What a refactoring must not change: trained weights, GDU numbers, gradients of `backward`, the keys of every JSON.

    python tests/guard/guard.py check               record afresh and compare with before.json; a line per difference
    python tests/guard/guard.py record FILE         write what this checkout does
    python tests/guard/guard.py compare BEFORE NOW  compare two records

`--names` picks cases of training (whole names or their first word), `--only` a part: weights, gradients, documents.
With PYTHONPATH=OTHER/src another checkout's code is recorded: this script uses only what both sides of a refactoring
share, the command line and `eqprop.train`, `load` and `backward`. Options that may be renamed stand in OPTIONS alone.

Compared are
    weights     SHA-256 of the parameters after up to 50 iterations, equal where one processor with one torch made both
                records (see `provenance`); on another machine they are skipped, which a last line says
    gradients   `.grad` and the final state after `backward`, within what the engines' contract grants
    numbers     of `gdu`, to ten digits; what is below 1e-13 is rounding
    keys        of the JSON that commands write, none lost

The table renamed.json names what changed on purpose, each with its reason in a sentence:
    renamed     a key's path before -> now; what lies below it moves along
    removed     a key's path -> why it is gone, with what lies below it
    weights     a case -> why its weights changed
    numbers     a number's path -> why it changed
A path is that of one document, "train: /settings/seed", or of all, "/settings/seed". An entry that fits no key of the
record, or a reason that is no sentence, is itself a difference. New keys need no entry.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import math
import os
import re
import runpy
import signal
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import eqprop
from eqprop.models import Convolutional, Layered
from eqprop.provenance import provenance

HERE = Path(__file__).resolve().parent
BEFORE, RENAMED, NETS = HERE / "before.json", HERE / "renamed.json", HERE / "own_nets.py"
PARTS = ("weights", "gradients", "documents")
BATCH = 20
OPTIONS = {
    "estimator": "--estimator",
    "engine": "--engine",
    "device": "--device",
    "epochs": "--epochs",
    "samples": "--samples",
    "test_samples": "--test-samples",
    "batch": "--batch",
    "trials": "--trials",
    "threads": "--threads",
    "schedule": "--schedule",
    "T": "--T",
    "K": "--K",
    "beta": "--beta",
    "rate": "--lr",
    "augment": "--augment",
    "model": "--model",
    "data": "--data",
    "out": "--out",
    "budget": "--budget",
    "json": "--json",
}
"""What the guard sets, and the option of the command line that does."""
SWITCHES = {"stacked": ("--stacked", "--no-stacked")}
FREE = ("cpu_seconds", "seconds", "provenance")
"""What two runs of one command differ in."""


# Training


@dataclass(frozen=True)
class Case:
    """A net to train by every estimator on every engine; one run each, of one epoch unless told.

    target      an experiment's name, or one of own_nets.py
    iterations  of BATCH samples; few where one takes long
    """

    target: str
    estimators: Sequence[str] = ("ep", "bptt")
    engines: Sequence[str] = ("eager",)
    iterations: int = 50
    options: Mapping[str, Any] = field(default_factory=dict)
    images: str = "mnist"

    @property
    def own(self) -> bool:
        return self.target.startswith(NETS.name)


GRAPH = {"T": 8, "K": 4, "schedule": "sweeps"}
OWN = {"T": 20, "K": 6, "beta": 0.1, "rate": 0.05}
CASES = {
    "EB-1h": Case("EB-1h"),
    "EB-2h": Case("EB-2h", iterations=10),
    "P-1h": Case("P-1h"),
    "P-2h": Case("P-2h"),
    "P-3h": Case("P-3h", iterations=10),
    "P-conv": Case("P-conv", iterations=2),
    "nudging": Case("P-1h", ("ep-symmetric", "ep-random-sign")),
    "continual": Case("P-1h", ("ep-continual", "ep-holomorphic", "rbp")),
    "sweeps": Case("P-2h", options={"schedule": "sweeps", "T": 20, "K": 6}),
    "stacked": Case("P-1h", options={"trials": 2, "stacked": True, "T": 15, "K": 6}),
    "apart": Case("P-1h", ("ep",), options={"trials": 2, "stacked": False, "T": 15, "K": 6}),
    "persistent": Case("scellier-bengio-2017", ("ep-random-sign",), iterations=10, options={"T": 10, "epochs": 2}),
    "skip": Case(f"{NETS.name}:skip", iterations=10, options=GRAPH | OWN),
    "cifar": Case(
        "cifar10-small",
        ("ep-symmetric", "ep"),
        iterations=4,
        options={"T": 8, "K": 4, "test_samples": 20, "augment": ("flip=true", "crop=4")},
        images="colour",
    ),
    "energy": Case(f"{NETS.name}:energy", options=OWN),
}
ON_GPU = {
    name: Case(name, engines=("cuda-graph", engine))
    for name, engine in {
        **dict.fromkeys(("EB-1h", "P-1h"), "cuda-one-hidden"),
        **dict.fromkeys(("EB-2h", "P-2h", "P-3h"), "cuda-deep"),
        "P-conv": "cuda-conv",
    }.items()
}


def words(**options: Any) -> list[str]:
    """The words of a command line for these options; a tuple repeats its option."""
    found: list[str] = []
    for name, value in options.items():
        if name in SWITCHES:
            found.append(SWITCHES[name][not value])
        else:
            for one in value if isinstance(value, tuple) else (value,):
                found += [OPTIONS[name], str(one)]
    return found


def command(*line: str) -> None:
    """`python -m eqprop LINE`, in this process: an import less."""
    before, sys.argv = sys.argv, ["eqprop", *line]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            runpy.run_module("eqprop", run_name="__main__")
    except SystemExit as end:
        if end.code not in (0, None):
            raise RuntimeError(f"eqprop {' '.join(line)} ended with {end.code}:\n{said.getvalue()}") from None
    finally:
        sys.argv = before


def small_mnist(folder: Path, samples: int = 1000) -> Path:
    """The first images of MNIST as IDX files: reading and writing them takes no code of the package."""
    source = Path(eqprop.__file__).parent / "data" / "mnist"
    folder.mkdir()
    for stem, count in (("train", samples), ("t10k", 100)):
        for kind in ("images-idx3", "labels-idx1"):
            content = gzip.decompress((source / f"{stem}-{kind}-ubyte.gz").read_bytes())
            head = 4 + 4 * content[3]
            each = math.prod(struct.unpack(f">{content[3]}I", content[4:head])[1:])
            cut = content[:4] + struct.pack(">I", count) + content[8:head] + content[head : head + count * each]
            (folder / f"{stem}-{kind}-ubyte").write_bytes(cut)
    return folder


def colour_images(path: Path) -> Path:
    """Random images of CIFAR's shape and their labels."""
    source = np.random.default_rng(0)
    sets = {"": 200, "_test": 20}
    images = {f"x{end}": source.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8) for end, n in sets.items()}
    labels = {f"y{end}": source.permutation(np.arange(n) % 10) for end, n in sets.items()}
    np.savez(path, **images, **labels)
    return path


def digest(model: nn.Module) -> str:
    """SHA-256 of every parameter."""
    found = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        found.update(f"0.{name} {tuple(p.shape)}".encode() + p.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class Place:
    """Where the guard works: its data sets by name, a folder to write to, the device."""

    images: Mapping[str, Path]
    scratch: Path
    device: str = "cpu"

    def line(self, case: Case, estimator: str, engine: str, out: Path) -> list[str]:
        """The words that train this case."""
        target = str(NETS.with_name(case.target)) if case.own else case.target
        always = {"epochs": 1, "threads": 1, "batch": BATCH, "samples": BATCH * case.iterations, "device": self.device}
        where = {"estimator": estimator, "engine": engine, "data": self.images[case.images], "out": out}
        return ["train", target, *words(**(always | dict(case.options) | where))]


def trained(case: Case, estimator: str, out: Path) -> list[str]:
    """Hashes of a run's networks, trial by trial."""
    factory = own_net(case.target.partition(":")[2]) if case.own else None
    trials = range(int(case.options.get("trials", 1)))
    return [digest(eqprop.load(out, estimator, n, model=factory).model) for n in trials]


def own_net(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = runpy.run_path(str(NETS))[name]
    return found


def weights(name: str, case: Case, place: Place) -> Iterator[tuple[str, str]]:
    """Every run of a case, and what it learnt."""
    for engine in case.engines:
        for estimator in case.estimators:
            out = place.scratch / f"{name}-{estimator}-{engine}"
            command(*place.line(case, estimator, engine, out))
            hashes = trained(case, estimator, out)
            for trial, found in enumerate(hashes):
                yield f"{name} {estimator} {engine}" + f" {trial}" * (len(hashes) > 1), found


class Interrupting(eqprop.Watch):
    """Sends this process a real SIGINT some time after training begins."""

    def __init__(self, after: float) -> None:
        self.timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))

    def begin_leg(self, *leg: Any) -> None:
        self.timer.start()


def stopped(place: Place) -> tuple[str, str]:
    """A run that a signal stops in its epoch, resumed: it ends as the run "EB-1h ep eager" does."""
    case, after = CASES["EB-1h"], 1.0
    for attempt in range(8):
        out = place.scratch / f"stopped-{attempt}"
        watch = Interrupting(after)
        options = {"epochs": 1, "threads": 1, "batch": BATCH, "engine": "eager", "device": place.device}
        try:
            eqprop.train(case.target, out, data=str(place.images["mnist"]), watch=watch, samples=1000, **options)
        except KeyboardInterrupt:
            halfway = trained(case, "ep", out)[0]
            command("resume", str(out))
            found = trained(case, "ep", out)[0]
            if halfway != found:
                return "EB-1h ep eager, stopped and resumed", found
        finally:
            watch.timer.cancel()
        after /= 2
    raise RuntimeError("The run ended before the signal came, eight times; expected to stop it in its epoch.")


# Gradients


def gradient_nets(dtype: torch.dtype) -> dict[str, nn.Module]:
    return {
        "layered": Layered((3, 5, 4, 6), "prototypical", "tanh", init="default", seed=0, dtype=dtype),
        "energy-based": Layered((3, 5, 6), "energy-based", "sigmoid", eps=0.5, seed=0, dtype=dtype),
        "convolutional": Convolutional((1, 6, 6), (2,), (3,), kernel=3, seed=0, dtype=dtype),
        "graph": own_net("skip")(0, dtype, side=8, outputs=3),
        "own energy": own_net("energy")(0, dtype, (3, 5, 6)),
    }


def estimators() -> dict[str, eqprop.Estimator]:
    T, K, beta = 20, 6, 0.1
    return {
        "EP": eqprop.EP(T, K, beta),
        "EP symmetric": eqprop.EP(T, K, beta, "symmetric"),
        "EP sweeps": eqprop.EP(T, K, beta, schedule="sweeps"),
        "BPTT": eqprop.BPTT(T, K),
        "RBP": eqprop.RBP(T, K),
        "ContinualEP": eqprop.ContinualEP(T, K, beta, rates=0.01),
        "HolomorphicEP": eqprop.HolomorphicEP(T, K, beta),
    }


def backward(model: Any, estimator: eqprop.Estimator, dtype: torch.dtype) -> dict[str, list[float]]:
    """The gradient and the state by name; what a refusal is called, where there is no gradient."""
    source = torch.Generator().manual_seed(1)
    x = torch.rand((3, *(model.input_shape or (6,))), generator=source, dtype=torch.float64).to(dtype)
    y = torch.eye(3, dtype=dtype)[[1, 2, 1]]
    try:
        free = estimator.backward(model, eqprop.SquaredError(), x, y)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        return {f"refused with {type(error).__name__}": []}
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    named = grads | {f"s{n}": layer for n, layer in enumerate(free.state)}
    return {name: v.detach().double().flatten().tolist() for name, v in named.items()}


def gradients() -> dict[str, dict[str, list[float]]]:
    return {
        f"{net} {name} {str(dtype).removeprefix('torch.')}": backward(gradient_nets(dtype)[net], estimator, dtype)
        for dtype in (torch.float64, torch.float32)
        for net in gradient_nets(dtype)
        for name, estimator in estimators().items()
    }


# Documents


def documents(place: Place) -> Iterator[tuple[str, Any]]:
    """What every command writes with --json."""
    mnist, scratch = place.images["mnist"], place.scratch
    run, own = str(scratch / "documented"), f"{NETS}:energy"
    small = {"epochs": 1, "T": 5, "K": 2, "data": mnist, "engine": "eager", "threads": 1}
    tune = {"data": mnist, "budget": 1}
    for name, line in {
        "gdu toy": ["gdu", "toy", *words(batch=20)],
        "gdu P-1h": ["gdu", "P-1h"],
        "gdu own": ["gdu", own, *words(T=60, K=6, beta=0.01)],
        "doctor": ["doctor", own, *words(**OWN)],
        "list": ["list"],
        "train": ["train", "P-1h", *words(**small, estimator="ep,bptt", out=run)],
        "resume": ["resume", run],
        "evaluate": ["evaluate", run],
        "gdu run": ["gdu", run],
        "tune": ["tune", "P-1h", *words(**tune, out=scratch / "tuned")],
        "tune search": ["tune", "P-1h", *words(**tune, out=scratch / "searched"), "--search", "2"],
    }.items():
        file = scratch / "document.json"
        with contextlib.suppress(SystemExit):  # a doctor who finds a cause ends with 1
            run_anyway(line, file)
        yield name, json.loads(file.read_text())
        file.unlink()


def run_anyway(line: Sequence[str], file: Path) -> None:
    """Run a command that may end with a complaint, as long as it writes its document."""
    try:
        command(*line, *words(json=file))
    except RuntimeError:
        if not file.is_file():
            raise


def numbers(value: Any, path: str = "") -> dict[str, float]:
    """Every number of a document by its path, those that vary aside."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {}
    if isinstance(value, int | float):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {p: v for k, x in items if k not in FREE for p, v in numbers(x, f"{path}/{k}").items()}


def keys(value: Any) -> list[str]:
    """The paths of a document, the places of lists left out."""
    found: set[str] = set()

    def walk(at: Any, path: str) -> None:
        if isinstance(at, dict):
            for key, item in at.items():
                found.add(f"{path}/{key}")
                walk(item, f"{path}/{key}")
        elif isinstance(at, list):
            for item in at:
                walk(item, f"{path}/[]")

    walk(value, "")
    return sorted(found)


def written(document: Any) -> str:
    """JSON with a list of numbers on one line."""
    text = json.dumps(document, indent=1)
    return re.sub(r"\[[^][{}\"]+\]", lambda found: " ".join(found[0].split()), text) + "\n"


def record(device: str, parts: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """All that is guarded, as a document."""
    torch.set_num_threads(1)
    out: dict[str, Any] = {"provenance": provenance(device)}
    on_gpu = torch.device(device).type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        images = {"mnist": small_mnist(root / "mnist"), "colour": colour_images(root / "colour.npz")}
        place = Place(images, root, device)
        if "weights" in parts:
            chosen = {name: case for name, case in (ON_GPU if on_gpu else CASES).items() if picked(name, names)}
            found = dict(pair for name, case in chosen.items() for pair in weights(name, case, place))
            if not on_gpu and picked("EB-1h", names):
                found.update([stopped(place)])
            out["weights"] = found
        if "gradients" in parts:
            out["gradients"] = gradients()
        if "documents" in parts:
            found = dict(documents(place))
            out["numbers"] = {name: numbers(found[name]) for name in ("gdu toy", "gdu P-1h", "gdu own")}
            out["keys"] = {name: keys(document) for name, document in found.items()}
    return out


def picked(name: str, names: Sequence[str]) -> bool:
    """Whether a case is among these names; none means all."""
    return not names or name in names or name.split()[0] in names


# Comparison

SMALL = {"float64": 1e-11, "float32": 5e-6}
"""The relative error that is always granted, as the engines' contract has it."""
ROUNDING = 1e-13
"""Numbers of `gdu` below this are rounding itself."""
LUCK = 4.0
"""In float32 so many times what the record errs beside float64: of two orders of sums, one errs twice as much as the
other in one case of ten, either of them (84 weights of the graph in sweeps, 12 seeds)."""


def moved(document: str, path: str, table: Mapping[str, str]) -> str | None:
    """The table's entry for the longest part of the path that it names."""
    parts = path.split("/")
    for end in range(len(parts), 1, -1):
        head = "/".join(parts[:end])
        for entry in (f"{document}: {head}", head):
            if entry in table:
                return entry
    return None


def expected_key(document: str, path: str, table: Mapping[str, Mapping[str, str]], used: set[str]) -> str | None:
    """What a key is called now; None where it was removed. Entries that were needed are added to `used`."""
    if (gone := moved(document, path, table["removed"])) is not None:
        used.add(gone)
        return None
    if (entry := moved(document, path, table["renamed"])) is not None:
        used.add(entry)
        before = entry.partition(": ")[2] or entry
        return table["renamed"][entry] + path.removeprefix(before)
    return path


def of_table(table: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Reasons that are none."""
    for part in ("removed", "weights", "numbers"):
        for entry, reason in table[part].items():
            if not isinstance(reason, str) or len(reason.split()) < 3:
                yield f"renamed.json: {part} of {entry} has the reason {reason!r}; expected a sentence"


def of_weights(before: Mapping[str, str], now: Mapping[str, str], table: Mapping[str, str]) -> Iterator[str]:
    for key, value in before.items():
        got = now.get(key, "nothing")
        if got != value and key not in table:
            yield f"weights of {key}: {value[:16]} before, {got[:16]} now"


def of_gradients(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key, values in before.items():
        if set(values) != set(now.get(key, {})):
            yield f"gradients of {key}: {' '.join(values)} before, {' '.join(now.get(key, {})) or 'nothing'} now"
            continue
        dtype = key.split()[-1]
        exact = before.get(key.replace("float32", "float64"), values)
        allowed = max([SMALL[dtype], *(LUCK * error(v, exact[name]) for name, v in values.items() if name in exact)])
        for name, value in values.items():
            found = error(now[key][name], exact.get(name, value))
            if found > allowed:
                yield f"gradients of {key}: {name} errs by {found:.1e}; expected at most {allowed:.1e}"


def error(actual: Sequence[float], exact: Sequence[float]) -> float:
    """|actual - exact| / |exact| in the Euclidean norm; NaN and another size are infinitely wrong."""
    if len(actual) != len(exact):
        return math.inf
    a, b = torch.tensor(actual, dtype=torch.float64), torch.tensor(exact, dtype=torch.float64)
    found = float((a - b).norm() / b.norm().clamp_min(1e-30))
    return math.inf if math.isnan(found) else found


def of_numbers(before: Mapping[str, Any], now: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[str]:
    for name, values in before.items():
        for path, value in values.items():
            now_at = expected_key(name, path, table, set())
            if now_at is None or moved(name, path, table["numbers"]) is not None:
                continue
            got = now.get(name, {}).get(now_at)
            if got is None or not math.isclose(got, value, rel_tol=1e-10, abs_tol=ROUNDING):
                yield f"{name} {now_at}: {value} before, {got} now"


def of_keys(before: Mapping[str, Any], now: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[str]:
    used: set[str] = set()
    for name, paths in before.items():
        here = set(now.get(name, ()))
        for path in paths:
            expected = expected_key(name, path, table, used)
            if expected is not None and expected not in here:
                yield f"keys of {name}: {expected} is missing"
    for part in ("renamed", "removed"):
        for entry in table[part]:
            if entry not in used:
                yield f"renamed.json: {part} {entry} fits no key of the record"


def differences(before: Mapping[str, Any], now: Mapping[str, Any], table: Mapping[str, Any]) -> list[str]:
    """What is not as before, a line each. Parts that one of the records lacks are not compared."""
    found = list(of_table(table))
    both = set(before) & set(now)
    if "weights" in both and one_machine(before, now):
        found += of_weights(before["weights"], now["weights"], table["weights"])
    if "gradients" in both:
        found += of_gradients(before["gradients"], now["gradients"])
    if "numbers" in both:
        found += of_numbers(before["numbers"], now["numbers"], table)
    if "keys" in both:
        found += of_keys(before["keys"], now["keys"], table)
    return found


def one_machine(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return all(before["provenance"][key] == now["provenance"][key] for key in ("processor", "torch", "device"))


def chosen(before: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A record with the weights of these cases only."""
    kept = {key: v for key, v in before["weights"].items() if picked(key, names)} if "weights" in before else {}
    return {**before, "weights": kept}


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """Print the differences of two records; the exit code."""
    found = differences(before, now, json.loads(RENAMED.read_text()))
    counts = ", ".join(
        f"{len(now[part])} {part}" for part in ("weights", "gradients", "numbers", "keys") if part in now
    )
    print("\n".join(found) or f"unchanged: {counts}")
    if "weights" in now and not one_machine(before, now):
        print("weights were not compared: the record is another processor's, device's or torch's")
    return int(bool(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording, checking, comparing = (commands.add_parser(name) for name in ("record", "check", "compare"))
    recording.add_argument("file", type=Path)
    checking.add_argument("--before", type=Path, default=BEFORE)
    comparing.add_argument("before", type=Path)
    comparing.add_argument("now", type=Path)
    for command in (recording, checking):
        command.add_argument("--device", default="cpu")
        command.add_argument("--only", choices=PARTS)
    for command in (recording, checking, comparing):
        command.add_argument("--names", nargs="+", default=(), help="cases of training")
    given = parser.parse_args()
    if given.command == "compare":
        before, now = (json.loads(path.read_text()) for path in (given.before, given.now))
        return compare(chosen(before, given.names), now)
    now = record(given.device, [given.only] if given.only else PARTS, given.names)
    if given.command == "record":
        given.file.write_text(written(now))
        return 0
    return compare(chosen(json.loads(given.before.read_text()), given.names), now)


if __name__ == "__main__":
    sys.exit(main())

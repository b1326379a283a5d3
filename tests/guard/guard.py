"""What a refactoring must not change: weights after 50 iterations, GDU numbers, the keys of every command's JSON.

    python tests/guard/guard.py record FILE [--device cuda] [--only weights]
    python tests/guard/guard.py check BEFORE AFTER

`record` writes what this checkout does. `check` compares two such records: hashes of weights must be equal where both
were made on one processor with one torch, numbers must agree to ten digits, and keys must be those of the table
renamed.json beside this file, applied to the earlier ones. There too: numbers at the level of rounding (1e-12 and
below) that moved when differences came before sums, a key that said what its parent's key says now, and the weights
whose last bits that change of sums moved. That table names as well what changed on purpose: `weights`
lists the EP weights of the engines that leave the update to the model, which since takes differences before it sums.
Hashes depend on the processor: record before and after a change on one machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import eqprop
from eqprop.provenance import provenance
from eqprop.run import Settings, train

HERE = Path(__file__).resolve().parent
RENAMED = HERE / "renamed.json"
EXPERIMENTS = ("EB-1h", "EB-2h", "P-1h", "P-2h", "P-3h", "P-conv")
ESTIMATORS = ("ep", "bptt")
SAMPLES, BATCH = 1000, 20
"""50 iterations in one epoch."""
ENGINES = {
    "cpu": dict.fromkeys(EXPERIMENTS, ("eager", "cpu")),
    "cuda": {
        name: ("cuda-graph", {"1": "cuda-one-hidden", "c": "cuda-conv"}.get(name.partition("-")[2][0], "cuda-deep"))
        for name in EXPERIMENTS
    },
}
FREE = ("cpu_seconds", "seconds", "provenance")
"""What two runs of one command differ in."""


def small_mnist(folder: Path) -> Path:
    """The first images of MNIST as IDX files: reading and writing them takes no code of the package."""
    source = Path(eqprop.__file__).parent / "data" / "mnist"
    for stem, count in (("train", SAMPLES), ("t10k", 100)):
        for kind in ("images-idx3", "labels-idx1"):
            content = gzip.decompress((source / f"{stem}-{kind}-ubyte.gz").read_bytes())
            head = 4 + 4 * content[3]
            each = math.prod(struct.unpack(f">{content[3]}I", content[4:head])[1:])
            cut = content[:4] + struct.pack(">I", count) + content[8:head] + content[head : head + count * each]
            (folder / f"{stem}-{kind}-ubyte").write_bytes(cut)
    return folder


def weights(name: str, estimator: str, engine: str, device: str, data: Path) -> str:
    """SHA-256 of every parameter after one epoch of 50 iterations."""
    key = "methods" if "methods" in {f.name for f in dataclasses.fields(Settings)} else "estimators"
    options: dict[str, Any] = {"engine": engine, "device": device, "epochs": 1, "threads": 1, key: (estimator,)}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        train(name, out, data=str(data), **options)
        (path,) = out.glob("*/weights-*.safetensors")
        found = hashlib.sha256()
        for parameter, value in sorted(load_file(path).items()):
            found.update(f"{parameter} {tuple(value.shape)}".encode() + value.numpy().tobytes())
    return found.hexdigest()


def command(*words: str) -> Any:
    """The JSON a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "eqprop", *words, "--json", "-"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )
    return json.loads(done.stdout)


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


def documents(data: Path, scratch: Path) -> dict[str, Any]:
    """What every command with --json prints."""
    option = "--method" if "methods" in {f.name for f in dataclasses.fields(Settings)} else "--estimator"
    run = str(scratch / "run")
    small = ("P-1h", "--epochs", "1", "--T", "5", "--K", "2", "--data", str(data), "--engine", "eager")
    return {
        "gdu toy": command("gdu", "toy"),
        "gdu P-1h": command("gdu", "P-1h"),
        "list": command("list", "P-1h"),
        "train": command("train", *small, option, "ep,bptt", "--out", run),
        "resume": command("resume", run),
        "evaluate": command("evaluate", run),
        "tune": command("tune", "P-1h", "--data", str(data), "--budget", "1", "--out", str(scratch / "tuned")),
        "tune search": command(
            *("tune", "P-1h", "--data", str(data), "--budget", "1", "--search", "2", "--out", str(scratch / "searched"))
        ),
        "gdu run": command("gdu", run),
    }


def record(device: str, only: str | None, names: Sequence[str] = EXPERIMENTS) -> dict[str, Any]:
    torch.set_num_threads(1)
    out: dict[str, Any] = {"provenance": provenance(device), "weights": {}}
    with tempfile.TemporaryDirectory() as folder:
        data = small_mnist(Path(folder))
        if only != "documents":
            for name in names:
                for engine in ENGINES[torch.device(device).type][name]:
                    for estimator in ESTIMATORS:
                        key = f"{name} {estimator} {engine}"
                        out["weights"][key] = weights(name, estimator, engine, device, data)
                        print(key, out["weights"][key][:16], flush=True)
        if only != "weights":
            with tempfile.TemporaryDirectory() as scratch:
                found = documents(data, Path(scratch))
            out["numbers"] = {name: numbers(found[name]) for name in ("gdu toy", "gdu P-1h")}
            out["keys"] = {name: keys(document) for name, document in found.items()}
    return out


def renamed(path: str, table: dict[str, str]) -> str:
    return "/".join(table.get(part, part) for part in path.split("/"))


def differences(before: dict[str, Any], after: dict[str, Any], table: dict[str, Any]) -> list[str]:
    """What a check complains about, a line each."""
    same = all(before["provenance"][key] == after["provenance"][key] for key in ("processor", "torch", "device"))
    found = [] if same else ["the records come from different machines or versions: weights are not comparable"]
    for key, value in before["weights"].items():
        if key not in table["weights"] and after["weights"].get(key) != value:
            found.append(f"weights {key}: {value[:16]} before, {str(after['weights'].get(key))[:16]} after")
    for name, values in before.get("numbers", {}).items() if "numbers" in after else ():
        expected = {renamed(path, table["keys"]): value for path, value in values.items()}
        for path, value in expected.items():
            got = after["numbers"][name].get(path)
            if path not in table["changed"] and not (got is not None and math.isclose(got, value, rel_tol=1e-10)):
                found.append(f"{name} {path}: {value} before, {got} after")
    for name, paths in before.get("keys", {}).items() if "keys" in after else ():
        kept = {renamed(path, table["keys"]) for path in paths} - set(table["removed"])
        expected = kept | set(table["added"].get(name, []))
        for path in sorted(expected ^ set(after["keys"][name])):
            found.append(f"keys of {name}: {path} {'is missing' if path in expected else 'is new'}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("record")
    making.add_argument("file", type=Path)
    making.add_argument("--device", default="cpu")
    making.add_argument("--only", choices=("weights", "documents"))
    making.add_argument("--names", nargs="+", default=list(EXPERIMENTS), help="experiments to train")
    checking = commands.add_parser("check")
    checking.add_argument("before", type=Path)
    checking.add_argument("after", type=Path)
    checking.add_argument("--names", nargs="+", default=list(EXPERIMENTS), help="experiments to compare")
    given = parser.parse_args()
    if given.command == "record":
        given.file.write_text(json.dumps(record(given.device, given.only, given.names), indent=1) + "\n")
        return
    before, after = (json.loads(path.read_text()) for path in (given.before, given.after))
    before["weights"] = {key: v for key, v in before["weights"].items() if key.split()[0] in given.names}
    found = differences(before, after, json.loads(RENAMED.read_text()))
    print("\n".join(found) or f"unchanged: {len(before['weights'])} sets of weights, numbers and keys")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

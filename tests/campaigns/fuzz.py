"""Fuzz the command line: random command lines, experiment files and damaged run folders.

Every case follows from the seed and its number alone. Cases run one after the other in a process forked from one that
has the command line imported; the next one takes over where a case ends it. A case fails if it

  ends in a traceback, or in a raw message of Python instead of a sentence;
  takes more than 30 seconds of a processor;
  writes outside the folders and files that its words name, as seen by an audit hook and by the files next to them.

Words name devices and files of the system, which root may write to: as root such words are left out.

    python tests/campaigns/fuzz.py --commands 5000 --files 2000 --folders 2000 --out results/fuzz.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.forked import fork

LIMIT = 30.0
"""Seconds of a processor that a case may take, so that other work on the machine does not count."""
PATIENCE = 10.0
"""By the clock it may take so many times that; what waits for something that never comes ends there."""
KINDS = ("commands", "files", "folders")
MIXED = "mixed"
"""All kinds in turn: the short form."""
RAW = re.compile(
    r"Traceback|'NoneType'|object is not|has no attribute|unsupported operand|not supported between|unexpected keyword|"
    r"object cannot be|positional argument|unhashable|not enough values|too many values|out of range\b"
)
"""Messages of Python itself, which say nothing about what to do."""


@dataclass(frozen=True)
class Case:
    """One command, and what it may write to: paths, relative to the current folder."""

    words: list[str]
    may_write: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """A case that failed."""

    kind: str
    number: int
    what: str
    words: list[str]
    detail: str


# What is drawn.

ORDINARY = os.geteuid() != 0


def harmless(words: Sequence[str]) -> tuple[str, ...]:
    """Without devices and files of the system, for root."""
    return tuple(word for word in words if ORDINARY or not word.startswith(("/dev", "/proc", "/etc", "~")))


HOSTILE_WORDS = """
- -- -1 0 00 1e3 1_0 0x10 nan inf -inf 1e308 -1e308 1e-320 1.5 ٣ true None null [] {} [/b] $x$ =cmd <b> \\ %s {0} é 漢字
../../x . .. ~ /dev/null/x /proc/self/mem /proc/1/x x:y : * ? cuda:99 meta cpu:7 mps lazy
P-1 EP ep,ep ep, , ep-holomorphic W01= =1 W99=1 lr=5 momentum=x =
"""
HOSTILE_TEXT = (
    *harmless(HOSTILE_WORDS.split()),
    *("", " ", "\udcff", "\x1b[2J", "a\nb", str(2**31), str(2**63), str(2**64 + 30), "9" * 400, "a" * 300, "a/" * 200),
)
VALID: dict[str, Sequence[str]] = {
    "--T": ("1", "2", "5", "8"),
    "--K": ("1", "2", "3"),
    "--evaluation-T": ("1", "4"),
    "--epochs": ("1", "2"),
    "--batch": ("1", "5", "20", "60"),
    "--beta": ("0.1", "-0.5", "1", "1e-6"),
    "--trials": ("1", "2"),
    "--samples": ("5", "40"),
    "--test-samples": ("5",),
    "--validation": ("10",),
    "--seed": ("0", "7"),
    "--threads": ("1",),
    "--device": ("cpu",),
    "--engine": ("auto", "eager", "xla"),
    "--init": ("default", "glorot"),
    "--schedule": ("synchronous", "alternating"),
    "--stop": ("never", "settled"),
    "--estimator": ("ep", "bptt", "rbp", "ep,bptt", "ep-symmetric", "ep-random-sign", "ep-holomorphic", "ep-continual"),
    "--cost": ("squared-error", "cross-entropy"),
    "--nudge-site": ("inside", "outside"),
    "--optimizer": ("SGD", "Adam", "Rprop", "LBFGS"),
    "--optimizer-option": ("momentum=0.9", "weight_decay=0.1", "foreach=true"),
    "--lr": ("0.1", "W01=0.1", "0"),
    "--start": ("zero", "persistent", "initialised"),
    "--output-bias": ("0.5",),
    "--output-scale": ("0.1",),
    "--train-error-every": ("1",),
    "--checkpoint-every": ("0.001", "100"),
    "--decay": ("cosine", "exponential"),
    "--states": ("cpu",),
    "--points": ("4",),
    "--form": ("plain", "difference"),
    "--augment": ("flip=true", "crop=2"),
    "--normalise": ("mean=[0.5]", "scale=2"),
    "--keep-at-rest": ("radius=0.95", "slower=true"),
    "--clip-norm": ("1",),
    "--precision": ("float32", "bfloat16"),
    "--sizes": ("10,8,784", "[10, 784]"),
    "--activation": ("tanh", "hard-sigmoid"),
    "--preset": ("paper", "authors", "tuned", "fast"),
    "--dtype": ("float32", "float64"),
    "--trial": ("0", "1"),
    "--budget": ("0.01",),
    "--search": ("1",),
    "--rows": ("P-1h",),
    "--data": ("keep/data", "mnist"),
    "--model": ("keep/net.py:net", "keep/net.py:raises", "keep/net.py:nothing", "keep/broken.py:net"),
    "--json": harmless(("-", "named/result.json", "/dev/null", "/dev/stdout", "named", "named/no/x")),
    "--out": ("named/out", "named/other", "named/file"),
    "--storage": ("named/study.journal", "sqlite:///named/study.db"),
    "--check": ("keep/published",),
}
FLAGS = ("--quiet", "--help", "--version", "--drop-unsettled", "--stacked", "--no-stacked")
BASES: dict[str, tuple[int, Sequence[Sequence[str]]]] = {
    "train": (
        40,
        [
            ["keep/small.toml", "--data", "keep/data", "--out", "named/out"],
            ["keep/small.json", "--data", "keep/data", "--out", "named/out"],
            ["P-1h", "--data", "keep/data", "--out", "named/out", "--epochs", "1", "--T", "3", "--K", "2"],
            ["keep/small.toml", "--data", "keep/data"],
        ],
    ),
    "list": (5, [[], ["--all"], ["--parts"]]),
    "show": (12, [["P-1h"], ["keep/small.toml"], ["keep/net.py:net"]]),
    "resume": (12, [["named/run"], ["named/unfinished"]]),
    "evaluate": (10, [["named/run"], ["named/unfinished"]]),
    "gdu": (
        10,
        [
            ["toy", "--T", "20", "--K", "2", "--batch", "2"],
            ["P-1h", "--T", "5", "--K", "2", "--batch", "2"],
            ["named/run", "--T", "5", "--K", "2", "--batch", "2"],
            ["keep/net.py:problem", "--T", "5", "--K", "2"],
        ],
    ),
    "doctor": (4, [["named/run", "--T", "5", "--K", "2", "--batch", "2"], ["toy", "--T", "5", "--K", "2"]]),
    "report": (4, [["named/run"], ["named/run", "--out", "named/page"]]),
    "tune": (
        2,
        [
            ["keep/small.toml", "--data", "keep/data", "--budget", "0.01", "--out", "named/out"],
            ["keep/small.toml", "--data", "keep/data", "--budget", "0.01", "--search", "1"],
        ],
    ),
    "play": (1, [["--out", "named/play.html"]]),
    "demo": (1, [["--out", "named/demo", "--samples", "9" * 9]]),
    "reproduce": (
        3,
        [
            ["table1", "--rows", "P-9h", "--out", "named/table"],
            ["table1", "--check", "keep/published", "--rows", "P-9h"],
            ["figures", "--out", "named/figures", "--preset", "neither"],
        ],
    ),
    "nothing": (1, [[]]),
}
"""Weights, and the words each command begins with; small enough to be done in a moment."""


def draw_command(draw: random.Random, folder: Path) -> Case:
    """A command that works, with options added, valid or not, and words lost, doubled or changed."""
    name = draw.choices(list(BASES), [weight for weight, _ in BASES.values()])[0]
    words = [name, *draw.choice(BASES[name][1])]
    extra = []
    for _ in range(draw.randint(0, 4)):
        option = draw.choice([*(options_of(name) if draw.random() < 0.8 else VALID), *FLAGS])
        value = [] if option in FLAGS else [draw.choice(VALID[option] if draw.random() < 0.6 else HOSTILE_TEXT)]
        extra += [f"{option}={value[0]}"] if value and draw.random() < 0.2 else [option, *value]
    # Commands that would take minutes keep the words that make them refuse.
    words = [words[0], *extra, *words[1:]] if name in ("demo", "reproduce", "tune") else [*words, *extra]
    if draw.random() < 0.25 and name not in ("demo", "reproduce", "tune"):
        place = draw.randrange(len(words))
        change = draw.choice(("lose", "double", "replace", "case"))
        if change == "lose" and words[place] not in ("--T", "--K", "--epochs"):
            del words[place]
        elif change == "double":
            words.insert(place, words[place])
        elif change == "replace":
            words[place] = draw.choice(HOSTILE_TEXT)
        else:
            words[place] = words[place].swapcase()
    return Case([word.replace("\0", "") for word in words], named_by(words))


@cache
def options_of(command: str) -> list[str]:
    """The options of a command that have valid values here; all of them if it is no command."""
    import typer

    from eqprop.cli import load_commands

    found = getattr(typer.main.get_command(load_commands()), "commands", {}).get(command)
    taken = {flag for parameter in found.params for flag in parameter.opts} if found else set()
    return [option for option in VALID if option in taken] or list(VALID)


def named_by(words: Sequence[str]) -> list[str]:
    """The paths that the words allow a command to write to."""
    options = ("--out", "--json", "--storage")
    found = []
    for option, value in zip(words, [*words, ""][1:], strict=True):
        head, sign, tail = option.partition("=")
        if head in options:
            found.append(tail if sign else value)
    if words and words[0].lower() in ("resume", "report"):
        found += [word for word in words[1:] if not word.startswith("-")]
    return [path.removeprefix("sqlite:///") for path in found]


HOSTILE_VALUES = (
    *(None, True, False, 0, -1, 1, 3, 1.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), 2**63, 2**64 + 30, 10**30),
    *("", " ", "x", "false", "1", "P-1h", "ep", "../../x", "/etc/passwd", "=cmd", "<b>", "[/b]", "$", "\\", "\x00"),
    *("\x1b[2J", "a\nb", "é", "\ud800", "a" * 5000, [], {}, [[]], [1], {"a": 1}, [None], ["a", 1], {"": None}),
    *([10, 8, 784], [10, 8], [10, 10**9, 784], [[[[[[1]]]]]], {"W01": "x"}, {"*": -1}, {"*": 0.1, "W12": None}),
)


NEAR: dict[type, Sequence[Any]] = {
    bool: (True, False, 0, 1),
    int: (0, 1, 2, 3, 8, 20, 60, 61, -1),
    float: (0.0, 1.0, 0.5, -0.1, 1e6, 1e-9, 3e38),
    str: ("ep", "bptt", "sigmoid", "tanh", "hard-sigmoid", "layered", "own", "convolutional", "energy-based", "Adam"),
    list: (
        [10, 784],
        [10, 8, 8, 784],
        [10, 8, 783],
        [9, 8, 784],
        [10],
        [0, 8, 784],
        [2, 2],
        [1, 28, 28],
        [10, -8, 784],
    ),
}
"""Values of the right type, of which some work."""
MORE: dict[str, Sequence[Any]] = {
    "estimator": ("ep", "bptt", "rbp", "ep-symmetric", "ep-random-sign", "ep-holomorphic", "ep-continual"),
    "cost": ("squared-error", "cross-entropy"),
    "start": ("zero", "persistent", "initialised"),
    "schedule": ("synchronous", "alternating"),
    "stop": ("never", "settled"),
    "nudge_site": ("inside", "outside"),
    "optimizer": ("SGD", "Adam", "Adafactor", "LBFGS", "Muon", "Rprop", {"kind": "SGD", "rates": {"*": 0.1}}),
    "phases": ({"T": 4, "K": 2}, {"T": 4, "beta": "auto"}, {"keep_at_rest": {"radius": 0.95}}),
    "data": ("mnist", {"samples": 20}, {"augmentation": {"crop": 2}}, {"normalisation": {"mean": [0.5]}}),
    "run": ({"trials": 2}, {"precision": "bfloat16"}, {"estimators": ["ep", "bptt"]}),
    "optimizer_options": ({}, {"weight_decay": 0.1}, {"lr": 1}, {"betas": [0.9]}, {"nesterov": True}),
    "decay": ("cosine", "none"),
    "init": ("glorot", "default"),
    "output_bias": (0.5, 1e30, None),
    "output_scale": (0.1, 0, -1e30),
    "points": (1, 2, 3, 4, 1000, 10**9),
    "evaluation_T": (1, 9, None),
    "initialiser_rate": (1.0, 2.0, 1e-30),
    "rates": ({"*": 0.1}, {"*": 1e30}, {"W01": 0, "W12": 0}, {"W01": 0.1}, {"*": 0.1, "b9": 1}),
}


def mutate(value: Any, draw: random.Random) -> Any:
    """The same JSON value with one place replaced, removed, added or renamed."""
    if type(value) in NEAR and draw.random() < 0.4:
        return draw.choice(NEAR[type(value)])
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        kind = draw.random()
        if kind < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.2:
            return {**value, draw.choice(("", "x", "T", "base", "kind", "file", "é")): draw.choice(HOSTILE_VALUES)}
        if kind < 0.25:
            return {(f"{k}x" if k == key else k): v for k, v in value.items()}
        return {**value, key: mutate(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        kind = draw.random()
        if kind < 0.2:
            return value[:place] + value[place + 1 :]
        if kind < 0.4:
            return [*value[:place], value[place], *value[place:]]
        return [*value[:place], mutate(value[place], draw), *value[place + 1 :]]
    return draw.choice(HOSTILE_VALUES)


SMALL = {
    "name": "small",
    "T": 4,
    "K": 2,
    "beta": 0.2,
    "epochs": 1,
    "batch": 20,
    "estimator": "ep",
    "seed": 1,
    "model": {"kind": "layered", "sizes": [10, 8, 784], "bias": True},
    "optimizer": {"kind": "SGD", "options": {"momentum": 0.1}, "rates": {"W12": 0.1, "W01": 0.05}},
}
CONVOLUTIONAL = {
    **SMALL,
    "model": {"kind": "convolutional", "channels": [2], "flat": [10], "kernel": 5, "input_shape": [1, 28, 28]},
    "optimizer": {"kind": "SGD", "rates": {"*": 0.1}},
}
BASED = {"base": "P-1h", "epochs": 1, "T": 4, "K": 2, "rates": {"W01": 0.1}}


def draw_file(draw: random.Random, folder: Path) -> Case:
    """A damaged experiment file, shown or trained."""
    values: Any = draw.choice((SMALL, SMALL, CONVOLUTIONAL, BASED))
    for name in draw.sample(list(MORE), draw.randint(0, 3)):
        values = {**values, name: draw.choice(MORE[name])}
    for _ in range(draw.choice((0, 1, 1, 2))):
        values = mutate(values, draw)
    ending = draw.choice((".toml", ".json")) if values is not BASED else ".toml"
    text = json.dumps(values) if ending == ".json" else as_toml(values)
    content = (
        damage(text.encode("utf-8", "surrogatepass"), draw) if draw.random() < 0.2 else text.encode("utf-8", "replace")
    )
    if draw.random() < 0.03:
        content = draw.choice(
            (b"[" * 100_000, b'{"a":' * 50_000, b"x = " + b"[" * 100_000, b"\xff\xfe", b"", bytes(1000))
        )
    (folder / "keep" / f"mine{ending}").write_bytes(content)
    path = f"keep/mine{ending}"
    if draw.random() < 0.6:
        return Case(["show", path, *draw.choice(([], ["--json", "-"], ["--json", "named/list.json"]))], ["named"])
    return Case(["train", path, "--data", "keep/data", "--out", "named/out", "--epochs", "1", "-q"], ["named/out"])


def as_toml(values: Any) -> str:
    """Values as TOML, valid or nearly so."""
    if not isinstance(values, dict):
        return f"x = {inline(values)}"
    return "".join(f"{key or 'empty'} = {inline(v)}\n" for key, v in values.items() if v is not None)


def inline(value: Any) -> str:
    """A value on one line of TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {inline(v)}" for key, v in value.items() if v is not None) + "}"
    return f"[{', '.join(map(inline, value))}]" if isinstance(value, list) else json.dumps(value)


def damage(content: bytes, draw: random.Random) -> bytes:
    """Cut, flip, double, insert or remove bytes."""
    how = draw.choice(("cut", "flip", "double", "insert", "remove", "empty"))
    if not content or how == "empty":
        return b""
    place = draw.randrange(len(content))
    if how == "cut":
        return content[:place]
    if how == "double":
        return content + content[place:]
    if how == "remove":
        return content[:place] + content[place + draw.randint(1, 20) :]
    middle = bytes(draw.randrange(256) for _ in range(draw.randint(1, 4)))
    return content[:place] + middle + content[place + (len(middle) if how == "flip" else 0) :]


def draw_folder(draw: random.Random, folder: Path) -> Case:
    """A run folder with one to three of its files damaged, replaced or missing; resumed, evaluated or reported."""
    run = folder / "named" / draw.choice(("run", "unfinished"))
    for _ in range(draw.choice((1, 1, 2, 3))):
        # Not what an earlier harm has linked elsewhere or made unreadable.
        there = sorted(p for p in run.rglob("*") if p.is_file() and not p.is_symlink() and not p.parent.is_symlink())
        there = [p for p in there if os.access(p, os.R_OK | os.W_OK)]
        if there:
            harm(draw.choice(there), draw, folder)
    name = f"named/{run.name}"
    command = draw.choices(("resume", "evaluate", "report", "gdu", "doctor"), (40, 25, 15, 15, 5))[0]
    small = ["--T", "5", "--K", "2", "--batch", "2"] if command in ("gdu", "doctor") else []
    extra = draw.choice(([], [], ["--data", "keep/data"])) if command != "report" else []
    may = [name] if command in ("resume", "report") else []
    return Case([command, name, *small, *extra, *(["-q"] if command == "resume" else [])], may)


def harm(path: Path, draw: random.Random, folder: Path) -> None:
    """Damage one file of a run."""
    how = draw.random()
    if how < 0.35 and path.suffix in (".json", ".jsonl"):
        text = path.read_text(errors="replace")
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        place = draw.randrange(max(len(lines), 1))
        if path.suffix == ".jsonl" and draw.random() < 0.4:
            lines[place : place + 1] = draw.choice(([], ["{}"], ["null"], lines[place : place + 1] * 2, ["[" * 9999]))
        elif lines:
            with contextlib.suppress(ValueError, RecursionError):
                lines[place] = json.dumps(mutate(json.loads(lines[place]), draw))
        path.write_text("\n".join(lines) + "\n")
    elif how < 0.6:
        path.write_bytes(damage(path.read_bytes(), draw))
    else:
        target = draw.choice((folder / "keep" / "sentinel", folder / "keep" / "small.json", folder / "nowhere"))
        path.unlink()
        ways = {
            "gone": lambda: None,
            "folder": path.mkdir,
            "link": lambda: path.symlink_to(target),
            "loop": lambda: path.symlink_to(path.name),
            "pipe": lambda: os.mkfifo(path),
            "forbidden": lambda: path.touch(0o000),
            "parent": lambda: _link_parent(path, folder),
        }
        ways[draw.choice(list(ways))]()


def _link_parent(path: Path, folder: Path) -> None:
    """Replace the folder of a checkpoint by a link to one with files of others."""
    if path.parent.name in ("run", "unfinished"):
        lock = path.parent / ".lock"
        if lock.is_dir() and not lock.is_symlink():  # an earlier harm made it one
            lock.rmdir()
        lock.unlink(missing_ok=True)
        lock.symlink_to(folder / "keep" / "sentinel")
    else:
        shutil.rmtree(path.parent)
        path.parent.symlink_to(folder / "keep" / "others")


# The place where cases run.


def prepare(root: Path) -> None:
    """The files every case begins with: small data, experiments, models, two runs, and files to be left alone."""
    from eqprop import papers
    from eqprop.run import train

    keep, named = root / "template" / "keep", root / "template" / "named"
    for path in (keep / "data", keep / "others", keep / "published" / "paper", named):
        path.mkdir(parents=True)
    draw = random.Random(0)
    for stem, count in (("train", 60), ("t10k", 20)):
        pixels = bytes(draw.randrange(256) for _ in range(count * 784))
        (keep / "data" / f"{stem}-images-idx3-ubyte").write_bytes(
            struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28) + pixels
        )
        labels = bytes(n % 10 for n in range(count))
        (keep / "data" / f"{stem}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + labels)
    (keep / "sentinel").write_text("to be left alone\n")
    (keep / "others" / "best.safetensors").write_text("to be left alone\n")
    (keep / "others" / "checkpoint.safetensors").write_text("{}")
    (keep / "published" / "paper" / "P-1h.json").write_text('{"name": "P-1h"}')
    (keep / "small.json").write_text(json.dumps(SMALL))
    (keep / "small.toml").write_text(as_toml(SMALL))
    (keep / "broken.py").write_text("def net(seed) return\n")
    (keep / "net.py").write_text(
        "import eqprop, eqprop.models, torch\n"
        "def net(seed): return eqprop.models.Layered((10, 8, 784), seed=seed)\n"
        "def raises(seed): raise KeyError(seed)\n"
        "def nothing(seed): pass\n"
        "def problem():\n"
        "    net = eqprop.models.Layered((3, 4, 5)).double()\n"
        "    return net, eqprop.SquaredError(), torch.rand(4, 5).double(), torch.eye(4, 3).double()\n"
    )
    (named / "file").write_text("")
    experiment = papers.find(keep / "small.toml")
    for name, only in (("run", None), ("unfinished", ("ep",))):
        train(experiment, named / name, data=keep / "data", estimators=("ep", "bptt"), trials=2, only=only)


def patch_large_data() -> None:
    """Replace MNIST by 60 of its images: a case that names no data is done as soon as one that does."""
    import eqprop.data.images
    import eqprop.data.sources
    from eqprop.data import Images
    from eqprop.data.images import check_device

    whole = eqprop.data.images.mnist()
    few = {name: getattr(whole, name)[:60] for name in ("train_x", "train_y", "test_x", "test_y")}

    def mnist(device: Any = None, dtype: Any = None) -> Images:
        check_device(device)
        made = {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in few.items()}
        return Images(**made, shape=whole.shape, classes=10, name="mnist", sha256=whole.sha256)

    for module in (eqprop.data.images, eqprop.data.sources):
        module.mnist = mnist  # type: ignore[attr-defined]


class Audit:
    """Notes every path that Python code opens for writing, creates, renames or removes."""

    EVENTS = (
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.link",
        "os.symlink",
        "os.truncate",
        "os.chmod",
        "os.utime",
    )
    WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def __init__(self) -> None:
        self.on = False
        self.paths: set[str] = set()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            if isinstance(args[2], int) and args[2] & self.WRITING:
                self._note(args[0])
        elif event in self.EVENTS:
            # The first path of a link is what it points to, which is not written.
            for path in args[1:2] if event in ("os.symlink", "os.link") else args[:2]:
                self._note(path)

    def _note(self, path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            # The folder is resolved, the last part is not: removing a link changes the folder it lies in.
            head, tail = os.path.split(os.path.abspath(os.fsdecode(path)))
            self.paths.add(os.path.join(os.path.realpath(head), tail))


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(p): (s.st_size, s.st_mtime_ns, s.st_mode)
        for p in folder.rglob("*")
        if not p.name.startswith("mine") and not p.is_dir()
        for s in [p.lstat()]
    }


class Worker:
    """Runs cases one after the other in a process forked from this one, each in a fresh copy of the template."""

    def __init__(self, seed: int, root: Path) -> None:
        import jax  # noqa: F401, which starts no thread until it computes, and takes longer than most cases
        import torch

        from eqprop.cli import load_commands

        torch.set_num_threads(1)
        load_commands()
        self.seed, self.root, self.audit = seed, root, Audit()
        self.allowed = [os.path.realpath(os.environ[name]) for name in ("EQPROP_CACHE", "MPLCONFIGDIR", "TMPDIR")]
        # In a process of its own: what training starts would not survive a fork.
        made = fork(lambda: prepare(root), root / "log").wait(PATIENCE * LIMIT)
        assert made.code == 0, made.stderr

    def cases(self, kind: str, numbers: range, until: float, report: Path) -> None:
        """Run cases, warm from those before, and report each as a line of JSON, before and after."""
        patch_large_data()
        with report.open("w", buffering=1) as lines:
            for number in numbers:
                if time.monotonic() > until:
                    return
                lines.write(json.dumps({"begun": number}) + "\n")
                # The kernel ends a case that computes or waits too long.
                signal.setitimer(signal.ITIMER_PROF, LIMIT)
                signal.setitimer(signal.ITIMER_REAL, PATIENCE * LIMIT)
                found = self.case(KINDS[number % len(KINDS)] if kind == MIXED else kind, number)
                lines.write(json.dumps({"number": number, **found}) + "\n")

    def case(self, kind: str, number: int) -> dict[str, Any]:
        """Make the folder of a case, draw its words, run and judge it, and remove the folder."""
        folder = self.root / "cases" / f"{kind}-{number}"
        shutil.copytree(self.root / "template", folder, symlinks=True)
        os.chdir(folder)
        draws = {"commands": draw_command, "files": draw_file, "folders": draw_folder}
        made = draws[kind](random.Random(f"{self.seed} {kind} {number}"), folder)
        before, started = snapshot(folder / "keep"), time.process_time()
        code, said, crash = self.run(made.words)
        seconds = time.process_time() - started
        outside = self.outside(made, folder)
        after, named = snapshot(folder / "keep"), self.named(made, folder)
        changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
        outside += [path for path in changed if not within(path, named)]
        os.chdir(self.root)
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                path.chmod(0o600)
        shutil.rmtree(folder, ignore_errors=True)
        what, detail = judge(code, said, crash, outside)
        return {"words": made.words, "code": code, "seconds": seconds, "what": what, "detail": detail}

    def run(self, words: list[str]) -> tuple[int | None, str, str]:
        """Exit code, what was printed (standard error, if there is any), and the traceback if there was one."""
        from eqprop.cli import main

        sys.argv = ["eqprop", *words]
        out, err, crash, code = io.StringIO(), io.StringIO(), "", None
        modules, path = set(sys.modules), list(sys.path)
        self.audit.paths.clear()
        self.audit.on = True
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        except BaseException:
            crash = traceback.format_exc()
        finally:
            self.audit.on = False
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name.startswith("eqprop_own_"):
                del sys.modules[name]
        # Without a command, the help is on standard output.
        return code, err.getvalue() or out.getvalue(), crash

    def named(self, made: Case, folder: Path) -> list[str]:
        own = ["runs", "tuned", "demo", "play.html"]
        return [os.path.realpath(folder / name) for name in [*own, *(n for n in made.may_write if n)]]

    def outside(self, made: Case, folder: Path) -> list[str]:
        allowed = [*self.allowed, *self.named(made, folder), "/dev/null", "/dev/tty"]
        # A temporary file beside a file that is named is renamed to it.
        beside = [os.path.join(os.path.dirname(n), f".{os.path.basename(n)}.") for n in self.named(made, folder)]
        return [
            path
            for path in sorted(self.audit.paths)
            if not within(path, allowed)
            and not path.startswith((*beside, "/dev/", "/proc/self/fd"))
            # To make a folder, those above it are made.
            and not any(name.startswith(f"{path}/") for name in allowed)
        ]


def within(path: str, places: Sequence[str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def judge(code: int | None, said: str, crash: str, outside: Sequence[str]) -> tuple[str | None, str]:
    """What is wrong with a case, if anything, and the evidence."""
    if crash:
        return "traceback", crash
    if outside:
        return "outside", ", ".join(outside[:5])
    if code not in (0, 1, 2):
        return "exit code", f"{code}: {said}"
    if code and RAW.search(re.sub("does not take the options.*", "", said)):
        return "raw message", said
    if code == 2 and not said.strip():
        return "silent", ""
    return None, ""


@dataclass
class Outcome:
    """Counts and faults of one kind of case."""

    cases: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    faults: list[Fault] = field(default_factory=list)


def set_environment(root: Path) -> None:
    """Folders for everything that is written, before anything is imported; the cache is the user's own."""
    usual = Path.home() / ".cache"
    made = {
        "TORCHINDUCTOR_CACHE_DIR": root / "tmp" / "inductor",
        "TMPDIR": root / "tmp",
        "EQPROP_CACHE": Path(os.environ.get("EQPROP_CACHE") or usual),
        "MPLCONFIGDIR": Path(os.environ.get("MPLCONFIGDIR") or usual / "matplotlib"),
    }
    for path in made.values():
        path.mkdir(parents=True, exist_ok=True)
    fixed = {"OMP_NUM_THREADS": "1", "EQPROP_COMMIT": "fuzz", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "100"}
    os.environ.update({**fixed, **{name: str(path) for name, path in made.items()}})
    tempfile.tempdir = None


def run(counts: dict[str, int], seed: int, seconds: float, first: int = 0) -> dict[str, Outcome]:
    """All campaigns in a temporary folder, in memory where possible."""
    memory, until = Path("/dev/shm"), time.monotonic() + seconds
    where = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    found = {kind: Outcome() for kind, count in counts.items() if count}
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="eqprop-fuzz-", dir=where) as folder:
        set_environment(Path(folder))
        worker = Worker(seed, Path(folder))
        for kind, outcome in found.items():
            campaign(worker, outcome, kind, range(first, first + counts[kind]), until)
        os.chdir(here)
    return found


def campaign(worker: Worker, outcome: Outcome, kind: str, numbers: range, until: float) -> None:
    """Run the cases of one kind, with a new process after one that ended in a case."""
    report = worker.root / "lines"
    while numbers and time.monotonic() < until:
        rest = numbers
        child = fork(lambda rest=rest: worker.cases(kind, rest, until, report), worker.root / "log")  # type: ignore[misc]
        ended = child.wait(until - time.monotonic() + 2.0 * PATIENCE * LIMIT)
        *done, last = [json.loads(line) for line in report.read_text().splitlines()]
        for line in [*done, last]:
            if "begun" not in line:
                note(outcome, kind, line)
        if "begun" not in last:
            return
        fate = "hang" if -ended.code in (signal.SIGPROF, signal.SIGALRM) else "died"
        fault = {"number": last["begun"], "words": [], "seconds": LIMIT, "what": fate, "detail": ended.stderr[-2000:]}
        note(outcome, kind, {**fault, "code": ended.code})
        numbers = range(last["begun"] + 1, numbers.stop)


def note(outcome: Outcome, kind: str, line: dict[str, Any]) -> None:
    outcome.cases += 1
    outcome.codes[str(line["code"])] += 1
    outcome.slowest = max(outcome.slowest, line["seconds"])
    if line["what"]:
        outcome.faults.append(Fault(kind, line["number"], line["what"], line["words"], line["detail"]))


def document(outcomes: dict[str, Outcome], seed: int, asked: dict[str, int]) -> list[dict[str, Any]]:
    """The counts of each campaign, ready for JSON."""
    from eqprop.provenance import provenance

    return [
        {
            "campaign": kind,
            "seed": seed,
            "root": os.geteuid() == 0,
            "limit_seconds": LIMIT,
            "asked": asked[kind],
            "cases": o.cases,
            "exit_codes": dict(sorted(o.codes.items())),
            "slowest_seconds": round(o.slowest, 1),
            "faults": [asdict(f) for f in o.faults],
            "provenance": provenance(),
        }
        for kind, o in outcomes.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--out", type=Path)
    for kind in (*KINDS, MIXED):
        parser.add_argument(f"--{kind}", type=int, default=0)
    asked = parser.parse_args()
    counts = {kind: getattr(asked, kind) for kind in (*KINDS, MIXED)}
    outcomes = run(counts, asked.seed, asked.seconds, asked.first)
    for kind, o in outcomes.items():
        print(f"{kind}: {o.cases} cases, exit codes {dict(o.codes)}, slowest {o.slowest:.1f} s, {len(o.faults)} faults")
        for fault in o.faults:
            print(f"  {kind} {fault.number}: {fault.what}: {fault.words}\n{fault.detail}")
    if asked.out is not None:
        asked.out.write_text(json.dumps(document(outcomes, asked.seed, counts), indent=2) + "\n")
    sys.exit(any(o.faults for o in outcomes.values()))


if __name__ == "__main__":
    main()

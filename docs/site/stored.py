"""Stores what the commands of tutorial 7 printed: python -m docs.site.stored FOLDER

FOLDER is where they were run, each with its output in NAME.log: `eqprop ... > NAME.log 2>&1`. The commit and the
machine are those of the run folders; trainings that were not made by one clean commit on one machine are refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "tutorials" / "7_cifar10.json"
COMMANDS = {
    "small": "eqprop train cifar10-small --threads 1 --out runs/small",
    "twin": "eqprop train cifar10-small --threads 1 --estimator backprop --out runs/twin",
    "evaluate": "eqprop evaluate runs/small",
    "doctor": "eqprop doctor runs/small",
    "report": "eqprop report runs",
}


def gather(folder: Path) -> dict[str, object]:
    made = [json.loads((folder / "runs" / name / "environment.json").read_text()) for name in ("small", "twin")]
    (commit, machine), *others = {
        (p["commit"], f"{p['processor']}, {p['cores']} cores, {p['threads']} thread, torch {p['torch']}")
        for p in (s["provenance"] for m in made for s in m["sessions"])
    }
    if others or commit.endswith("-dirty"):
        raise ValueError(f"Got trainings of {commit} and {others}; expected one clean commit on one machine.")
    outputs = {command: _tidy((folder / f"{name}.log").read_text()) for name, command in COMMANDS.items()}
    return {"commit": commit, "machine": machine, "outputs": outputs}


def _tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


if __name__ == "__main__":
    TARGET.write_text(json.dumps(gather(Path(sys.argv[1])), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

"""Ask the doctor about every ailing and every healthy net of tests/helpers/ailing_nets.py, over ten seeds each.

    python -m benchmarks.doctor_campaign --out results/doctor.json

Thresholds were fixed on seeds 0 to 4; the shares reported are those of seeds 40 to 44, which were not
looked at before. Tests use others. With --remedies, what the doctor names is followed as the user of the net would
(tests/helpers/remedies.py), settings and words. A net is cured where EP's gradient then has a cosine of 0.99 to
recurrent backprop at the steady state, in float64, or where training it by EP leaves no more of its loss, to within
5 % of the first, than training the net as it was before it was broken by the exact gradient.

    python -m benchmarks.doctor_campaign --seeds 5-9 --healthy 200-216 --remedies results/doctor-remedies.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers import remedies
from helpers.ailing_nets import AILING, HEALTHY, Case

from eqprop.files import write_json
from eqprop.provenance import provenance

FIXED_ON, REPORTED_ON = range(5), range(40, 45)


def followed(seeds: Sequence[int], healthy: Sequence[int]) -> dict[str, Any]:
    """How often the named remedies cure, those called verified above all, and which healthy nets are accused."""
    rows: list[dict[str, Any]] = []
    for name, make in AILING.items():
        for seed in seeds:
            case = make(seed)
            found = remedies.ask(case)
            row: dict[str, Any] = {"net": f"{name} {seed}", "cause_named": found.cause == case.cause}
            if (finding := found.finding) is not None:
                row |= {"change": dict(finding.change), "verified": finding.verified}
                row |= {**remedies.worth(case, finding), "text": found.verdict}
            else:
                row |= {"verified": False, "cured": False, "text": found.verdict}
            rows.append(row)
            print({k: v for k, v in row.items() if k != "text"}, flush=True)
    called = {f"{name} {seed}": remedies.ask(make(seed)) for name, make in HEALTHY.items() for seed in healthy}
    verified = [row for row in rows if row["verified"]]
    return {
        "ailing": len(rows),
        "cause_named": sum(row["cause_named"] for row in rows),
        "cured": sum(row["cured"] for row in rows),
        "cured_by_cosine": sum("loss_left" not in row for row in rows if row["cured"]),
        "verified": len(verified),
        "verified_and_cured": sum(row["cured"] for row in verified),
        "healthy": len(called),
        "called_healthy": sum(found.healthy for found in called.values()),
        "accused": {name: found.verdict for name, found in called.items() if not found.healthy},
        "not_cured": [row for row in rows if not row["cured"]],
        "not_named": [row["net"] for row in rows if not row["cause_named"]],
        "cured_by_loss": {
            row["net"]: [float(f"{row[key]:.3g}") for key in ("cosine", "loss_left", "loss_left_of_twin")]
            for row in rows
            if row["cured"] and "loss_left" in row
        },
    }


def ask(case: Case) -> dict[str, Any]:
    began, worked = time.perf_counter(), time.process_time()
    found = remedies.ask(case)
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    change = dict(found.finding.change) if found.finding else {}
    return {
        "expected": case.cause,
        "found": found.cause,
        "change": change,
        "seconds": seconds,
        "cpu": cpu,
        "text": found.verdict,
    }


def campaign(seeds: Sequence[int], only: str = "", talk: bool = False) -> dict[str, list[dict[str, Any]]]:
    out: dict[str, list[dict[str, Any]]] = {}
    for name, make in {**AILING, **HEALTHY}.items():
        if only not in name:
            continue
        out[name] = [{"seed": seed, **ask(make(seed))} for seed in seeds]
        if talk:
            right = sum(a["found"] == a["expected"] for a in out[name])
            print(f"{name:30s} {right}/{len(seeds)} {max(a['cpu'] for a in out[name]):6.2f} s of CPU", flush=True)
            for a in out[name]:
                if a["found"] != a["expected"] or len(seeds) == 1:
                    print(f"    seed {a['seed']}: {a['expected']} -> {a['found']}: {a['text']}", flush=True)
    return out


def summary(found: dict[str, list[dict[str, Any]]], seeds: range) -> dict[str, Any]:
    """Shares over the given seeds."""
    answers = [(name, a) for name, each in found.items() for a in each if a["seed"] in seeds]
    ailing = [a for name, a in answers if name in AILING]
    healthy = [a for name, a in answers if name in HEALTHY]
    return {
        "seeds": list(seeds),
        "ailing": len(ailing),
        "right": sum(a["found"] == a["expected"] for a in ailing),
        "healthy": len(healthy),
        "accused": sum(a["found"] is not None for a in healthy),
        "slowest_seconds": round(max(a["seconds"] for _, a in answers), 3),
        "slowest_cpu_seconds": round(max(a["cpu"] for _, a in answers), 3),
    }


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _seeds(text: str) -> list[int]:
    return [seed for part in text.split(",") for seed in _range(part)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", default="0-4,40-44", help="such as 0-4")
    parser.add_argument("--only", default="", help="generators whose names contain this")
    parser.add_argument("--remedies", type=Path, help="apply the remedies, and write what they do to this file")
    parser.add_argument("--healthy", default="200-216", help="seeds of healthy nets, with --remedies")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.remedies is not None:
        given = {"seeds": asked.seeds, "healthy_seeds": asked.healthy}
        counts = followed(_seeds(asked.seeds), _seeds(asked.healthy))
        print(json.dumps({k: v for k, v in counts.items() if isinstance(v, int)}, indent=2))
        write_json(asked.remedies, {**given, **counts, "provenance": provenance("cpu")})
        return
    seeds = _seeds(asked.seeds)
    found = campaign(seeds, asked.only, talk=True)
    if not asked.only:
        parts = {"fixed_on": FIXED_ON, "reported_on": REPORTED_ON}
        shares = {name: summary(found, part) for name, part in parts.items() if set(part) <= set(seeds)}
        print(json.dumps(shares, indent=2))
        if asked.out is not None:
            generators = {
                name: {
                    "cause": answers[0]["expected"],
                    "found": {str(a["seed"]): a["found"] for a in answers},
                    "seconds": round(max(a["seconds"] for a in answers), 3),
                    "cpu_seconds": round(max(a["cpu"] for a in answers), 3),
                    "example": answers[0]["text"],
                }
                for name, answers in found.items()
            }
            write_json(asked.out, {**shares, "generators": generators, "provenance": provenance("cpu")})


if __name__ == "__main__":
    main()

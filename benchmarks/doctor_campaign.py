"""Ask the doctor about every ailing and every healthy net of tests/helpers/ailing_nets.py, over ten seeds each.

    python -m benchmarks.doctor_campaign --out results/doctor.json

Thresholds were fixed on seeds 0 to 4; the shares reported are those of seeds 40 to 44, which were not
looked at before. Tests use others. Where the remedy is a setting, it is applied to the net drawn anew, as its user
would, and EP's gradient is compared with recurrent backprop at the steady state, in float64.

    python -m benchmarks.doctor_campaign --seeds 60-63 --healthy 60-76 --remedies results/doctor-remedies.json
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.ailing_nets import AILING, HEALTHY, Case

from eqprop import RBP
from eqprop.dynamics import set_nudge_site
from eqprop.files import write_json
from eqprop.gdu.doctor import doctor
from eqprop.provenance import provenance

FIXED_ON, REPORTED_ON = range(5), range(40, 45)


CURED = 0.99
"""The cosine of EP's gradient with the exact one from which a net counts as cured."""


def cosine_after(case: Case, change: dict[str, Any]) -> float:
    """The cosine of EP's whole gradient with the exact one, with the settings changed; nan where they do not fit."""
    if "dtype" in change:
        model, cost = case.model.double(), case.cost.double()
        case = replace(case, model=model, cost=cost, x=case.x.double(), y=case.y.double())
    if "nudge_site" in change:
        set_nudge_site(case.model, change["nudge_site"])
    if "eps" in change:
        case.model.eps = case.model.nudge_scale = change["eps"]  # type: ignore[assignment]
    ep = replace(case.ep, **{n: v for n, v in change.items() if n in ("T", "K", "beta", "schedule", "form")})
    try:
        _, found = ep.gradient(case.model, case.cost, case.x, case.y)
        model, cost = copy.deepcopy(case.model).double(), copy.deepcopy(case.cost).double()
        exact = RBP(T=10_000, K=1_500, stop="settled", checked=False)
        _, wanted = exact.gradient(model, cost, case.x.double(), case.y.double())
    except (ValueError, ArithmeticError, RuntimeError):
        return math.nan
    wide = {name: wanted[p] for name, p in model.named_parameters() if p in wanted}
    pairs = [(found[p].double().flatten(), wide[n].flatten()) for n, p in case.model.named_parameters() if p in found]
    ours, theirs = (torch.cat(side) for side in zip(*pairs, strict=True))
    return float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))


def remedies(seeds: Sequence[int], healthy: Sequence[int]) -> dict[str, Any]:
    """How often remedies cure, those called verified above all, and how often healthy nets are called healthy."""
    rows: list[dict[str, Any]] = []
    for name, make in AILING.items():
        for seed in seeds:
            case = make(seed)
            found = doctor(case.model, case.cost, case.x, case.y, case.ep, state=case.state, rates=case.rates)
            finding = found.finding
            change = dict(finding.change) if finding else {}
            settings = bool(change) and not {"lr", "lr_factor"} & set(change)
            rows.append(
                {
                    "net": f"{name} {seed}",
                    "cause_named": found.cause == case.cause,
                    "change": change,
                    "verified": bool(finding and finding.verified),
                    "cosine_after": cosine_after(make(seed), change) if settings else None,
                    "text": found.verdict,
                }
            )
            print(rows[-1]["net"], rows[-1]["cause_named"], change, rows[-1]["cosine_after"], flush=True)
    called = [(f"{name} {seed}", doctor_says_healthy(make(seed))) for name, make in HEALTHY.items() for seed in healthy]
    applied = [row for row in rows if row["cosine_after"] is not None]
    verified = [row for row in applied if row["verified"]]
    return {
        "ailing": len(rows),
        "cause_named": sum(row["cause_named"] for row in rows),
        "remedy_is_a_setting": len(applied),
        "cured": sum(row["cosine_after"] >= CURED for row in applied),
        "verified": len(verified),
        "verified_and_cured": sum(row["cosine_after"] >= CURED for row in verified),
        "healthy": len(called),
        "called_healthy": sum(fine for _, fine in called),
        "accused": [name for name, fine in called if not fine],
        "not_cured": [row for row in applied if not row["cosine_after"] >= CURED],
        "not_named": [row for row in rows if not row["cause_named"]],
    }


def doctor_says_healthy(case: Case) -> bool:
    return doctor(case.model, case.cost, case.x, case.y, case.ep, state=case.state, rates=case.rates).healthy


def ask(case: Case) -> dict[str, Any]:
    began, worked = time.perf_counter(), time.process_time()
    found = doctor(case.model, case.cost, case.x, case.y, case.ep, state=case.state, rates=case.rates)
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
    parser.add_argument("--healthy", default="60-76", help="seeds of healthy nets, with --remedies")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.remedies is not None:
        given = {"seeds": asked.seeds, "healthy_seeds": asked.healthy}
        told = remedies(_seeds(asked.seeds), _seeds(asked.healthy))
        print(json.dumps({k: v for k, v in told.items() if not isinstance(v, list)}, indent=2))
        write_json(asked.remedies, {**given, **told, "provenance": provenance("cpu")})
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

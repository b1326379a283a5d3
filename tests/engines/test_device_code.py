"""What the CUDA engines hand to a GPU for the paper's nets: definitions, launches and, where NVRTC is, machine code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.guard import device_code

BEFORE: dict[str, Any] = json.loads(device_code.RECORD.read_text())
QUICK = [name for name, entry in BEFORE.items() if entry["source"] == "one_hidden.cu"]


@pytest.mark.parametrize("name", device_code.ENGINES)
def test_definitions_and_launches_are_those_recorded(name: str) -> None:
    assert device_code.differences(BEFORE, device_code.recorded([name], compiles=False)) == []


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BEFORE])
def test_machine_code_is_that_recorded(name: str) -> None:
    entry = BEFORE[name]
    code = device_code.device(entry["source"], entry["definitions"])
    if code is None:
        pytest.skip("no NVRTC on this machine")
    assert set(code["kernels"]) == set(entry["kernels"]), "compiled for an H200"
    if code["compiler"] != entry["compiler"]:
        pytest.skip(f"it compiles; the record is of NVRTC {entry['compiler']}, this is {code['compiler']}")
    assert device_code.differences({name: entry}, {name: code}) == []


@pytest.mark.parametrize("nudging", [1, 2])
def test_other_nudgings_compile(nudging: int) -> None:
    entry = BEFORE["P-1h ep"]
    code = device_code.device(entry["source"], entry["definitions"].replace("NUDGING=0", f"NUDGING={nudging}"))
    if code is None:
        pytest.skip("no NVRTC on this machine")
    assert code["kernels"]["relax"] != entry["kernels"]["relax"]
    assert code["kernels"]["advance"].split()[0] == entry["kernels"]["advance"].split()[0], "the same registers"


def test_a_change_is_reported() -> None:
    was = BEFORE["P-1h ep"]
    launches = {**was["networks"], "5": {**was["networks"]["5"], "launches": []}}
    now = {**was, "networks": launches, "kernels": {**was["kernels"], "relax": "other code"}}
    found = device_code.differences(BEFORE, {"P-1h ep": now})
    assert [line.split(" was ")[0] for line in found] == ["P-1h ep: networks", "P-1h ep: kernels"]
    elsewhere = device_code.differences(BEFORE, {"P-1h ep": {**now, "compiler": "another"}})
    assert elsewhere == found[:1], "machine code of two compilers is not compared"

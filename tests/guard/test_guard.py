"""The guard sees what it is there to see: one change of each kind is one line, and no change is none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.guard import guard

RECORD = json.loads(guard.BEFORE.read_text())
TABLE: dict[str, dict[str, str]] = {part: {} for part in ("renamed", "removed", "weights", "numbers")}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    now = copy.deepcopy(RECORD)
    change(now)
    return now


def test_a_record_agrees_with_itself_and_the_table_with_the_record() -> None:
    table = json.loads(guard.RENAMED.read_text())
    assert guard.differences(RECORD, RECORD, {**table, "renamed": {}}) == []
    # What is renamed is not there yet; every entry fits a key.
    assert {found.split()[-1] for found in guard.differences(RECORD, RECORD, table)} <= {"missing"}


def other_weights(now: dict[str, Any]) -> None:
    now["weights"]["P-1h ep eager"] = "0" * 64


def other_gradient(now: dict[str, Any]) -> None:
    now["gradients"]["layered EP float64"]["W01"][0] *= 1 + 1e-9


def flipped_gradient_of_single_precision(now: dict[str, Any]) -> None:
    values = now["gradients"]["graph BPTT float32"]["skip"]
    values[:] = [-value for value in values]


def refused_gradient(now: dict[str, Any]) -> None:
    now["gradients"]["own energy RBP float64"] = {"refused with ValueError": []}


def other_number(now: dict[str, Any]) -> None:
    now["numbers"]["gdu P-1h"]["/budget/finite_beta"] *= 1 + 1e-9


def lost_key(now: dict[str, Any]) -> None:
    now["keys"]["train"].remove("/device")


CHANGES = {
    other_weights: "weights of P-1h ep eager: ",
    other_gradient: "gradients of layered EP float64: W01 errs by ",
    flipped_gradient_of_single_precision: "gradients of graph BPTT float32: skip errs by 2",
    refused_gradient: "gradients of own energy RBP float64: ",
    other_number: "gdu P-1h /budget/finite_beta: ",
    lost_key: "keys of train: /device is missing",
}


@pytest.mark.parametrize(("change", "complaint"), CHANGES.items(), ids=[change.__name__ for change in CHANGES])
def test_each_kind_of_change_is_told_in_one_line(change: Callable[[dict[str, Any]], None], complaint: str) -> None:
    (found,) = guard.differences(RECORD, changed(change), TABLE)
    assert found.startswith(complaint)


def test_rounding_and_new_keys_are_no_differences() -> None:
    def rounded(now: dict[str, Any]) -> None:
        now["gradients"]["layered EP float64"]["W01"][0] *= 1 + 1e-13
        now["numbers"]["gdu P-1h"]["/budget/finite_beta"] *= 1 + 1e-12
        now["keys"]["train"].append("/unheard_of")

    assert guard.differences(RECORD, changed(rounded), TABLE) == []


def test_weights_of_another_processor_are_not_compared_but_numbers_are() -> None:
    def elsewhere(now: dict[str, Any]) -> None:
        now["provenance"]["processor"] = "another"
        other_weights(now)
        other_number(now)

    (found,) = guard.differences(RECORD, changed(elsewhere), TABLE)
    assert found.startswith(CHANGES[other_number])


def test_the_table_renames_a_key_with_what_lies_below_and_removes_one_with_a_reason() -> None:
    def moved(now: dict[str, Any]) -> None:
        paths = [path.replace("/estimators", "/by", 1) for path in now["keys"]["train"] if path != "/device"]
        now["keys"]["train"] = paths

    now = changed(moved)
    assert len(guard.differences(RECORD, now, TABLE)) > 2
    table = {**TABLE, "renamed": {"train: /estimators": "/by"}, "removed": {"train: /device": "It is in provenance."}}
    assert guard.differences(RECORD, now, table) == []


@pytest.mark.parametrize("reason", ["", "gone", None])
def test_what_is_removed_needs_a_sentence(reason: Any) -> None:
    found = guard.differences(RECORD, changed(lost_key), {**TABLE, "removed": {"train: /device": reason}})
    assert len(found) == 1
    assert "expected a sentence" in found[0]


def test_an_entry_of_the_table_without_use_is_told() -> None:
    found = guard.differences(RECORD, RECORD, {**TABLE, "renamed": {"/no_such_key": "/key"}})
    assert found == ["renamed.json: renamed /no_such_key fits no key of the record"]

"""The folder of a tuning: what was asked for is written first, and only the same request goes on in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eqprop.files import write_json
from eqprop.training.folder import LOCK, read_json

REQUEST = "request.json"


def prepare_folder(folder: Path, request: Mapping[str, Any]) -> bool:
    """Make the folder and note the request; whether it was there before. Another request or foreign files: an error."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; expected a folder for what is found. Choose another --out.")
    wanted = json.loads(json.dumps(request))
    if (folder / REQUEST).is_file():
        _check_same(folder, read_json(folder / REQUEST, "what was asked for"), wanted)
        return True
    foreign = [p.name for p in folder.iterdir() if p.name != LOCK and p.suffix != ".part"] if folder.exists() else []
    if foreign:
        raise FileExistsError(
            f"{folder} is not empty and holds no tuning ({', '.join(sorted(foreign)[:5])}). Choose a new or an empty "
            "folder with --out."
        )
    try:
        write_json(folder / REQUEST, wanted)
    except OSError as error:
        raise type(error)(f"Cannot write to {folder}: {error.strerror or error}. Choose another --out.") from error
    return False


def _check_same(folder: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    other = [
        f"{name} {_short(wanted.get(name))} instead of {_short(there.get(name))}"
        for name in sorted({*there, *wanted})
        if there.get(name) != wanted.get(name)
    ]
    if other:
        raise ValueError(
            f"{folder} holds a tuning with other settings ({'; '.join(other)}). Go on with those it has, or choose "
            "another --out."
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""The folder of a comparison: gdu.json, traces.json and figures/, written when everything is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eqprop.files import write_bytes, write_json
from eqprop.report.drawing import save
from eqprop.report.gdu_figures import processes, rmse_single

DOCUMENT, TRACES, FIGURES = "gdu.json", "traces.json", "figures"


def write_folder(folder: Path, document: dict[str, Any], traces: dict[str, Any]) -> None:
    """Draw first, write then; gdu.json comes last, so that where it is, the rest is too."""
    drawn = {"processes": save(processes(document, traces)), "rmse": save(rmse_single(document))}
    for name, files in drawn.items():
        write_figure(folder / FIGURES / name, files)
    write_json(folder / TRACES, _short(traces))
    write_json(folder / DOCUMENT, document)


def write_figure(path: Path, files: dict[str, bytes]) -> None:
    """path.png and path.pdf."""
    for ending, content in files.items():
        write_bytes(path.with_name(f"{path.name}.{ending}"), content)


def read_document(folder: Path) -> dict[str, Any] | None:
    """The document of a folder; None if there is none, or none that can be read."""
    return _read(folder / DOCUMENT)


def read_traces(folder: Path) -> dict[str, Any] | None:
    return _read(folder / TRACES)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _short(value: Any) -> Any:
    """Numbers to six digits, which is more than a figure shows."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(v) for key, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list | tuple) else value

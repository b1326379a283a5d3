"""The paper's figures about the GDU property, from the folders that `eqprop reproduce figures` fills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eqprop.report.drawing import save
from eqprop.report.gdu_figures import processes, rmse_panels, rmse_single
from eqprop.report.gdu_folder import FIGURES, read_document, read_traces, write_figure
from eqprop.report.saw_teeth import saw_teeth

SETTLED = "-settled"
"""What the folder of a record is called, behind its name, if samples that have not settled were left out."""

PROCESSES = {
    "toy-model": "toy",
    "th-conv": "P-conv",
    **{name.lower(): name for name in ("EB-1h", "EB-2h", "EB-3h", "P-1h", "P-2h", "P-3h")},
}
PANELS = ("EB-1h", "EB-2h", "EB-3h", "P-1h", "P-2h", "P-3h")


def write_gallery(folder: Path) -> list[Path]:
    """folder/figures/*.png and *.pdf; returns the PNG files."""
    documents = {name: _there(read_document(folder / name), folder / name) for name in PROCESSES.values()}
    traces = {name: _there(read_traces(folder / name), folder / name) for name in PROCESSES.values()}
    settled = next((d for name in PANELS if (d := read_document(folder / f"{name}{SETTLED}"))), None)
    drawn = {figure: processes(documents[name], traces[name]) for figure, name in PROCESSES.items()}
    drawn["rmse"] = rmse_panels([documents[name] for name in PANELS], settled)
    drawn["rmse-conv"] = rmse_single(documents["P-conv"])
    drawn["saw-teeth"] = saw_teeth(traces["P-1h"], traces["EB-1h"])
    for name, figure in drawn.items():
        write_figure(folder / FIGURES / name, save(figure))
    return [folder / FIGURES / f"{name}.png" for name in drawn]


def _there(content: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    if content is None:
        raise FileNotFoundError(f"{folder} holds no finished comparison. Make it with: eqprop reproduce figures.")
    return content

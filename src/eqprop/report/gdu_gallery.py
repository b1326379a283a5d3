"""The paper's figures about the GDU property, from the folders that `eqprop reproduce figures` fills."""

from __future__ import annotations

from pathlib import Path

from eqprop.report.drawing import save
from eqprop.report.gdu_figures import processes, rmse_panels, rmse_single
from eqprop.report.gdu_folder import FIGURES, read_document, read_traces, write_figure
from eqprop.report.saw_teeth import saw_teeth

PROCESSES = {
    "toy-model": "toy",
    "th-conv": "P-conv",
    **{name.lower(): name for name in ("EB-1h", "EB-2h", "EB-3h", "P-1h", "P-2h", "P-3h")},
}
PANELS = ("EB-1h", "EB-2h", "EB-3h", "P-1h", "P-2h", "P-3h")


def write_gallery(folder: Path) -> list[Path]:
    """folder/figures/*.png and *.pdf, every figure whose numbers are there; returns the PNG files."""
    documents = {name: d for name in PROCESSES.values() if (d := read_document(folder / name))}
    traces = {name: t for name in documents if (t := read_traces(folder / name))}
    drawn = {figure: processes(documents[name], traces[name]) for figure, name in PROCESSES.items() if name in traces}
    if all(name in documents for name in PANELS):
        drawn["rmse"] = rmse_panels([documents[name] for name in PANELS])
    if "P-conv" in documents:
        drawn["rmse-conv"] = rmse_single(documents["P-conv"])
    if "P-1h" in traces and "EB-1h" in traces:
        drawn["saw-teeth"] = saw_teeth(traces["P-1h"], traces["EB-1h"])
    for name, figure in drawn.items():
        write_figure(folder / FIGURES / name, save(figure))
    return [folder / FIGURES / f"{name}.png" for name in drawn]

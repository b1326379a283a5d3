"""Which page has which blocks, which picture is drawn by what, and the command that builds them."""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable
from functools import partial

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.estimators import drawn_bias
from docs.build import cifar10, depth, engines, estimators, field, gdu, performance, physical, runs, table1
from docs.build.claims.gallery import pictures
from docs.build.claims.pages import pages
from docs.build.results import ROOT, documents
from docs.build.text import Makers, filled
from eqprop.files import write_text
from eqprop.report.figures import decisions, styled

BLOCKS: dict[str, list[Callable[[], str]]] = {
    "README.md": [cifar10.summary_block],
    "docs/table1.md": [table1.full_block, table1.printed_block],
    "docs/table1-notes.md": [
        *(table1.results_block, table1.changes_block, table1.silent_block, table1.rest_block, table1.tried_block),
    ],
    "docs/gdu.md": [gdu.results_block, gdu.budget_block, gdu.silence_block, gdu.seeds_block, gdu.authors_block],
    "docs/performance.md": [
        *(performance.peers_block, performance.loops_block, engines.engines_block),
        *(performance.expect_block, performance.projection_block, partial(performance.measured, "precision")),
    ],
    "docs/kernels.md": [performance.work_block, performance.floors_block],
    "docs/estimators.md": [
        *(estimators.bias_block, estimators.orders_block, estimators.cost_block, estimators.training_block),
        estimators.own_models_block,
        partial(runs.runs_of, "continual"),
    ],
    "docs/beyond.md": [
        *(gdu.nudge_site_block, runs.nudge_training_block, gdu.cross_entropy_block),
        *(partial(runs.runs_of, "cross-entropy"), partial(runs.runs_of, "fashion-mnist")),
    ],
    "docs/cifar10.md": [
        *(cifar10.results_block, cifar10.gdu_block, cifar10.precision_block),
        partial(runs.runs_of, "cifar10-output-bias"),
    ],
    "docs/physical.md": [
        *(physical.training_block, physical.ising_block, physical.held_out_block, physical.spice_block),
        physical.sweep_block,
    ],
    "docs/field.md": [
        *(field.rows_block, field.remarks_block, field.cosines_block, field.rates_block, field.feedback_block),
        *(field.spread_block, field.asymmetry_block, field.cost_block, field.echo_block, field.nudging_block),
    ],
    "docs/starts.md": [runs.gain_block, runs.literature_block],
    "docs/depth.md": [
        *(depth.cosines_block, depth.bits_block, depth.speed_block, depth.trainings_block, depth.layers_block),
        *(depth.residuals_block, depth.exponents_block),
    ],
    "docs/tune.md": [runs.decisions_block, runs.tuned_block],
}
"""The blocks of each page: results_block fills <!-- begin results -->, runs_of(topic) <!-- begin topic runs -->."""
PICTURES: dict[str, Callable[[], Figure]] = {
    "table1-curves": table1.curves,
    "cifar10-curves": cifar10.curves,
    "estimators": lambda: drawn_bias(documents("estimators/bias.json")),
    "sweep": physical.sweep_figure,
    "tuning": lambda: decisions(documents("tune/recipe.json")[0]),
}
PICTURES |= pictures()
FOLDER = ROOT / "docs" / "pictures"
CURVES = "src/eqprop/report/curves.json"
GALLERY = "docs/pictures.md"
GALLERY_INTRODUCTION = """# Every other picture

The pictures of this site that are not [figures of the paper](figures.md), each with a link to the page that explains
it. `python -m docs.build` draws them from `results/`.
"""


def svg(figure: Figure) -> str:
    """The figure as SVG, coordinates to a tenth of a point: equal figures are equal files.

    Text is text, but for figures with script letters, which browsers lack a font for.
    """
    buffer = io.StringIO()
    script = any(r"\mathcal" in text.get_text() for text in figure.findobj(Text))
    with styled(), rc_context({"svg.hashsalt": "eqprop", "svg.fonttype": "path" if script else "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "eqprop"})
    text = re.sub(r"^ +| +$", "", buffer.getvalue(), flags=re.MULTILINE)
    text = re.sub(r"'DejaVu Sans', '[^;\"]*", "'DejaVu Sans', sans-serif", text)
    return re.sub(r"<[^>]*>", lambda tag: re.sub(r"scale\([^)]*\)|(\d\.\d)\d+", _shorter, tag[0]), text)


def _shorter(found: re.Match[str]) -> str:
    """A coordinate cut to a tenth; a scale whole, which a tenth would make zero."""
    return found[1] or found[0]


def read_text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def makers(page: str) -> Makers:
    return {_name(make): make for make in BLOCKS[page]}


def _name(make: Callable[[], str]) -> str:
    if isinstance(make, partial):
        return f"{make.args[0]} runs"
    return make.__name__.removesuffix("_block").replace("_", " ")


def stale() -> list[str]:
    """Pages that building would change, and pictures that are missing."""
    found = [name for name in BLOCKS if filled(text := read_text(name), makers(name)) != text]
    found += [name for name, text in written().items() if not (ROOT / name).is_file() or read_text(name) != text]
    return found + [f"docs/pictures/{name}.svg" for name in PICTURES if not (FOLDER / f"{name}.svg").is_file()]


def written() -> dict[str, str]:
    """Every file that is written whole, by its path."""
    return {**pages(), CURVES: table1.stored_curves(), GALLERY: others()}


def others() -> str:
    """The gallery of the pictures that are not the paper's: each as the page that explains it shows it."""
    folder, shown = ROOT / "docs", []
    for name in sorted(set(PICTURES) - set(pictures())):
        link = re.compile(rf"!\[([^\]]*)\]\((?:\.\./)*pictures/{re.escape(name)}\.svg\)")
        for page in sorted(folder.rglob("*.md")):
            found = link.search(page.read_text(encoding="utf-8")) if page != ROOT / GALLERY else None
            if found is not None:
                title = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.M)
                assert title is not None, f"{page} has a heading"
                where = page.relative_to(folder).as_posix()
                picture = f"![{found[1]}](pictures/{name}.svg)\n\n*{found[1]}.* From [{title[1]}]({where})."
                shown.append(f"## {found[1].partition(':')[0]}\n\n{picture}\n")
                break
    return "\n".join([GALLERY_INTRODUCTION, *shown])


def build() -> None:
    for name in BLOCKS:
        write_text(ROOT / name, filled(read_text(name), makers(name)))
    for name, text in written().items():
        write_text(ROOT / name, text)
    for name, draw in PICTURES.items():
        write_text(FOLDER / f"{name}.svg", svg(draw()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.build", description="Build the pages from results/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is not current")
    given = parser.parse_args()
    if not given.check:
        build()
    elif found := stale():
        sys.exit(f"Not current: {', '.join(found)}. Run: python -m docs.build")


if __name__ == "__main__":
    main()

"""What MkDocs calls while it builds the site (see mkdocs.yml)."""

from __future__ import annotations

import html
import os
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.site import animation, zoo  # noqa: E402
from docs.site.tutorial import execute  # noqa: E402

SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme fetches to search in pages opened from a folder; docs/assets/worker.js does that instead."""
MATHS = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here: tutorials, the zoo, the page to play with, the changelog."""
    for path in sorted((ROOT / "docs" / "tutorials").glob("[0-9]*.py")):
        for made in _tutorial(path, config):
            files.append(made)
    made_pages = {
        "zoo.md": zoo.page(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "]("),
        "play.html": _play(),
        "settles.svg": animation.draw(),
    }
    for name, content in made_pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def _tutorial(path: Path, config: MkDocsConfig) -> list[File]:
    page = execute(path)
    source = (
        f"\n---\nThe script: `docs/tutorials/{path.name}`, executed in {page.seconds:.0f} s when this page was built.\n"
    )
    out = [File.generated(config, f"tutorials/{path.stem}.md", content=page.markdown + source)]
    return out + [File.generated(config, f"tutorials/{name}", content=c) for name, c in page.figures.items()]


def _play() -> str:
    from eqprop.report.play import render

    return render()


def on_page_content(content: str, **_: Any) -> str:
    """TeX as MathML, which browsers draw without a script or a font of ours."""
    return MATHS.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[2] == "[" else "inline"
    return str(convert(html.unescape(match[3]), display=display))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    # Tutorials draw and train: one thread is faster for such small nets.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return config


def on_post_build(config: MkDocsConfig) -> None:
    """Point every page to our own script in the place of the one that the theme fetches."""
    site = Path(config.site_dir)
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        if SHIM in page:
            own = os.path.relpath(site / "assets" / "worker.js", path.parent)
            path.write_text(page.replace(SHIM, own), encoding="utf-8")

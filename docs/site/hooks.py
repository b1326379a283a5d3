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
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.site import animation, settings, zoo  # noqa: E402
from docs.site.parameters import shown, undescribed  # noqa: E402
from docs.site.tutorial import execute, scripts  # noqa: E402

SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme fetches to search in pages opened from a folder; docs/assets/worker.js does that instead."""
MATHS = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here: those of scripts, the zoo, the page to play with, the changelog."""
    missing = {name: what for name in shown(ROOT / "docs" / "api") if (what := undescribed(name))}
    if missing:
        raise PluginError(f"Docstrings must describe what their object takes, a line per name; missing: {missing}.")
    for path in scripts(ROOT / "docs"):
        for made in _executed(path, config):
            files.append(made)
    made_pages = {
        "zoo.md": zoo.page(),
        "api/settings.md": settings.page(),
        "api/models-settings.md": settings.page(models=True),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "]("),
        "play/index.html": _play(),
        "settles.svg": animation.draw(),
    }
    for name, content in made_pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def _executed(path: Path, config: MkDocsConfig) -> list[File]:
    page, folder = execute(path), path.parent.name
    source = (
        f"The script: `docs/{folder}/{path.name}`, executed in {page.seconds:.0f} s when this page was built. "
        f"[The same as a notebook](../notebooks/{path.stem}.ipynb), with its outputs.{_badge(path.stem, config)}"
    )
    out = [
        File.generated(config, f"{folder}/{path.stem}.md", content=f"{page.markdown}\n---\n{source}\n"),
        File.generated(config, f"notebooks/{path.stem}.ipynb", content=page.notebook),
    ]
    return out + [File.generated(config, f"{folder}/{name}", content=c) for name, c in page.figures.items()]


def _badge(stem: str, config: MkDocsConfig) -> str:
    """A link that opens the notebook in a browser, once the repository has an address (repo_url in mkdocs.yml)."""
    place = (config.repo_url or "").removeprefix("https://github.com/").strip("/")
    if not place or not (config.repo_url or "").startswith("https://github.com/"):
        return ""
    return (
        f" [Open it in Colab](https://colab.research.google.com/github/{place}/blob/main/docs/notebooks/{stem}.ipynb)."
    )


def _play() -> str:
    """The page to play with, and a way back."""
    from eqprop.report.play import render

    return render().replace("<header>", '<header>\n  <p><a href="../index.html">eqprop</a></p>', 1)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Give the tables of claims, five columns of sentences, the width of the table of contents."""
    if page.file.src_uri.startswith("paper/"):
        page.meta["hide"] = ["toc"]
    return markdown


def on_page_content(content: str, **_: Any) -> str:
    """TeX as MathML, which browsers draw without a script or a font of ours; a mean stays beside its deviation."""
    return MATHS.sub(_mathml, content).replace(" ± ", "\u00a0±\u00a0")


def on_post_page(output: str, **_: Any) -> str:
    """Name the search for screen readers, which the theme does not."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')


def _mathml(match: re.Match[str]) -> str:
    block = match[2] == "["
    made = str(convert(html.unescape(match[3]), display="block" if block else "inline"))
    # Browsers ignore mathvariant="script", and draw bars of a norm that stretch in two sizes.
    made = re.sub(r'<mi mathvariant="script">([A-Z])</mi>', lambda letter: f"<mi>{_script(letter[1])}</mi>", made)
    made = made.replace("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>')
    # In a box that scrolls where a phone is too narrow.
    return f'<div class="maths" tabindex="0">{made}</div>' if block else made


def _script(letter: str) -> str:
    """The character of a script capital; eight of them came into Unicode before the others."""
    early = {"B": 0x212C, "E": 0x2130, "F": 0x2131, "H": 0x210B, "I": 0x2110, "L": 0x2112, "M": 0x2133, "R": 0x211B}
    return f"&#x{early.get(letter, 0x1D49C + ord(letter) - ord('A')):05X};"


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

"""The site builds without a warning, needs nothing from elsewhere, and its pages open without an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.browser import Browser
from helpers.pages import ROOT

from docs.site.look import UNREADABLE, WIDTHS, look, pages, pictures

pytestmark = pytest.mark.slow
FETCHED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?((?:https?:)?//[^"'> ]+)""", re.I)
LINKED = re.compile(r"""<link\b[^>]*>""", re.I)
QUIET_LINKS = ("canonical", "next", "prev")
"""Relations of <link> that a browser does not fetch."""
IN_STYLES = re.compile(r"""(?:url\(["']?|@import ["'])((?:https?:)?//[^"')]+)""", re.I)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("built") / "site"
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "EQPROP_SHORT": "1"}
    words = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def elsewhere(page: str) -> list[str]:
    """What a browser would fetch from another host to show a page."""
    links = [tag for tag in LINKED.findall(page) if re.search(r"href=[\"']?(https?:)?//", tag)]
    loud = [tag for tag in links if not any(f"rel={q}{r}" in tag for r in QUIET_LINKS for q in ("", '"'))]
    return [*FETCHED.findall(page), *loud, *IN_STYLES.findall(page)]


def test_what_is_fetched_from_elsewhere_is_noticed() -> None:
    assert elsewhere('<script src="https://cdn.example/a.js"></script><link rel="stylesheet" href="//a.example/b.css">')
    assert elsewhere("<style>@import 'https://fonts.example/x.css'</style>")
    assert elsewhere('<a href="https://arxiv.org">paper</a><script src="assets/a.js"></script>') == []


def test_no_page_asks_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    found = {p.name: e for p in pages if (e := elsewhere(p.read_text(encoding="utf-8")))}
    assert found == {}
    styles = {p.name: e for p in site.rglob("*.css") if (e := IN_STYLES.findall(p.read_text(encoding="utf-8")))}
    assert styles == {}


@pytest.mark.browser
def test_every_page_can_be_read_wide_and_on_a_phone(site: Path, browser: Browser) -> None:
    """No error, no request, nothing clipped or on top of other text, no page of tutorials or reference too tall."""
    found = {}
    for page in pages(site):
        for width in WIDTHS:
            browser.errors.clear()
            browser.requests.clear()
            seen = look(browser, page, site, width)
            asked = [r for r in browser.requests if not r.startswith(("file:", "data:", "blob:"))]
            if browser.errors or asked or seen.faults:
                found[seen.page, width] = (browser.errors[:], asked, seen.faults)
    assert found == {}


@pytest.mark.browser
def test_texts_of_pictures_do_not_lie_on_each_other(browser: Browser) -> None:
    folder, found = ROOT / "docs" / "pictures", {}
    for picture in pictures(folder):
        browser.open(picture, width=WIDTHS[0])
        if faults := [fault for fault in browser.run(UNREADABLE) if not fault.startswith("wider")]:
            found[picture.name] = faults
    assert found == {}


@pytest.mark.browser
def test_code_is_reached_from_the_keyboard_and_copy_buttons_are_no_landmarks(site: Path, browser: Browser) -> None:
    """What axe-core found of the theme; assets/site.js mends it."""
    browser.open(site / "training.html", width=390, mobile=True)
    end = time.monotonic() + 20
    while not browser.run("document.querySelectorAll('.md-code__nav').length"):
        assert time.monotonic() < end, "the theme made no copy buttons"
        time.sleep(0.1)
    assert browser.run("document.querySelectorAll('.md-code__nav:not([role=presentation])').length") == 0
    wide = "[...document.querySelectorAll('pre > code')].filter((code) => code.scrollWidth > code.clientWidth)"
    assert browser.run(f"{wide}.length") > 3
    assert browser.run(f"{wide}.filter((code) => code.tabIndex < 0).length") == 0


@pytest.mark.browser
def test_the_page_to_play_with_is_part_of_the_site(site: Path, browser: Browser) -> None:
    browser.open(site / "index.html")
    browser.run("[...document.querySelectorAll('.md-content a')].find((a) => /^Play/.test(a.innerText)).click()")
    end = time.monotonic() + 20
    while browser.run("typeof Play") != "object":
        assert time.monotonic() < end, "the button does not lead to it"
        time.sleep(0.1)
    assert browser.run("Play.players.settling.t >= 0")


def test_formulas_are_made_when_the_site_is_built(site: Path) -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert [name for name, text in pages.items() if "arithmatex" in text or 'mathvariant="script"' in text] == []
    assert "<msup><mi>&#x02112;</mi>" in pages["notation.html"], "a script L"
    assert pages["sweeps.html"].count('<div class="maths"') > 5
    assert (site / "assets" / "maths.woff").stat().st_size > 50_000


def test_links_within_the_site_lead_somewhere(site: Path) -> None:
    """The strict build checks links that were written; this one those that the theme and the scripts make, too."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r"""\bid=["']?([^"'> ]+)""", text)) for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        for link in re.findall(r"""<a\b[^>]*\bhref=["']?([^"'> ]+)""", text):
            name, _, anchor = link.partition("#")
            if ":" in name or page.name == "404.html":
                continue
            target = (page.parent / name).resolve() if name else page
            if target.suffix == ".html" and (target not in pages or (anchor and anchor not in anchors[target])):
                broken.append((page.name, link))
    assert broken == []


@pytest.mark.browser
def test_the_search_finds_a_page_without_a_server(site: Path, browser: Browser) -> None:
    browser.open(site / "index.html")
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    browser.run(
        "(() => { const q = document.querySelector('[data-md-component=search-query]'); q.value = 'holomorphic';"
        " q.dispatchEvent(new Event('input', {bubbles: true})); q.dispatchEvent(new KeyboardEvent('keyup')); })()"
    )
    end = time.monotonic() + 20
    while not browser.run("document.querySelectorAll('.md-search-result__item').length"):
        assert time.monotonic() < end, "nothing found"
        time.sleep(0.1)

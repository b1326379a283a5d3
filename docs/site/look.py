"""Opens every page of the built site in a real browser, keeps a screenshot, and names text that nobody can read.

    python -m docs.site.look SITE SCREENSHOTS

opens each page at 1280 and at 390 px, light and dark, and every picture; it writes a PNG per page and width, and ends
with 1 where text is clipped, lies on other text, or a page is wider than the screen.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.browser import Browser, find_browser

WIDTHS = (1280, 390)
TALLEST = {"tutorials": 6000, "api": 6000}
"""Pixels that no page of these folders is taller than, at the first width."""
NOT_PAGES = ("404.html",)
"""What only a server shows."""

UNREADABLE = """
(() => {
  const found = [], slack = 2;
  const seen = (node) => node.checkVisibility({opacityProperty: true, visibilityProperty: true});
  const words = (text) => text.trim().replace(/\\s+/g, ' ').slice(0, 60);
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) found.push(`wider than the screen: ${root.scrollWidth} px`);

  const boxes = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement;
    if (!text.textContent.trim() || !node || !seen(node)) continue;
    // Menus that float over a page cover it by design; formulas place their own parts.
    if (node.closest('script, style, math, title, option, nav.md-code__nav') ||
        node.closest('.md-header, .md-tabs, .md-sidebar, .md-search, .md-top')) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    for (const box of range.getClientRects())
      if (box.width > 1 && box.height > 1) boxes.push([box, node, text.textContent]);
    // Cut off by a parent that neither shows nor scrolls what does not fit.
    for (let up = node; up && up !== root; up = up.parentElement) {
      const style = getComputedStyle(up);
      if (!/hidden|clip/.test(style.overflowX) || style.position === 'absolute' && up.clientWidth <= 1) continue;
      const edge = up.getBoundingClientRect(), box = range.getBoundingClientRect();
      if (box.right > edge.right + slack || box.left < edge.left - slack)
        found.push(`clipped: ${words(text.textContent)}`);
      break;
    }
  }
  for (const code of document.querySelectorAll('pre, pre > code'))
    if (seen(code) && code.scrollWidth > code.clientWidth + 1 && !/[\\u2500-\\u257f]/.test(code.textContent))
      found.push(`code is cut off: ${words(code.textContent)}`);

  boxes.sort((a, b) => a[0].top - b[0].top);
  for (let i = 0; i < boxes.length; i++) {
    const [a, one, text] = boxes[i];
    for (let j = i + 1; j < boxes.length && boxes[j][0].top < a.bottom - slack; j++) {
      const [b, other, more] = boxes[j];
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      // Lines of a paragraph may touch; what counts is a third of the smaller one's height.
      if (one !== other && wide > slack && high > Math.min(a.height, b.height) / 3)
        found.push(`overlap: "${words(text)}" and "${words(more)}"`);
    }
  }
  return [...new Set(found)];
})()
"""


@dataclass(frozen=True)
class Look:
    """What was seen of a page at a width."""

    page: str
    width: int
    height: int
    faults: tuple[str, ...]


def pages(site: Path) -> list[Path]:
    return [page for page in sorted(site.rglob("*.html")) if page.name not in NOT_PAGES]


def pictures(site: Path) -> list[Path]:
    """Pictures with text, which a page shows as images, whose text the page does not know."""
    return [
        path for path in sorted(site.rglob("*.svg")) if "assets" not in path.parts and b"<text" in path.read_bytes()
    ]


def look(browser: Browser, page: Path, site: Path, width: int, screenshots: Path | None = None) -> Look:
    """Open a page; write NAME-WIDTH.png where a folder is given."""
    browser.open(page, width=width, height=900, mobile=width < 600)
    browser.run("document.fonts.ready.then(() => 0)")
    time.sleep(0.15)
    faults = browser.run(UNREADABLE)
    height = browser.run("document.documentElement.scrollHeight")
    name = str(page.relative_to(site))
    if width == WIDTHS[0] and height > TALLEST.get(name.split("/")[0], height):
        faults.append(f"{height} px tall; expected at most {TALLEST[name.split('/')[0]]}")
    if screenshots is not None:
        stem = name.removesuffix(".html").replace("/", "-")
        for dark in (False, True):
            browser.dark(dark)
            time.sleep(0.1)
            browser.picture(screenshots / f"{stem}-{width}{'-dark' * dark}.png", whole=True)
        browser.dark(False)
    return Look(name, width, height, tuple(faults))


def every(browser: Browser, site: Path, screenshots: Path | None = None) -> Iterator[Look]:
    """Look at every page at both widths, and at every picture."""
    for page in pages(site):
        for width in WIDTHS:
            yield look(browser, page, site, width, screenshots)
    for picture in pictures(site):
        browser.open(picture, width=WIDTHS[0])
        found = [fault for fault in browser.run(UNREADABLE) if not fault.startswith("wider")]
        yield Look(str(picture.relative_to(site)), WIDTHS[0], 0, tuple(found))


def main() -> None:
    site, screenshots = Path(sys.argv[1]), Path(sys.argv[2])
    program = find_browser()
    if program is None:
        print("docs: no Chromium here, so the pages were not looked at. On Debian and Ubuntu: apt install chromium")
        return
    screenshots.mkdir(parents=True, exist_ok=True)
    browser = Browser(program)
    try:
        looks = list(every(browser, site, screenshots))
    finally:
        browser.close()
    wrong = [one for one in looks if one.faults]
    for one in wrong:
        print(f"{one.page} at {one.width} px: {'; '.join(one.faults)}")
    print(f"docs: {len(looks)} looks, {len(wrong)} with text that cannot be read; screenshots in {screenshots}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

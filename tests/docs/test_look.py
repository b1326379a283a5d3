"""What finds text that cannot be read, on pages made for it."""

from __future__ import annotations

from pathlib import Path

from docs.site.parameters import shown, undescribed


def test_every_object_of_the_reference_describes_what_it_takes() -> None:
    names = list(shown(Path(__file__).resolve().parents[2] / "docs" / "api"))
    assert len(names) > 60
    assert {name: missing for name in names if (missing := undescribed(name))} == {}
    assert undescribed("docs.site.look.look") == ["browser", "page", "site", "width", "screenshots"]

"""The tutorials run, their numbers hold, and the examples of the reference are true."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import eqprop
from docs.site.tutorial import cells, execute, scripts

DOCS = Path(__file__).resolve().parents[2] / "docs"
TUTORIALS = scripts(DOCS)


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_its_assertions_hold(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EQPROP_SHORT", "1")
    monkeypatch.chdir(tmp_path)
    page = execute(path)
    assert page.markdown.startswith("# ")
    assert "assert " in path.read_text(encoding="utf-8"), "a tutorial asserts its numbers"
    assert "```text" in page.markdown, "and prints some"


def test_cells_are_split_and_output_stands_below_its_cell(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text("hidden = 2\n# %% [markdown]\n# # Title\n#\n# Text.\n# %%\nprint(hidden + 1)\n")
    page = execute(script)
    assert page.markdown == '# Title\n\nText.\n\n```python\nprint(hidden + 1)\n```\n\n```text title="Output"\n3\n```\n'
    assert [cell.markdown for cell in cells(script.read_text())] == [True, False]


def test_a_wrong_number_stops_the_build(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("# %%\nx = 1\n\n# %%\nassert x == 2\n")
    with pytest.raises(AssertionError):
        execute(script)


@pytest.mark.parametrize("path", sorted((DOCS / "api").glob("*.md")), ids=lambda path: path.stem)
def test_the_examples_of_the_reference_are_true(path: Path) -> None:
    failed, tried = doctest.testfile(str(path), module_relative=False)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("name", eqprop.__all__)
def test_a_public_name_is_in_the_reference_with_an_example(name: str) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md")))
    examples = "".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
    assert re.search(rf"\beqprop\.{name}\b", examples), "an example uses it"
    if not (name == "__version__" or isinstance(getattr(eqprop, name), ModuleType)):
        assert re.search(rf"^::: eqprop\.([a-z_.]+\.)?{name}$", text, re.M), "its docstring is shown"


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_notebook_holds_the_cells_of_its_script_with_their_outputs(path: Path) -> None:
    """Made anew by `python -m docs.site.tutorial`, which executes the script."""
    made = json.loads((DOCS / "notebooks" / f"{path.stem}.ipynb").read_text(encoding="utf-8"))
    shown = [(cell["cell_type"] == "markdown", "".join(cell["source"])) for cell in made["cells"]]
    wanted = cells(path.read_text(encoding="utf-8"))
    assert shown == [(c.markdown, re.sub(r"^# ?", "", c.text, flags=re.M) if c.markdown else c.text) for c in wanted]
    outputs = [out for cell in made["cells"] for out in cell.get("outputs", ())]
    assert any(out["output_type"] == "stream" and out["text"] for out in outputs)
    assert (made["nbformat"], len({cell["id"] for cell in made["cells"]})) == (4, len(made["cells"]))

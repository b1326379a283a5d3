"""The reference of settings: every field of a spec with its option, default and sentence, from its declaration."""

from __future__ import annotations

from collections.abc import Iterable

from docs.build.text import table
from eqprop.cli.options import shown_default
from eqprop.estimators.named import ESTIMATORS
from eqprop.run.spec import MODEL_KINDS, SECTIONS
from eqprop.settings import Field, fields_of

INTRODUCTION = """# Settings

Every setting of an experiment, section by section: its name in a TOML file, its option and its default.
[Those of models](models-settings.md) have a page of their own.
A default holds where an experiment does not say; `eqprop show P-1h` prints what one says, as a file to copy and edit.
"""
COLUMNS = ("setting", "option", "default", "what it is")


MODELS = """# Settings of models

What a net is made of, by its kind; everything else is under [settings](settings.md).
"""


def page(models: bool = False) -> str:
    """The page in Markdown: of models, or of everything else."""
    parts = [MODELS if models else INTRODUCTION]
    for section, kind in SECTIONS.items():
        if (section == "model") != models:
            continue
        common = list(fields_of(kind, section))
        parts += [f"## {section}", _table(common)]
        known = {f.leaf for f in common}
        for title, settings in _kinds(section):
            own = [f for f in fields_of(settings, section) if f.leaf not in known]
            if own:
                parts += [f"### {title}", _table(own)]
    return "\n\n".join(parts) + "\n"


def _kinds(section: str) -> Iterable[tuple[str, type]]:
    """The settings that only some models or estimators have, with what they are of."""
    if section == "model":
        return [(f'kind = "{name}"', kind) for name, kind in MODEL_KINDS.items()]
    if section == "estimator":
        return [(f'kind = "{name}"', form.settings) for name, form in ESTIMATORS.built_in.items()]
    return []


def _table(fields: Iterable[Field]) -> str:
    rows = [[f"`{f.place}`", f"`{f.flag}`", _default(f), f.help.replace("|", r"\|")] for f in fields]
    return table(COLUMNS, rows, words=4)


def _default(field: Field) -> str:
    found = shown_default(field)
    return f"`{found}`" if found else "–"

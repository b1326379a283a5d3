"""experiment.json: a run as its folder describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from eqprop import papers
from eqprop.messages import shown
from eqprop.run.folder import EXPERIMENT, FORMAT, read_json
from eqprop.run.session import identity
from eqprop.run.spec import Spec

EARLIER = "earlier_epochs"
"""Field of experiment.json: the numbers of epochs a run was to have before they were raised, the first one first."""


class _Data(msgspec.Struct):
    """What must hold of the data of a run, as far as it is said."""

    name: str | None = None
    sha256: str | None = None
    set: str | None = None
    directory: str | None = None
    training_samples: int | None = None
    test_samples: int | None = None
    class_names: list[str] = []


class _Description(msgspec.Struct):
    """What experiment.json holds besides the spec."""

    experiment: dict[str, Any]
    data: _Data
    changes_from_paper: list[str] | None = None
    earlier_epochs: list[int] = []


@dataclass(frozen=True)
class Description:
    """The spec of a run and the content of experiment.json, parsed."""

    spec: Spec
    content: Mapping[str, Any]

    @property
    def data(self) -> Mapping[str, Any]:
        """Name, checksum, sample counts and origin of the data."""
        found: Mapping[str, Any] = self.content["data"]
        return found

    @property
    def changes(self) -> list[str]:
        """Differences from the paper's settings."""
        return list(self.content.get("changes_from_paper") or [])

    @property
    def earlier_epochs(self) -> tuple[int, ...]:
        """The numbers of epochs the run was to have before they were raised."""
        return tuple(self.content.get(EARLIER, ()))

    @property
    def identity(self) -> str:
        """Digest that ties checkpoints to it."""
        return identity(self.content["experiment"], self.data, next(iter(self.earlier_epochs), None))

    def lengthened(self, epochs: int) -> Description:
        """The same run with more epochs. Raises if a run of so many would have begun differently."""
        now = self.spec.optimizer
        longer = self.spec.override(epochs=epochs)
        if epochs < now.epochs:
            raise ValueError(
                f"epochs is {shown(epochs)}; the run is to have {now.epochs}, and they can only be raised. Stop it "
                "with Ctrl-C to train fewer."
            )
        if now.decay != "none" and now.decay_epochs is None:
            raise ValueError(
                f"epochs cannot be raised to {epochs}: the rates fall ({now.decay}) over the {now.epochs} epochs of "
                f"the run, so one of {epochs} would have had others from the start. Start a new run, or say over how "
                "many epochs they fall: --decay-epochs."
            )
        printed = papers.printed(longer)
        changes = None if printed is None else [str(change) for change in longer.changes(printed)]
        content = {
            **self.content,
            "experiment": longer.to_dict(),
            EARLIER: [*self.earlier_epochs, now.epochs],
            "changes_from_paper": changes,
        }
        return replace(self, spec=longer, content=content)


def read_description(folder: Path) -> Description:
    """Read the spec and the data of a run."""
    path = folder / EXPERIMENT
    content = read_json(path, "the experiment of the run; without it this is not a run folder")
    if content.get("format") != FORMAT:
        found = content.get("format")
        raise ValueError(f"{path} has format {found!r}; this version reads {FORMAT}. Use the version that wrote it.")
    try:
        msgspec.convert(content, _Description)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is damaged ({error}); expected a run. Restore it from a copy.") from error
    try:
        spec = Spec(**content["experiment"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error} Restore it from a copy.") from error
    return Description(spec, content)

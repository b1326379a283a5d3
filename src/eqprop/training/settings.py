"""How a record is run: methods, trials, device, engine. With the record it says everything a run depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from eqprop.engines import engine_names
from eqprop.experiments.record import METHODS
from eqprop.experiments.suggest import unknown


@dataclass(frozen=True)
class Settings:
    """What a run is, beside its record.

    methods             "ep", "bptt", "rbp", trained one after the other from the same weights and batches
    trials              networks trained, trial r from seed + r
    engine, device      see `eqprop.engines`; "auto" takes the fastest engine that serves
    threads             of the CPU; None: as torch has it
    validation          hold out the last N training samples, and test on them instead of the test set
    samples             train on the first N samples only; None: all
    train_error_every   measure the error on the whole training set every N epochs; 0: after the last one only
    checkpoint_every    seconds between two checkpoints inside a long epoch
    stacked             trials side by side as one stacked network; None: where that is possible and faster
    states              where persistent states are kept: on the "device", or on the "cpu" where they do not fit there
    """

    methods: tuple[str, ...] = ("ep",)
    trials: int = 1
    engine: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    validation: int = 0
    samples: int | None = None
    train_error_every: int = 0
    checkpoint_every: float = 120.0
    stacked: bool | None = None
    states: str = "device"

    def __post_init__(self) -> None:
        strange = next((m for m in self.methods if m not in METHODS), None)
        if strange is not None:
            raise ValueError(unknown("method", strange, METHODS))
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods is {self.methods}; expected one or more different ones of {', '.join(METHODS)}.")
        if self.engine not in engine_names():
            raise ValueError(unknown("engine", self.engine, engine_names()))
        for name, least in (("trials", 1), ("validation", 0), ("train_error_every", 0), ("threads", 1), ("samples", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name} is {value!r}; expected a whole number, {least} or more.")
        if self.states not in ("device", "cpu"):
            raise ValueError(
                f"states is {self.states!r}; expected 'device' or 'cpu', where persistent states are kept."
            )
        if not self.checkpoint_every > 0:
            raise ValueError(f"checkpoint_every is {self.checkpoint_every!r}; expected a number of seconds above 0.")

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any], source: str) -> Settings:
        known = [f.name for f in fields(cls)]
        strange = next((name for name in values if name not in known), None)
        if strange is not None:
            raise ValueError(f"{source}: {unknown('setting', strange, known)}")
        return cls(**{**values, "methods": tuple(values.get("methods", ("ep",)))})


def split_methods(text: str) -> tuple[str, ...]:
    """ "ep,bptt" -> ("ep", "bptt")."""
    return tuple(part.strip().lower() for part in text.split(",") if part.strip())

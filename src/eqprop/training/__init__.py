"""Training: records in, run folders out. Runs can be stopped, resumed, loaded and measured again."""

from eqprop.training.interruption import Stopped
from eqprop.training.load import evaluate, load, predict
from eqprop.training.result import Result
from eqprop.training.run import resume, train
from eqprop.training.settings import Settings
from eqprop.training.watch import Watch

__all__ = ["Result", "Settings", "Stopped", "Watch", "evaluate", "load", "predict", "resume", "train"]

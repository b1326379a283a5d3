"""Training: experiments in, run folders out. Runs can be stopped, resumed, loaded and evaluated again."""

from eqprop.training.api import resume, train
from eqprop.training.evaluate import evaluate, load, predict
from eqprop.training.loop import Stopped
from eqprop.training.metrics import Result
from eqprop.training.plan import Settings
from eqprop.training.watch import EarlyStopping, Watch

__all__ = ["EarlyStopping", "Result", "Settings", "Stopped", "Watch", "evaluate", "load", "predict", "resume", "train"]

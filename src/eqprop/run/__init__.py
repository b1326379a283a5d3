"""Training: specs in, run folders out. Runs can be stopped, resumed, loaded and evaluated again."""

from eqprop.run.api import resume, train
from eqprop.run.evaluate import evaluate, load, predict
from eqprop.run.loop import Stopped
from eqprop.run.metrics import Result
from eqprop.run.session import Session, bind
from eqprop.run.spec import Spec
from eqprop.run.watch import EarlyStopping, Watch

__all__ = [
    "EarlyStopping",
    "Result",
    "Session",
    "Spec",
    "Stopped",
    "Watch",
    "bind",
    "evaluate",
    "load",
    "predict",
    "resume",
    "train",
]

"""The engine `xla`: both phases and the gradient of any model as one program of the compiler XLA."""

from eqprop.engines.xla.engine import Xla

__all__ = ["Xla"]

"""Where free phases begin: at zero, at the sample's last steady state, or where a feed-forward net expects it."""

from eqprop.starts.base import STARTS, Start, StartName
from eqprop.starts.initialised import Initialised
from eqprop.starts.persistent import Persistent, fingerprint

__all__ = ["STARTS", "Initialised", "Persistent", "Start", "StartName", "fingerprint"]

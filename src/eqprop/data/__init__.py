"""Data sets as tensors: MNIST, shipped with the package, others by name, and any directory of IDX files."""

from eqprop.data.idx import Idx, read_idx
from eqprop.data.images import Images, idx_directory, mnist, one_hot, split_validation
from eqprop.data.sources import NAMES, open_set, set_name

__all__ = [
    "NAMES",
    "Idx",
    "Images",
    "idx_directory",
    "mnist",
    "one_hot",
    "open_set",
    "read_idx",
    "set_name",
    "split_validation",
]

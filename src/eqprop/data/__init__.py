"""Data sets as tensors: MNIST, shipped with the package, and any directory of IDX files."""

from eqprop.data.idx import Idx, read_idx
from eqprop.data.images import Images, idx_directory, mnist, one_hot, split_validation

__all__ = ["Idx", "Images", "idx_directory", "mnist", "one_hot", "read_idx", "split_validation"]

"""Data sets as tensors: MNIST, shipped with the package, others by name, directories of IDX files, your own arrays."""

from eqprop.data.arrays import Data, as_images, content_digest, from_arrays
from eqprop.data.idx import Idx, read_idx
from eqprop.data.images import Images, idx_directory, mnist, one_hot, split_validation
from eqprop.data.sources import NAMES, open_set, set_name

__all__ = [
    "NAMES",
    "Data",
    "Idx",
    "Images",
    "as_images",
    "content_digest",
    "from_arrays",
    "idx_directory",
    "mnist",
    "one_hot",
    "open_set",
    "read_idx",
    "set_name",
    "split_validation",
]

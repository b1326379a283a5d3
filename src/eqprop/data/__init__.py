"""Data sets as tensors: MNIST, shipped with the package, others by name or from directories, your own arrays."""

from eqprop.data.arrays import Data, as_images, content_digest, from_arrays, image_folder
from eqprop.data.augment import Augmentation, Normalisation
from eqprop.data.idx import Idx, read_idx
from eqprop.data.images import Images, as_floats, idx_directory, mnist, one_hot, split_validation
from eqprop.data.sources import NAMES, cifar10, cifar100, open_set, set_name
from eqprop.data.streamed import Streamed, streamed

__all__ = [
    "NAMES",
    "Augmentation",
    "Data",
    "Idx",
    "Images",
    "Normalisation",
    "Streamed",
    "as_floats",
    "as_images",
    "cifar10",
    "cifar100",
    "content_digest",
    "from_arrays",
    "idx_directory",
    "image_folder",
    "mnist",
    "one_hot",
    "open_set",
    "read_idx",
    "set_name",
    "split_validation",
    "streamed",
]

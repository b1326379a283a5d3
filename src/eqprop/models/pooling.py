"""Convolution, pooling and their inverses as the paper defines them  [defconv, invpool, lma:conv].

Inputs are (B, C, H, W), or (R, B, C, H, W) for stacked networks, which become groups of one convolution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight


class Pooled(NamedTuple):
    """P(z), and for the inverse the positions of the maxima in z and the size of z."""

    values: Tensor
    indices: Tensor
    size: tuple[int, int]


def conv(h: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """W * h + b  [defconv]."""
    if weight.dim() == 4:
        return F.conv2d(h, weight, bias, padding=padding)
    networks = weight.shape[0]
    flat_bias = None if bias is None else bias.flatten()
    z = F.conv2d(_join(h), weight.flatten(0, 1), flat_bias, padding=padding, groups=networks)
    return _part(z, networks)


def conv_transpose(z: Tensor, weight: Tensor, padding: int) -> Tensor:
    """W~ * z, the convolution by the flipped kernel, padded so that the size before the convolution comes back."""
    if weight.dim() == 4:
        return F.conv_transpose2d(z, weight, padding=padding)
    networks = weight.shape[0]
    return _part(F.conv_transpose2d(_join(z), weight.flatten(0, 1), padding=padding, groups=networks), networks)


def conv_weight(h: Tensor, z: Tensor, weight: Tensor, padding: int) -> Tensor:
    """z * h: the derivative of sum(z . (W * h)) by W, summed over the batch  [lma3]."""
    if weight.dim() == 4:
        return conv2d_weight(h, weight.shape, z, padding=padding)
    networks = weight.shape[0]
    shape = weight.flatten(0, 1).shape
    grad = conv2d_weight(_join(h), shape, _join(z), padding=padding, groups=networks)
    return grad.unflatten(0, (networks, -1))


def pool(z: Tensor, size: int) -> Pooled:
    """P(z): the maximum of each size x size zone, and where it is."""
    values, indices = F.max_pool2d(z.flatten(0, -4), size, return_indices=True)
    lead = z.shape[:-3]
    return Pooled(values.unflatten(0, lead), indices.unflatten(0, lead), (z.shape[-2], z.shape[-1]))


def unpool(h: Tensor, pooled: Pooled, size: int) -> Tensor:
    """P^-1(h): h at the positions of the maxima, zero elsewhere  [invpool]."""
    spread = F.max_unpool2d(h.flatten(0, -4), pooled.indices.flatten(0, -4), (size, size), output_size=pooled.size)
    return spread.unflatten(0, h.shape[:-3])


def _join(h: Tensor) -> Tensor:
    """(R, B, C, H, W) -> (B, R C, H, W)."""
    return h.transpose(0, 1).flatten(1, 2)


def _part(z: Tensor, networks: int) -> Tensor:
    """(B, R C, H, W) -> (R, B, C, H, W)."""
    return z.unflatten(1, (networks, -1)).transpose(0, 1)

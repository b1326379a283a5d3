"""Processes of a few neurons and synapses of ONE sample, as the paper draws them  [fig:toy-model, th-conv]."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eqprop.gdu.groups import Group, batch_mean
from eqprop.gdu.lockstep import Moment

CANDIDATES = 40
"""How many elements are followed for each one shown: elements without any signal are not shown."""


@dataclass(frozen=True)
class Trace:
    """Some elements of a group over t = 0, ..., K-1, and the root mean square over all of them at each t.

    elements    their positions in the layer or the parameter
    ep, bptt    (elements, K) EP's updates and minus BPTT's gradients
    rms_ep, rms_bptt    (K,)
    """

    elements: list[tuple[int, ...]]
    ep: list[list[float]]
    bptt: list[list[float]]
    rms_ep: list[float]
    rms_bptt: list[float]


def follow(moments: Iterable[Moment], every: tuple[Group, ...], shown: int, seed: int) -> dict[Group, Trace]:
    """Traces of the moments of a single sample; the elements are drawn at random, those without a signal left out."""
    source = torch.Generator().manual_seed(seed)
    chosen: dict[Group, Tensor] = {}
    kept: dict[Group, tuple[list[Tensor], list[Tensor]]] = {group: ([], []) for group in every}
    sizes: dict[Group, tuple[int, ...]] = {}
    for moment in moments:
        for group in every:
            values = [batch_mean(step, group) for step in (moment.ep, moment.bptt)]
            if group not in chosen:
                count = values[0].numel()
                sizes[group] = tuple(values[0].shape)
                chosen[group] = torch.randperm(count, generator=source)[: shown * CANDIDATES].to(values[0].device)
            for rows, value in zip(kept[group], values, strict=True):
                flat = value.flatten()
                rows.append(torch.cat([flat[chosen[group]], flat.square().mean().sqrt().view(1)]).double().cpu())
    return {
        group: _trace(chosen[group].cpu(), sizes[group], torch.stack(ep), torch.stack(bptt), shown)
        for group, (ep, bptt) in kept.items()
    }


def _trace(chosen: Tensor, size: tuple[int, ...], ep: Tensor, bptt: Tensor, shown: int) -> Trace:
    """ep, bptt: (K, candidates + 1), the root mean square last."""
    alive = ((ep != 0) | (bptt != 0)).any(0)[:-1]
    order = torch.cat([alive.nonzero().flatten(), (~alive).nonzero().flatten()])[:shown]
    positions = [tuple(int(i) for i in torch.unravel_index(chosen[k], size)) for k in order]
    return Trace(
        positions, ep[:, order].T.tolist(), bptt[:, order].T.tolist(), ep[:, -1].tolist(), bptt[:, -1].tolist()
    )

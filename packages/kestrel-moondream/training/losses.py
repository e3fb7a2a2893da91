"""Training targets: next tokens, and coordinate and size bins with soft neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import QUERIES, SPATIAL_START, Tasks
from .model import NanoModel, bin_size, coord_bin, size_bin
from .pieces import COORD, SIZE
from .tasks import QUERY_LENGTH

SOFT_BINS = 1.0  # standard deviation of the target over neighbouring bins


def quantised(tasks: Tasks, model: NanoModel) -> Tensor:
    """Values as they are fed back at inference: rounded to their bins."""
    c = model.config
    bins = c.size_out_dim // 2
    coordinates = coord_bin(tasks.values, c.coord_out_dim) / c.coord_out_dim
    sizes = bin_size(size_bin(tasks.values, bins).round(), bins)
    return torch.where((tasks.tokens == SIZE)[..., None], sizes, coordinates)


def loss_terms(model: NanoModel, hidden: Tensor, tasks: Tasks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token loss, coordinate loss, size loss, and which next tokens are right [B, T - 1].

    The last token of a slot predicts the first of the next, which has no weight.
    """
    target, weight = tasks.tokens[:, 1:], tasks.weight[:, 1:]
    logits = model.logits(hidden[:, :-1]).float()
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(weight)
    token = (losses * weight).sum() / weight.sum()
    s = SPATIAL_START
    h, target, weight, goal = hidden[:, s:-1], target[:, s:], weight[:, s:], tasks.values[:, s + 1 :]
    c = model.config
    coord = _soft(
        model.region.coord_decoder(h), goal[..., 0] * c.coord_out_dim, (target == COORD) & (weight > 0)
    )
    size_logits = model.region.size_decoder(h).unflatten(-1, (2, -1))
    bins = size_bin(goal, c.size_out_dim // 2)
    size = _soft(size_logits, bins, ((target == SIZE) & (weight > 0))[..., None].expand_as(bins))
    return token, coord, size, logits.argmax(-1) == tasks.tokens[:, 1:]


def _soft(logits: Tensor, goal: Tensor, counts: Tensor) -> Tensor:
    """Mean cross entropy with a bell of ``SOFT_BINS`` around the real-valued bin ``goal``, where ``counts``."""
    index = torch.arange(logits.shape[-1], device=logits.device)
    share = (-0.5 * ((index - goal[..., None]) / SOFT_BINS) ** 2).softmax(-1)
    losses = -(share * logits.float().log_softmax(-1)).sum(-1)
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def right_queries(right: Tensor, tasks: Tasks) -> tuple[Tensor, Tensor]:
    """Whether every token of each query's answer is right, and whether it was asked at all: [B, QUERIES] each."""
    needed = tasks.weight > 0
    ok = F.pad(right, (1, 0), value=True) | ~needed
    shape = (QUERIES, QUERY_LENGTH)
    asked = needed[:, :SPATIAL_START].unflatten(1, shape).any(2)
    return ok[:, :SPATIAL_START].unflatten(1, shape).all(2), asked

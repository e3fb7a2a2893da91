"""Logits to token ids, aux bins and log-probabilities. Owns per-row sampling state; knows no schedule and no model."""

from kestrel.sampling.params import SamplingParams
from kestrel.sampling.ranges import intersect
from kestrel.sampling.sample_ops import resolve_sampling
from kestrel.sampling.sampled import RowStatus, Sampled, token_logprobs
from kestrel.sampling.sampler import Sampler

__all__ = [
    "RowStatus",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "intersect",
    "resolve_sampling",
    "token_logprobs",
]

"""The text decoder: one LayerNorm per block feeds attention and MLP side by side (as in Phi).

Differs from the textbook decoder: x + attn(ln x) + mlp(ln x); rotary embedding turns the first half of each head;
all linears and norms have biases; the head is not tied to the embedding.

Letters: T tokens, C hidden, H query heads, K key/value heads, D head dim, N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from kestrel.layers import (
    MLP,
    AddNorm,
    Angles,
    LayerNorm,
    Linear,
    LinearPair,
    LinearSum,
    PagedAttention,
    Rope,
    Stored,
    embed,
    multiplies_in_8_bits,
)
from kestrel.spi import Batch, OpTableLike
from kestrel_moondream.config import TextConfig
from kestrel_moondream.eight_bits import EightBits

__all__ = ["STATE", "TextDecoder"]

STATE = "text"  # the one paged state of the model
EPS = 1e-5  # of every norm


class SelfAttention(nn.Module):
    """Causal attention, but for bidirectional ranges; ``qkv`` holds queries, keys and values of all heads in order."""

    def __init__(
        self, config: TextConfig, layer: int, ops: OpTableLike, dtype: torch.dtype, page_size: int
    ) -> None:
        super().__init__()
        self.heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        self.head_dim = config.head_dim
        self.qkv = Linear(ops, config.dim, sum(self.heads) * config.head_dim, dtype=dtype)
        self.proj = Linear(ops, config.dim, config.dim, dtype=dtype)
        self.attend = PagedAttention(
            ops, config.n_heads, config.n_kv_heads, config.head_dim, STATE, layer,
            rot_dim=config.rot_dim, page_size=page_size, dtype=dtype,
        )  # fmt: skip

    def forward(self, qkv: torch.Tensor, angles: Angles, batch: Batch) -> torch.Tensor:
        """What ``proj`` gets [T, C], of what ``qkv`` made."""
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split_with_sizes(self.heads, dim=1)
        attended: torch.Tensor = self.attend(q, k, v, batch, angles)
        return attended.flatten(1)


class Block(Stored):
    """x + attn(ln x) + mlp(ln x). ``delta`` is what the block before has yet to add to x."""

    def __init__(
        self, config: TextConfig, layer: int, ops: OpTableLike, dtype: torch.dtype, page_size: int
    ) -> None:
        super().__init__()
        self.ln = AddNorm(ops, config.dim, EPS, kind="layer", dtype=dtype)
        self.attn = SelfAttention(config, layer, ops, dtype, page_size)
        self.mlp = MLP(ops, config.dim, config.ff_dim, accumulate=True, adds_bias=False, dtype=dtype)
        self._into = LinearPair(ops, self.attn.qkv, self.mlp.fc1)
        self.out_of = LinearSum(ops, self.attn.proj, self.mlp.fc2)
        self._eight: EightBits | None = None
        if multiplies_in_8_bits(ops):
            self._eight = EightBits(
                ops, [self.ln], self.attn.qkv, self.attn.proj, self.mlp,
                values=config.n_kv_heads * config.head_dim, offset=False, adds_biases=True,
            )  # fmt: skip

    def pack(self) -> None:
        """Make the weights of 8 bits, of those that were loaded."""
        if self._eight is not None:
            self._eight.fill()

    def forward(
        self, x_TC: torch.Tensor, delta_TC: torch.Tensor | None, angles: Angles, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._eight is not None and not batch.limits.is_decode:
            x_TC, values = self._eight.norms[0](x_TC, delta_TC)
            attended = self._eight.attended(self.attn(self._eight.qkv(values), angles, batch))
            return x_TC, self._eight.mlp(values, self._eight.proj(attended))
        if delta_TC is None and self._into.serves(len(x_TC)) and self.out_of.serves(len(x_TC)):
            qkv, inner = self._into(x_TC, self.ln)
            return self.out_of.total(self.attn(qkv, angles, batch), inner, x_TC), None
        x_TC, h_TC = self.ln(x_TC, delta_TC)
        inner = self.mlp.fc1(h_TC)
        return x_TC, self.out_of(self.attn(self.attn.qkv(h_TC), angles, batch), inner)


class TextDecoder(nn.Module):
    """Token ids to embeddings, embeddings to hidden states, hidden states to logits."""

    def __init__(self, config: TextConfig, ops: OpTableLike, dtype: torch.dtype, page_size: int) -> None:
        super().__init__()
        self.wte = nn.Parameter(torch.empty(config.vocab_size, config.dim, dtype=dtype), requires_grad=False)
        self.blocks = nn.ModuleList(
            Block(config, layer, ops, dtype, page_size) for layer in range(config.n_layers)
        )
        self.post_ln = LayerNorm(ops, config.dim, dtype=dtype)
        self.lm_head = Linear(ops, config.dim, config.vocab_size, norm="layer", dtype=dtype)
        self.rope = Rope(ops, config.head_dim, config.rot_dim, config.rope_theta, dtype=dtype)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, C]."""
        return embed(ids_T, self.wte)

    def forward(self, x_TC: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Hidden states [T, C] before ``post_ln``."""
        angles = self.rope(batch.positions_PT)
        delta_TC: torch.Tensor | None = None
        for block in self.blocks:
            x_TC, delta_TC = block(x_TC, delta_TC, angles, batch)
        return x_TC if delta_TC is None else x_TC + delta_TC

    def logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        """Logits [N, V]."""
        return self.lm_head(self.post_ln.defer(h_NC))

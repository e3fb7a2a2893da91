"""The text decoder: learned positions, causal self-attention, attention to the encoded window, a tied head.

Letters: T tokens, R encoder rows, C width, H heads, D head dim, N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from kestrel.layers import CrossAttention, Deferred, Embedding, LayerNorm, Linear, Packed, PagedAttention
from kestrel.spi import Batch, CrossView, OpTableLike
from kestrel_speech.whisper.config import WhisperConfig

__all__ = ["AUDIO_STATE", "TEXT_STATE", "Decoder"]

TEXT_STATE, AUDIO_STATE = "text", "audio"  # the paged state of self-attention, the cross state of the window


class SelfAttention(nn.Module):
    """Causal attention; keys have no bias in the checkpoint, a row of zeros here."""

    def __init__(
        self, config: WhisperConfig, layer: int, ops: OpTableLike, dtype: torch.dtype, page_size: int
    ) -> None:
        super().__init__()
        dim, self.heads = config.dim, config.decoder_heads
        self.qkv = Packed(ops, dim, {"q": dim, "k": dim, "v": dim}, norm="layer", dtype=dtype)
        self.out_proj = Linear(ops, dim, dim, epilogue="residual", dtype=dtype)
        self.attend = PagedAttention(
            ops,
            self.heads,
            self.heads,
            dim // self.heads,
            TEXT_STATE,
            layer,
            page_size=page_size,
            dtype=dtype,
        )

    def forward(self, h_TC: Deferred, residual_TC: torch.Tensor, batch: Batch) -> torch.Tensor:
        q, k, v = self.qkv(h_TC).unflatten(-1, (3, self.heads, -1)).unbind(1)
        return self.out_proj(self.attend(q, k, v, batch).flatten(1), residual_TC)


class EncoderAttention(nn.Module):
    """Attention to the window; its keys and values are written once, by ``write``."""

    def __init__(self, config: WhisperConfig, layer: int, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        dim, self.heads = config.dim, config.decoder_heads
        self.q_proj = Linear(ops, dim, dim, norm="layer", dtype=dtype)
        self.kv = Packed(ops, dim, {"k": dim, "v": dim}, dtype=dtype)
        self.out_proj = Linear(ops, dim, dim, epilogue="residual", dtype=dtype)
        self.attend = CrossAttention(
            ops,
            self.heads,
            self.heads,
            dim // self.heads,
            AUDIO_STATE,
            layer,
            config.audio_context,
            dtype=dtype,
        )

    def queries(self, h_TC: Deferred) -> torch.Tensor:
        """[T, H, D]."""
        queries: torch.Tensor = self.q_proj(h_TC).unflatten(-1, (self.heads, -1))
        return queries

    def forward(self, q_THD: torch.Tensor, residual_TC: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.out_proj(self.attend(q_THD, batch).flatten(1), residual_TC)

    def write(self, rows_RC: torch.Tensor, lengths: Sequence[int], views: Mapping[str, CrossView]) -> None:
        """Project encoder rows into the entries of ``views``."""
        k, v = self.kv(rows_RC).unflatten(-1, (2, self.heads, -1)).unbind(1)
        self.attend.write(k, v, lengths, views)


class DecoderBlock(nn.Module):
    """Pre-norm self-attention, attention to the window, MLP."""

    def __init__(
        self, config: WhisperConfig, layer: int, ops: OpTableLike, dtype: torch.dtype, page_size: int
    ) -> None:
        super().__init__()
        self.self_attn_layer_norm = LayerNorm(ops, config.dim, dtype=dtype)
        self.self_attn = SelfAttention(config, layer, ops, dtype, page_size)
        self.encoder_attn_layer_norm = LayerNorm(ops, config.dim, dtype=dtype)
        self.encoder_attn = EncoderAttention(config, layer, ops, dtype)
        self.final_layer_norm = LayerNorm(ops, config.dim, dtype=dtype)
        self.fc1 = Linear(ops, config.dim, config.decoder_ffn, epilogue="gelu", norm="layer", dtype=dtype)
        self.fc2 = Linear(ops, config.decoder_ffn, config.dim, epilogue="residual", dtype=dtype)

    def forward(self, x_TC: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's output, and its queries [T, H, D] to the window."""
        x_TC = self.self_attn(self.self_attn_layer_norm.defer(x_TC), x_TC, batch)
        q_THD = self.encoder_attn.queries(self.encoder_attn_layer_norm.defer(x_TC))
        x_TC = self.encoder_attn(q_THD, x_TC, batch)
        return self.fc2(self.fc1(self.final_layer_norm.defer(x_TC)), x_TC), q_THD


class Decoder(nn.Module):
    """Token ids to embeddings, embeddings to hidden states before ``layer_norm``."""

    def __init__(self, config: WhisperConfig, ops: OpTableLike, dtype: torch.dtype, page_size: int) -> None:
        super().__init__()
        self.scale = config.dim**0.5 if config.scale_embedding else 1.0
        self.embed_tokens = Embedding(config.vocab_size, config.dim, dtype=dtype)
        self.embed_positions = Embedding(config.text_context, config.dim, dtype=dtype)
        self.layers = nn.ModuleList(
            DecoderBlock(config, layer, ops, dtype, page_size) for layer in range(config.decoder_layers)
        )
        self.layer_norm = LayerNorm(ops, config.dim, dtype=dtype)

    def embed(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, C]."""
        last = self.embed_positions.weight.shape[0] - 1  # a row of padding may stand anywhere
        x_TC: torch.Tensor = self.embed_tokens(ids_T)
        if self.scale != 1.0:
            x_TC = x_TC * self.scale
        return x_TC + self.embed_positions(positions_T.clamp(max=last))

    def forward(self, x_TC: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states [T, C], and every layer's queries [T, H, D] to the window."""
        queries = []
        for block in self.layers:
            x_TC, q_THD = block(x_TC, batch)
            queries.append(q_THD)
        return x_TC, queries

    def write_cross(
        self, rows_RC: torch.Tensor, lengths: Sequence[int], views: Mapping[str, CrossView]
    ) -> None:
        """Fill the cross entries of ``views`` with what every layer reads of encoder rows."""
        for block in self.layers:
            assert isinstance(block, DecoderBlock)
            block.encoder_attn.write(rows_RC, lengths, views)

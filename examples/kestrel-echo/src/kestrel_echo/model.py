"""The Echo model, its driver and its prompts. Letters: T tokens, C hidden, H query heads, D head dim, N rows."""

import torch
from torch import nn

from kestrel.layers import MLP, Embedding, Linear, Packed, PagedAttention, RMSNorm, Rope
from kestrel.loading import load_weights
from kestrel.spi import Built, Decoding, PagedKV, PromptFormat, TextPart, TokenDriver, TokenSpec
from kestrel.types import Text, Tokens


class EchoModel(nn.Module):
    """x += attention(norm1(x)); x += mlp(norm2(x)): the textbook block, once."""

    def __init__(self, config, ops, page_size, dtype):
        super().__init__()
        dim, heads = config["hidden_size"], config["num_heads"]
        self.head_dim = dim // heads
        self.embed = Embedding(config["vocab_size"], dim, dtype=dtype)
        self.norm1 = RMSNorm(ops, dim, dtype=dtype)
        self.qkv = Packed(ops, dim, {"q": dim, "k": dim, "v": dim}, bias=False, dtype=dtype)
        self.rope = Rope(ops, self.head_dim, dtype=dtype)
        paging = {"state": "kv", "layer": 0, "page_size": page_size}
        self.attention = PagedAttention(ops, heads, heads, self.head_dim, dtype=dtype, **paging)
        self.out = Linear(ops, dim, dim, bias=False, dtype=dtype)
        self.norm2 = RMSNorm(ops, dim, dtype=dtype)
        self.mlp = MLP(ops, dim, config["mlp_size"], bias=False, dtype=dtype)
        self.final_norm = RMSNorm(ops, dim, dtype=dtype)
        self.head = Linear(ops, dim, config["vocab_size"], bias=False, dtype=dtype)

    def forward(self, batch, x_TC):
        parts = self.qkv.split(self.qkv(self.norm1(x_TC)))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        angles = self.rope(batch.positions_PT)
        mixed_THD = self.attention(self.rope.rotate(q, angles), self.rope.rotate(k, angles), v, batch)
        x_TC = x_TC + self.out(mixed_THD.flatten(-2))
        return x_TC + self.mlp(self.norm2(x_TC))


class EchoDriver(TokenDriver):
    """The model as the engine runs it. State is declared, never allocated."""

    def __init__(self, model, config, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        kv = PagedKV(name="kv", layers=1, kv_heads=config["num_heads"], head_dim=model.head_dim)
        sizes = {"hidden_size": config["hidden_size"], "max_positions": config["max_positions"]}
        ends = frozenset({tokenizer.token_id("<end>")})
        self.spec = TokenSpec(vocab_size=config["vocab_size"], eos_ids=ends, states=(kv,), **sizes)

    def embed(self, batch):
        return self.model.embed(batch.ids_T)

    def forward(self, batch, x_TC):
        return self.model(batch, x_TC)

    def logits(self, h_NC):
        return self.model.head(self.model.final_norm(h_NC))


class EchoPrompts(PromptFormat):
    """A question stands between control tokens; a raw prompt stands as it is."""

    skills = frozenset({"generate", "query"})

    def __init__(self, tokenizer):
        self.start, self.end = tokenizer.token_id("<start>"), tokenizer.token_id("<end>")

    def segments(self, skill, call):
        if skill == "query":
            return [Tokens((self.start,)), Text(call.values["question"]), Tokens((self.start,))]
        parts = call.values["parts"]
        return [Text(part.text) if isinstance(part, TextPart) else Tokens(part.ids) for part in parts]

    def decoding(self, skill, call):
        return Decoding(stop_ids=frozenset({self.end}), greedy=True, max_tokens=16)


def build(card, ctx):
    """The loaded model: built without memory, then filled from the checkpoint, every name accounted for."""
    with torch.device("meta"):
        model = EchoModel(card.config, ctx.ops, ctx.config.page_size, ctx.dtype)
    load_weights(model, ctx.weights, device=ctx.device, dtype=ctx.dtype)
    tokenizer = ctx.tokenizer()
    return Built(main=EchoDriver(model, card.config, tokenizer), prompt=EchoPrompts(tokenizer))

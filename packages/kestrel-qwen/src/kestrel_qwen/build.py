"""A checkpoint's card and context become a loaded model. The one place where all parts meet."""

from __future__ import annotations

import torch

from kestrel.errors import LoadError
from kestrel.spi import BuildContext, Built, ModelCard
from kestrel_qwen.config import QwenConfig
from kestrel_qwen.driver import QwenDriver
from kestrel_qwen.fp8 import keeps_blocks
from kestrel_qwen.model import QwenModel
from kestrel_qwen.prompt import QwenPromptFormat
from kestrel_qwen.weights import load

__all__ = ["build"]


def build(card: ModelCard, config: QwenConfig, ctx: BuildContext) -> Built:
    """The driver and prompts of ``card``. LoadError when tensors or tokenizer disagree with ``config``."""
    tokenizer = ctx.tokenizer()
    if tokenizer.vocab_size > config.text.vocab_size:
        raise LoadError(
            f"{card.model_id}: the tokenizer has {tokenizer.vocab_size} ids and the model {config.text.vocab_size}. "
            "Give the tokenizer that the model was trained with as tokenizer_path."
        )
    scaled = keeps_blocks(config, ctx.weights.tensors, ctx.ops, ctx.dtype, ctx.config.fp8_weights)
    with torch.device("meta"):
        model = QwenModel(config, ctx.ops, ctx.dtype, ctx.config.page_size, scaled=scaled)
    load(model, config, ctx.weights, device=ctx.device, dtype=ctx.dtype, scaled=scaled)
    driver = QwenDriver(config, model, tokenizer, ctx.device, ctx.config.recurrent_dtype)
    return Built(main=driver, prompt=QwenPromptFormat.of(card, config, tokenizer, ctx.config))

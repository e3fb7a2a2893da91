"""A checkpoint's card and context become a loaded model. The one place where all parts meet."""

from __future__ import annotations

import torch

from kestrel.errors import LoadError
from kestrel.spi import BuildContext, Built, ModelCard, OpQuery
from kestrel_moondream.config import MoondreamConfig
from kestrel_moondream.driver import MoondreamDriver
from kestrel_moondream.model import MoondreamModel
from kestrel_moondream.prompt import MoondreamPrompt
from kestrel_moondream.weights import load

__all__ = ["build"]


def build(card: ModelCard, config: MoondreamConfig, ctx: BuildContext) -> Built:
    """The driver and prompts of ``card``. LoadError when tensors or tokenizer disagree with ``config``."""
    tokenizer = ctx.tokenizer()
    if tokenizer.vocab_size > config.text.vocab_size:
        raise LoadError(
            f"{card.model_id}: the tokenizer has {tokenizer.vocab_size} ids and the model {config.text.vocab_size}. "
            "Give the tokenizer that the model was trained with as tokenizer_path."
        )
    layers = max(config.text.n_layers, config.vision.enc_n_layers)
    if layers > len(card.tensors):  # of which building a model alone would take for ever
        raise LoadError(
            f"{card.model_id}: config.json has {layers} layers and the checkpoint only {len(card.tensors)} tensors. "
            "Check that both are of one model and revision, and download them again."
        )
    with torch.device("meta"):
        model = MoondreamModel(config, ctx.ops, ctx.dtype, ctx.config.page_size)
    load(model, ctx.weights, device=ctx.device, dtype=ctx.dtype)
    resize = ctx.ops.find(OpQuery.of("resize_crops"))
    driver = MoondreamDriver(config, model, tokenizer, ctx.device, resize)
    return Built(main=driver, prompt=MoondreamPrompt(config))

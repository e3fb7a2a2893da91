"""Hugging Face transformers as the oracle: tiny random models of several shapes, written as checkpoints."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen3_5 import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5_moe import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
)

from kestrel_qwen.tiny import TINY_CONFIG, TINY_MOE, write_sides

# What differs from the tiny config: odd numbers of layers, several ratios of heads, tied and untied.
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {
        "tie": True, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 3, "num_key_value_heads": 3, "linear_num_value_heads": 2,
    },
    "one key head": {
        "num_hidden_layers": 7, "layer_types": None, "full_attention_interval": 4, "num_attention_heads": 6,
        "num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 5, "head_dim": 32,
        "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3,
    },
    "moe": {"moe": True},
    "moe, tied": {"moe": True, "tie": True, "num_hidden_layers": 3, "num_experts": 5, "num_experts_per_tok": 1},
    "text": {"text_only": True, "tie": True},
    "moe text": {"text_only": True, "moe": True},
}  # fmt: skip
CLASSES = {
    (False, False): (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    (True, False): (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
    (False, True): (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    (True, True): (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
}


def hf_model(shape: str, seed: int = 0) -> Any:
    """A random model of ``shape`` in float32."""
    changes = dict(SHAPES[shape])
    is_moe, text_only, tie = (changes.pop(key, False) for key in ("moe", "text_only", "tie"))
    base = json.loads(json.dumps(TINY_MOE if is_moe else TINY_CONFIG))
    text = base["text_config"] | changes
    text.pop("model_type")
    for key in ("architectures", "model_type"):
        base.pop(key)
    config_class, model_class = CLASSES[is_moe, text_only]
    if text_only:
        config = config_class(**text, tie_word_embeddings=tie)
    else:
        base["vision_config"].pop("model_type")
        config = config_class(**base | {"text_config": text, "tie_word_embeddings": tie})
    model = model_class(config).eval()
    _randomise(model, seed)
    return model


def write(model: Any, directory: Path, **options: Any) -> Path:
    """``model`` as ``save_pretrained`` writes it, with a tokenizer and preprocessor files."""
    model.save_pretrained(directory, **options)
    write_sides(directory)
    return directory


def greedy(model: Any, ids: list[int], count: int, **media: Any) -> list[int]:
    """The ``count`` most likely ids after ``ids``, whatever they are."""
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        out = model.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=count, do_sample=False, pad_token_id=0, **media,
        )  # fmt: skip
    return out[0, len(ids) :].tolist()


def logits(model: Any, ids: list[int], **media: Any) -> torch.Tensor:
    """Logits [n, V] of a whole prompt at once."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), **media).logits[0]


def _randomise(model: Any, seed: int) -> None:
    """Weights at which what was read long ago still shows, and the best two logits are rarely close."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    # A tied head would name the token it was given, were its embedding not small beside what the layers add.
    gains = {"embed_tokens.weight": 1.0 if tied else 8.0, "lm_head.weight": 8.0}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(values * 0.5 - 1.5)
            elif parameter.ndim == 1:
                parameter.add_(values * 0.1)
            else:
                gain = next((gain for end, gain in gains.items() if name.endswith(end)), 1.5 if tied else 1.0)
                inputs = parameter.shape[-1] if "experts" in name else parameter[0].numel()
                parameter.copy_(values * gain / inputs**0.5)

"""Small configs for tests that need sizes and ids, and no weights."""

from kestrel_qwen.config import QwenConfig

MEDIA_NAMES = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def config_of(ids, hidden_size=2560, vocab_size=2000, **given):
    """A config with a tower and the given media ids (image, video, start, end)."""
    text = {
        "model_type": "qwen3_5_text", "vocab_size": vocab_size, "hidden_size": hidden_size, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "intermediate_size": 64,
        "rope_parameters": {"rope_theta": 1e7},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": hidden_size,
        "num_position_embeddings": 16, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
    }  # fmt: skip
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    values = {"model_type": "qwen3_5", "text_config": text, "vision_config": vision}
    return QwenConfig.from_hf(values | dict(zip(names, ids, strict=True)), **given)

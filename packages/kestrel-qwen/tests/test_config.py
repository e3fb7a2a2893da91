"""config.json: sizes read, published spellings taken, and what changes the maths refused by name."""

import copy
import json

import pytest

from kestrel.errors import LoadError
from kestrel.loading import read_card
from kestrel_qwen.config import QwenConfig, RopeConfig
from kestrel_qwen.tiny import TINY_CONFIG, TINY_MOE


def config(section=None, base=TINY_CONFIG, **changes):
    values = copy.deepcopy(base)
    (values if section is None else values[section]).update(changes)
    return values


def test_the_tiny_config_is_read():
    got = QwenConfig.from_hf(TINY_CONFIG)
    assert (
        got.text.layers
        == ("linear_attention", "linear_attention", "full_attention") + ("linear_attention",) * 2
    )
    assert (got.text.index(4), got.text.index(2)) == (3, 0)
    assert got.text.rope == RopeConfig(theta=1e7, rot_dim=8, sections=(2, 1, 1))
    assert got.vision.factor == 8
    assert got.eos_ids == {0}
    assert got.text.moe is None
    assert QwenConfig.from_hf(TINY_MOE).text.moe.top_k == 3


def test_the_files_beside_it_are_read(tiny_dir):
    got = QwenConfig.from_card(read_card("a/model", tiny_dir))
    assert got.eos_ids == {0, 2}
    assert (got.images.min_pixels, got.images.max_pixels) == (256, 2048)
    assert got.videos.max_frames == 16


def test_processor_files_of_newer_checkpoints_are_read_too(tiny_dir, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    nested = {
        "image_processor": {"min_pixels": 64, "max_pixels": 640},
        "video_processor": {"fps": 1.5, "size": {"shortest_edge": 64, "longest_edge": 6400}},
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    got = QwenConfig.from_card(read_card("a/model", tmp_path))
    assert (got.images.min_pixels, got.images.max_pixels) == (64, 640)
    assert (got.videos.fps, got.videos.max_pixels) == (1.5, 6400)


def test_frequencies_go_to_time_height_and_width_in_turn():
    rows = RopeConfig(theta=1e7, rot_dim=64).rows
    assert len(rows) == 32
    assert rows[:7] == (0, 1, 2, 0, 1, 2, 0)
    assert [rows.count(axis) for axis in (0, 1, 2)] == [11, 11, 10]
    assert rows[31] == 1, "height has one frequency more than width"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 0]}},
        {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}},
    ],
)
def test_older_spellings_of_rotary_settings_mean_the_same(rope):
    values = config()
    values["text_config"].pop("rope_parameters")
    values["text_config"] |= rope
    assert QwenConfig.from_hf(values).text.rope == RopeConfig(theta=1e6, rot_dim=4, sections=(1, 1, 0))


def test_full_layers_may_be_listed_or_counted():
    values = config("text_config", layer_types=["full_attention"] * 2 + ["linear_attention"] * 3)
    assert QwenConfig.from_hf(values).text.layers[:2] == ("full_attention",) * 2
    values["text_config"].pop("layer_types")
    values["text_config"].pop("full_attention_interval")
    assert QwenConfig.from_hf(values).text.layers.index("full_attention") == 3


def test_a_text_only_config_has_no_vision():
    got = QwenConfig.from_hf(TINY_CONFIG["text_config"] | {"tie_word_embeddings": True})
    assert got.vision is None
    assert got.tied


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("text_config", {"hidden_act": "gelu"}),
        ("text_config", {"attention_bias": True}),
        ("text_config", {"attn_output_gate": False}),
        ("text_config", {"sliding_window": 4096}),
        ("text_config", {"attention_sinks": True}),
        ("text_config", {"logit_scale": 0.5}),
        ("text_config", {"mlp_only_layers": [0]}),
        ("vision_config", {"deepstack_visual_indexes": [5, 11]}),
        ("vision_config", {"hidden_act": "silu"}),
        ("vision_config", {"window_size": 112}),
        ("vision_config", {"model_type": "siglip"}),
        ("text_config", {"model_type": "qwen4_text"}),
        (None, {"audio_config": {"depth": 3}}),
        (None, {"architectures": ["Qwen3_5ForSequenceClassification"]}),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(section, changes):
    with pytest.raises(LoadError, match=next(iter(changes))):
        QwenConfig.from_hf(config(section, **changes))


@pytest.mark.parametrize(
    "rope", [{"rope_type": "yarn", "factor": 4.0}, {"mrope_interleaved": False}, {"attention_factor": 2.0}]
)
def test_other_kinds_of_rotary_embedding_are_refused(rope):
    values = config()
    values["text_config"]["rope_parameters"] |= rope
    with pytest.raises(LoadError, match=next(iter(rope))):
        QwenConfig.from_hf(values)


@pytest.mark.parametrize("rope", [{"rope_type": "yarn"}, {"factor": 4.0}])
def test_the_towers_rotary_embedding_is_checked_too(rope):
    with pytest.raises(LoadError, match=next(iter(rope))):
        QwenConfig.from_hf(config("vision_config", rope_parameters=rope))


def test_settings_that_are_off_or_say_nothing_of_inference_pass():
    harmless = {
        "sliding_window": None, "use_sliding_window": False, "mtp_num_hidden_layers": 1, "attention_dropout": 0.1,
        "mamba_ssm_dtype": "float32", "output_gate_type": "swish", "_name_or_path": "x", "router_aux_loss_coef": 0.001,
    }  # fmt: skip
    plain = QwenConfig.from_hf(config())
    assert QwenConfig.from_hf(config("text_config", **harmless)) == plain
    assert QwenConfig.from_hf(config(transformers_version="5.17.0", language_model_only=False)) == plain


@pytest.mark.parametrize(
    ("section", "changes", "says"),
    [
        (None, {"model_type": "qwen3_vl"}, "qwen3_vl"),
        (None, {"image_token_id": None}, "image_token_id"),
        (None, {"video_token_id": 288}, "video_token_id"),
        (None, {"quantization_config": {"quant_method": "awq"}}, "awq"),
        (
            None,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "weight_block_size",
        ),
        (None, {"quantization_config": ["fp8"]}, "quantization_config"),
        (None, {"text_config": [1]}, "text_config"),
        (None, {"vision_config": "large"}, "vision_config"),
        ("text_config", {"eos_token_id": 288}, "eos_token_id"),
        ("text_config", {"eos_token_id": ["stop"]}, "eos_token_id"),
        (
            "text_config",
            {"rope_parameters": {"rope_theta": 1e7, "mrope_section": ["t", "h", "w"]}},
            "mrope_section",
        ),
        ("text_config", {"hidden_size": None}, "hidden_size"),
        ("text_config", {"num_attention_heads": 0}, "num_attention_heads"),
        ("text_config", {"head_dim": 16.5}, "head_dim"),
        ("text_config", {"num_key_value_heads": 3}, "4 heads over 3"),
        ("text_config", {"layer_types": ["linear_attention"] * 5}, "full attention"),
        ("text_config", {"layer_types": ["full_attention"]}, "num_hidden_layers"),
        ("text_config", {"layer_types": ["mamba"] * 5}, "mamba"),
        ("text_config", {"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ("vision_config", {"num_position_embeddings": 35}, "square"),
        ("vision_config", {"out_hidden_size": 32}, "out_hidden_size"),
        ("vision_config", {"patch_size": None}, "patch_size"),
    ],
)
def test_what_is_missing_or_contradictory_is_named(section, changes, says):
    with pytest.raises(LoadError, match=says):
        QwenConfig.from_hf(config(section, **changes))


def test_more_experts_of_a_token_than_there_are_is_refused():
    with pytest.raises(LoadError, match="num_experts_per_tok"):
        QwenConfig.from_hf(config("text_config", TINY_MOE, num_experts_per_tok=9))


@pytest.mark.parametrize(
    ("images", "says"),
    [
        ({"do_normalize": False}, "do_normalize"),
        ({"do_resize": False}, "do_resize"),
        ({"rescale_factor": 1}, "rescale_factor"),
        ({"resample": 0}, "resample"),
        ({"patch_size": 14}, "patch_size is 14 and vision_config says 4"),
        ({"merge_size": 3}, "merge_size"),
        ({"temporal_patch_size": 1}, "temporal_patch_size"),
        ({"size": [1, 2]}, "size"),
        ({"min_pixels": 4096, "max_pixels": 64}, "least"),
        ({"image_mean": "half"}, "image_mean"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std"),
    ],
)
def test_preprocessor_settings_that_change_what_is_seen_are_refused_by_name(images, says):
    with pytest.raises(LoadError, match=says):
        QwenConfig.from_hf(TINY_CONFIG, images=images)


@pytest.mark.parametrize("videos", [{"fps": "two"}, {"fps": -1}, {"max_frames": 0.5}, {"patch_size": 14}])
def test_the_same_holds_of_clips(videos):
    with pytest.raises(LoadError, match=next(iter(videos))):
        QwenConfig.from_hf(TINY_CONFIG, videos=videos)


def test_the_published_preprocessor_files_pass():
    published = {
        "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 4, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True, "resample": 3,
        "rescale_factor": 0.00392156862745098, "image_processor_type": "Qwen2VLImageProcessorFast",
    }  # fmt: skip
    got = QwenConfig.from_hf(TINY_CONFIG, images=published, videos=published | {"do_sample_frames": True})
    assert got.images.max_pixels == 16_777_216


@pytest.mark.parametrize(
    "generation", [{"temperature": "hot"}, {"temperature": -1}, {"top_p": 1.5}, {"top_k": True}]
)
def test_recommended_sampling_that_cannot_be_is_refused_by_name(generation):
    with pytest.raises(LoadError, match=next(iter(generation))):
        QwenConfig.from_hf(TINY_CONFIG, generation=generation)


def test_a_checkpoint_that_recommends_not_to_sample_is_greedy():
    got = QwenConfig.from_hf(TINY_CONFIG, generation={"do_sample": False, "top_p": 0.8})
    assert got.sampling == {"temperature": 0.0}

"""Names, layouts and strictness: every tensor of a checkpoint has its place, and every place its tensor."""

import json
import logging
import shutil

import pytest
import torch
from qwen_oracle import hf_model, write
from safetensors.torch import load_file, save_file

from kestrel.errors import LoadError
from kestrel.ops import resolve_ops
from kestrel_qwen.config import QwenConfig
from kestrel_qwen.fp8 import dequantised
from kestrel_qwen.model import QwenModel
from kestrel_qwen.released import released_shapes
from kestrel_qwen.tiny import TINY_CONFIG, TINY_MOE, write_tiny

EXPERT = "model.language_model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory):
    """A mixture of experts in the released layout."""
    directory = tmp_path_factory.mktemp("moe")
    write_tiny(directory, 3, TINY_MOE)
    return directory


@pytest.fixture
def edited(tmp_path):
    """A function that writes a copy of a checkpoint with changed tensors and config."""

    def write_copy(source, tensors=None, **config):
        target = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(source, target)
        given = json.loads((source / "config.json").read_text()) | config
        (target / "config.json").write_text(json.dumps(given))
        if tensors is not None:
            contiguous = {name: t.contiguous() for name, t in tensors.items()}
            save_file(contiguous, target / "model.safetensors")
        return target

    return write_copy


def tensors_of(directory):
    return load_file(directory / "model.safetensors")


def state(built):
    return built.main.model.state_dict()


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(t, b[name]) for name, t in a.items())


def split_experts(tensors):
    """Fused experts one by one, as 5.17's save_pretrained and FP8 releases write them."""
    out = {}
    for name, t in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for e, both in enumerate(t):
                out[f"{base}{e}.gate_proj.weight"], out[f"{base}{e}.up_proj.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            out |= {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": d for e, d in enumerate(t)}
        else:
            out[name] = t
    return out


def test_experts_load_fused_or_one_by_one(load, moe_dir, edited):
    tensors = tensors_of(moe_dir)
    assert f"{EXPERT}.gate_up_proj" in tensors
    alone = split_experts(tensors)
    assert f"{EXPERT}.7.down_proj.weight" in alone
    assert same(state(load(edited(moe_dir, alone))), state(load(moe_dir)))


@pytest.mark.parametrize("shape", ["dense", "moe", "tied", "text"])
def test_transformers_names_load_and_so_do_shards(pair, load, tmp_path, shape):
    write(hf_model(shape), tmp_path, max_shard_size="150KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(state(load(tmp_path)), pair(shape).driver.model.state_dict())


def test_the_released_layout_has_the_names_that_transformers_loads():
    for config, shape in ((TINY_CONFIG, "dense"), (TINY_MOE, "moe")):
        ours = released_shapes(QwenConfig.from_hf(config))
        theirs = {name: tuple(p.shape) for name, p in hf_model(shape).named_parameters()}
        assert ours == theirs


@pytest.mark.parametrize(
    ("size", "billions"),
    [("0.8B", 0.853), ("2B", 2.213), ("4B", 4.539), ("9B", 9.410), ("27B", 27.357), ("35B-A3B", 35.107)],
)
def test_published_sizes_have_their_parameters(size, billions):
    config = QwenConfig.from_hf(published(size))
    with torch.device("meta"):
        model = QwenModel(config, resolve_ops(), torch.bfloat16, page_size=16)
    count = sum(p.numel() for p in model.parameters())
    if config.tied:
        count -= model.lm_head.weight.numel()
    assert count == pytest.approx(billions * 1e9, abs=0.5e6)
    assert count == sum(torch.Size(shape).numel() for shape in released_shapes(config).values())


def published(size):
    """config.json of a published model, as far as sizes go."""
    text_sizes = {  # hidden, layers, feed-forward, heads, key heads, linear value heads, tied
        "0.8B": (1024, 24, 3584, 8, 2, 16, True), "2B": (2048, 24, 6144, 8, 2, 16, True),
        "4B": (2560, 32, 9216, 16, 4, 32, True), "9B": (4096, 32, 12288, 16, 4, 32, False),
        "27B": (5120, 64, 17408, 24, 4, 48, False), "35B-A3B": (2048, 40, 0, 16, 2, 32, False),
    }  # fmt: skip
    towers = {"0.8B": (12, 768, 12, 3072), "2B": (24, 1024, 16, 4096), "4B": (24, 1024, 16, 4096)}
    hidden, layers, wide, heads, kv_heads, value_heads, tied = text_sizes[size]
    depth, dim, vision_heads, vision_wide = towers.get(size, (27, 1152, 16, 4304))
    rope = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    }
    text = {
        "vocab_size": 248320, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
        "linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rope_parameters": rope, "attn_output_gate": True,
        "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "full_attention_interval": 4, "mlp_only_layers": [],
    }  # fmt: skip
    if wide:
        text["intermediate_size"] = wide
    else:
        text |= {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
                 "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001}  # fmt: skip
    vision = TINY_CONFIG["vision_config"] | {
        "depth": depth, "hidden_size": dim, "num_heads": vision_heads, "intermediate_size": vision_wide,
        "patch_size": 16, "num_position_embeddings": 2304, "out_hidden_size": hidden,
    }  # fmt: skip
    return TINY_CONFIG | {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def test_the_draft_head_is_left_out(load, tiny_dir, edited):
    extra = {"mtp.fc.weight": torch.zeros(3, 4), "mtp.layers.0.mlp.gate.weight": torch.zeros(2)}
    assert same(state(load(edited(tiny_dir, tensors_of(tiny_dir) | extra))), state(load(tiny_dir)))


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.language_model.layers.2.self_attn.k_proj.weight",
        "model.language_model.layers.0.linear_attn.A_log",
        "model.language_model.layers.4.mlp.up_proj.weight",
        "model.visual.merger.linear_fc2.bias",
    ],
)
def test_a_missing_tensor_is_named(load, tiny_dir, edited, name):
    rest = {n: t for n, t in tensors_of(tiny_dir).items() if n != name}
    with pytest.raises(LoadError) as caught:
        load(edited(tiny_dir, rest))
    assert len(caught.value.missing) == 1
    assert not caught.value.unexpected


@pytest.mark.parametrize("name", [f"{EXPERT}.3.up_proj.weight", f"{EXPERT}.0.down_proj.weight"])
def test_a_missing_expert_is_named(load, moe_dir, edited, name):
    alone = {n: t for n, t in split_experts(tensors_of(moe_dir)).items() if n != name}
    with pytest.raises(LoadError) as caught:
        load(edited(moe_dir, alone))
    assert caught.value.missing
    assert "rows" in str(caught.value)


@pytest.mark.parametrize("extra", ["model.language_model.layers.0.self_attn.q_proj.bias", "score.weight"])
def test_an_unexpected_tensor_is_named(load, tiny_dir, edited, extra):
    with pytest.raises(LoadError) as caught:
        load(edited(tiny_dir, tensors_of(tiny_dir) | {extra: torch.zeros(3)}))
    assert caught.value.unexpected == (extra,)
    assert not caught.value.missing


def test_a_tied_head_may_be_stored_once_more_but_not_differ(load, tiny_dir, edited):
    tensors = tensors_of(tiny_dir)
    embedding = tensors["model.language_model.embed_tokens.weight"]
    twice = tensors | {"lm_head.weight": embedding.clone()}
    model = load(edited(tiny_dir, twice, tie_word_embeddings=True)).main.model
    assert model.lm_head.weight.data_ptr() == model.language_model.embed_tokens.weight.data_ptr()
    with pytest.raises(LoadError, match="different"):
        load(edited(tiny_dir, tensors, tie_word_embeddings=True))


def test_decays_stay_float32_beside_half_precision_weights(load, tiny_dir, edited):
    half = {n: t if "A_log" in n else t.bfloat16() for n, t in tensors_of(tiny_dir).items()}
    model = load(edited(tiny_dir, half), dtype=torch.bfloat16).main.model
    mixer = model.language_model.layers[0].linear_attn
    assert (mixer.A_log.dtype, mixer.norm.dtype, mixer.dt_bias.dtype) == (
        torch.float32, torch.float32, torch.bfloat16,
    )  # fmt: skip
    assert torch.equal(mixer.A_log, half["model.language_model.layers.0.linear_attn.A_log"])


def test_a_tokenizer_larger_than_the_model_is_refused(load, tiny_dir, edited):
    path = edited(tiny_dir)
    spec = json.loads((path / "tokenizer.json").read_text())
    spec["model"]["vocab"]["ab"] = 288
    (path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(LoadError, match="tokenizer_path"):
        load(path)


BLOCK = (8, 16)


def quantised(tensors, block=BLOCK):
    """The big linears in FP8 with a scale per block, and what they mean as floats."""
    stored, meant = {}, {}
    for name, t in tensors.items():
        is_linear = name.endswith(
            ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight")
        )
        if not is_linear or "visual" in name or t.ndim != 2:
            stored[name] = meant[name] = t
            continue
        rows, columns = (-(-n // b) for n, b in zip(t.shape, block, strict=True))
        scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(len(name))) + 0.5
        stored[name], stored[f"{name}_scale_inv"] = t.to(torch.float8_e4m3fn), scale
        each = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        meant[name] = stored[name].float() * each[: t.shape[0], : t.shape[1]]
    return stored, meant


@pytest.fixture
def fp8(moe_dir, edited):
    """An FP8 mixture of experts, and its tensors as floats."""
    stored, meant = quantised(split_experts(tensors_of(moe_dir)))
    config = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
    return edited(moe_dir, stored, quantization_config=config), stored, meant


def test_fp8_weights_are_used_as_what_they_stand_for_and_this_is_said_once(
    load, fp8, edited, moe_dir, caplog
):
    path, stored, meant = fp8
    with caplog.at_level(logging.INFO, logger="kestrel_qwen"):
        got = state(load(path))
    assert len([r for r in caplog.records if "FP8" in r.message]) == 1
    assert sum(t.dtype == torch.float8_e4m3fn for t in stored.values()) > 100
    assert same(got, state(load(edited(moe_dir, meant))))


def test_an_fp8_tensor_without_its_scale_is_named(load, fp8, edited):
    path, stored, _ = fp8
    name = f"{EXPERT}.5.gate_proj.weight_scale_inv"
    with pytest.raises(LoadError) as caught:
        load(edited(path, {n: t for n, t in stored.items() if n != name}))
    assert caught.value.missing == (name,)


def test_fp8_scales_of_other_blocks_are_refused(load, fp8, edited):
    path, stored, _ = fp8
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(LoadError, match=r"blocks of \[128, 128\]"):
        load(edited(path, stored, quantization_config=config))


def test_a_block_may_end_beyond_the_tensor():
    weight = torch.ones(3, 5).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    want = [[1, 1, 1, 2, 2], [1, 1, 1, 2, 2], [3, 3, 3, 4, 4]]
    assert dequantised(weight, scale, (2, 3)).tolist() == want

"""Block FP8 checkpoints whose weights stay in 8 bits answer as the same weights made wide."""

import asyncio
import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_engine import GREEDY, chat, create

from kestrel.config import RuntimeConfig
from kestrel.engine.loading import survey
from kestrel.engine.memory import plan_memory
from kestrel.errors import LoadError
from kestrel.layers import ScaledExperts, ScaledLinear
from kestrel.loading import SafetensorsReader, load_tokenizer, read_card
from kestrel.ops import OPS, resolve_ops
from kestrel.plugins import PluginHost
from kestrel.skills import builtin_skills
from kestrel.spi import Available, BuildContext, Impl, KernelBackend, No, Yes
from kestrel_qwen import QwenFamily, plugin
from kestrel_qwen.fp8 import dequantised, is_kept, quantised
from kestrel_qwen.tiny import TINY_CONFIG, TINY_MOE, write_tiny

SIZES = {
    "hidden_size": 128, "num_hidden_layers": 3, "head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
MOE_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")
WIDTHS = {"dense": {"intermediate_size": 128}, "moe": dict.fromkeys(MOE_WIDTHS, 128)}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
CALLS = [chat("what is in it?"), chat("a longer question about nothing at all, really"), chat("x")]


def written(directory, kind):
    """An 8-bit checkpoint with experts one by one."""
    base = {"dense": TINY_CONFIG, "moe": TINY_MOE}[kind]
    text = base["text_config"] | SIZES | WIDTHS[kind]
    config = base | {"text_config": text, "vision_config": base["vision_config"] | {"out_hidden_size": 128}}
    write_tiny(directory, 5, config)
    tensors = {}
    for name, t in load_file(directory / "model.safetensors").items():
        if not is_kept(name):
            tensors[name] = t
        elif t.ndim == 2:
            tensors[name], tensors[f"{name}_scale_inv"] = quantised(t)
        else:
            eight, scales = zip(*map(quantised, t), strict=True)
            tensors[name], tensors[f"{name}_scale_inv"] = torch.stack(eight), torch.stack(scales)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCKS}))
    return directory


@pytest.fixture(scope="module", params=["dense", "moe"])
def eight_bits(request, tmp_path_factory):
    return written(tmp_path_factory.mktemp(request.param), request.param)


def answers(directory, *, at_once=False, **config):
    """Answers to ``CALLS``, and bytes of the weights."""

    async def main():
        async with await create(directory, **config) as engine:
            jobs = [engine.chat(**inputs) for _, inputs in CALLS]
            results = await asyncio.gather(*jobs) if at_once else [await job for job in jobs]
            return [r.output for r in results]

    return asyncio.run(main())


def scaled_layers(built):
    return [m for m in built.main.model.modules() if isinstance(m, ScaledLinear | ScaledExperts)]


def size(built):
    return sum(t.nbytes for t in built.main.model.language_model.layers.parameters())


def test_weights_in_8_bits_answer_as_the_same_made_wide(eight_bits):
    assert GREEDY["temperature"] == 0
    kept = answers(eight_bits, fp8_weights="keep")
    assert kept == answers(eight_bits, fp8_weights="widen")
    assert kept == answers(eight_bits, fp8_weights="keep", at_once=True)


def test_they_take_a_quarter_of_float32(load, eight_bits):
    kept, wide = load(eight_bits, fp8_weights="keep"), load(eight_bits, fp8_weights="widen")
    assert len(scaled_layers(kept)) >= 4 * 3
    assert not scaled_layers(wide)
    assert size(kept) < 0.3 * size(wide)


def test_planning_counts_what_stays_in_8_bits_as_one_byte(eight_bits):
    host = PluginHost.from_modules({"qwen": plugin}, skills=builtin_skills())

    def planned(wanted):
        blueprint = survey(RuntimeConfig(model_path=eight_bits, fp8_weights=wanted), host)
        return plan_memory(blueprint, torch.device("cpu"), 1).weight_bytes

    tensors = load_file(eight_bits / "model.safetensors").values()
    eight = sum(t.numel() for t in tensors if t.dtype == torch.float8_e4m3fn)
    assert eight > 0
    assert planned("widen") - planned("keep") == 3 * eight


class Eight(KernelBackend):
    """Multiplies by 8-bit floats, or says that it does not."""

    name, priority = "eight", 10

    def __init__(self, serves):
        self.serves = serves

    def probe(self, device):
        return Available("here")

    def impls(self):
        answer = Yes() if self.serves else No("not today")
        return {
            op: Impl(supports=lambda query: answer, fn=OPS[op].reference)
            for op in ("fp8_linear", "fp8_grouped_experts")
        }


@pytest.mark.parametrize("serves", [True, False])
def test_auto_keeps_what_a_backend_multiplies_by(eight_bits, serves, caplog):
    card = read_card("a/model", eight_bits)
    ctx = BuildContext(
        device=torch.device("cpu"), dtype=torch.float32, ops=resolve_ops(backends=[Eight(serves)]),
        weights=SafetensorsReader.of(card), tokenizer=lambda: load_tokenizer(card.directory),
        config=RuntimeConfig(model_path=eight_bits, fp8_weights="auto"),
    )  # fmt: skip
    with caplog.at_level(logging.INFO, logger="kestrel_qwen"):
        built = QwenFamily().build(card, ctx)
    assert bool(scaled_layers(built)) is serves
    (said,) = [r.getMessage() for r in caplog.records if "FP8" in r.message]
    assert ("stay in 8 bits" in said) is serves
    assert ("no kernel backend here multiplies by blocks" in said) is not serves


def test_blocks_that_no_layer_is_made_for_cannot_be_kept(load, eight_bits, tmp_path):
    config = json.loads((eight_bits / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in eight_bits.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(LoadError, match="blocks of 64 × 64") as caught:
        load(tmp_path, fp8_weights="keep")
    assert "'widen'" in str(caught.value)


def test_one_wide_projection_widens_all(load, eight_bits, tmp_path, caplog):
    tensors = load_file(eight_bits / "model.safetensors")
    name = next(n for n in tensors if n.endswith("linear_attn.out_proj.weight"))
    tensors[name] = dequantised(tensors[name], tensors.pop(f"{name}_scale_inv"), (128, 128))
    for file in eight_bits.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"out_proj\.weight' is F32"):
        load(tmp_path, fp8_weights="keep")
    assert not scaled_layers(load(tmp_path))


def test_quantised_weights_are_close_to_what_they_were():
    weight = torch.randn(130, 200, generator=torch.Generator().manual_seed(0))
    eight, scale = quantised(weight)
    assert (eight.shape, scale.shape) == (weight.shape, (2, 2))
    torch.testing.assert_close(dequantised(eight, scale, (128, 128)), weight, rtol=2**-4, atol=1e-2)

"""Recognition, description, catalogue: what the family says before any tensor is read."""

import subprocess
import sys

from kestrel.loading import read_card
from kestrel.spi import ModelCard, TensorInfo
from kestrel_qwen import QwenFamily
from kestrel_qwen.config import QwenConfig
from kestrel_qwen.released import released_shapes
from kestrel_qwen.tiny import TINY_CONFIG, TINY_MOE

FAMILY = QwenFamily()


def card(tmp_path, config=None, names=(), **fields):
    tensors = {name: TensorInfo((2, 3), "BF16", "model.safetensors") for name in names}
    return ModelCard(model_id="a/model", path=tmp_path, config=config or {}, tensors=tensors, **fields)


def test_published_model_types_are_recognised(tmp_path):
    for kind in ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"):
        assert FAMILY.match(card(tmp_path, {"model_type": kind})) is not None


def test_neighbours_are_not_recognised(tmp_path):
    for kind in ("qwen3", "qwen3_vl", "qwen3_next", "qwen2", "llama", "moondream1"):
        names = released_shapes(QwenConfig.from_hf(TINY_CONFIG))
        assert FAMILY.match(card(tmp_path, {"model_type": kind}, names)) is None
    assert FAMILY.match(card(tmp_path, names=["model.layers.0.linear_attn.in_proj_qkvz.weight"])) is None


def test_a_checkpoint_without_a_config_is_recognised_by_its_tensors(tmp_path):
    assert FAMILY.match(card(tmp_path, names=released_shapes(QwenConfig.from_hf(TINY_CONFIG)))) is not None


def test_a_description_comes_from_config_and_headers(tiny_dir):
    info = FAMILY.describe(read_card("a/model", tiny_dir))
    assert (info.family, info.architecture, info.max_context) == ("qwen", "Qwen 3.5 (dense)", 2048)
    assert set(info.skills) == {"query", "caption", "point", "detect", "chat", "generate"}
    assert 0 < info.num_parameters < 500_000
    assert info.dtype == "F32"


def test_kinds_of_models_are_told_apart(tmp_path):
    assert "8 experts" in FAMILY.describe(card(tmp_path, TINY_MOE)).architecture
    text = FAMILY.describe(card(tmp_path, TINY_CONFIG["text_config"]))
    assert "text only" in text.architecture
    assert set(text.skills) == {"query", "chat", "generate"}


def test_draft_heads_and_scales_are_no_parameters(tmp_path):
    names = ["model.language_model.norm.weight", "mtp.fc.weight", "lm_head.weight_scale_inv"]
    assert FAMILY.describe(card(tmp_path, TINY_CONFIG, names)).num_parameters == 6


def test_the_catalogue_names_what_is_published():
    names = [entry.name for entry in FAMILY.catalog()]
    assert "Qwen/Qwen3.5-0.8B" in names
    assert "Qwen/Qwen3.6-35B-A3B" in names
    assert all(entry.source == f"hf:{entry.name}" for entry in FAMILY.catalog())
    assert all("not yet tested" in entry.note for entry in FAMILY.catalog())


def test_the_plugin_imports_without_torch():
    uses = "kestrel_qwen.plugin.kestrel_model_families()[0].catalog()"
    code = f"import sys, kestrel_qwen.plugin; {uses}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"

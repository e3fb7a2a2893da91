"""What the family recognises and says, without reading a tensor; and which tokenizer a snapshot was trained with."""

import json
import subprocess
import sys

import pytest
from moondream_layouts import original_names, published_shapes

from kestrel.config import RuntimeConfig
from kestrel.errors import LoadError
from kestrel.loading import read_card
from kestrel.spi import hookimpl
from kestrel_moondream import MoondreamFamily, plugin
from kestrel_moondream.snapshot import refuse_legacy

FAMILY = MoondreamFamily()
NAMES = [f"model.{name}" for name in published_shapes()]
MOONDREAM3 = [
    "model.text.blocks.4.mlp.router.weight",
    "text_model.transformer.h.4.gate.weight",
    "text_model.transformer.h.4.mlp.experts.weight",
    "model.text.blocks.0.attn.tau.wq",
    "text_model.transformer.h.0.tau_wqwv",
]


def test_the_plugin_declares_its_interface_version_and_family():
    assert plugin.KESTREL_SPI_VERSION == 1
    assert [f.name for f in plugin.kestrel_model_families()] == ["moondream"]
    assert hookimpl  # the marker that the function above carries


def test_listing_models_imports_no_torch():
    code = (
        "import sys; from kestrel_moondream.plugin import kestrel_model_families as families;"
        "[f.catalog() for f in families()]; print({'torch', 'numpy', 'PIL', 'tokenizers'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


@pytest.mark.parametrize("names", [NAMES, list(original_names(27, 24).values())])
def test_both_layouts_are_recognised_by_their_tensors_alone(card_of, names):
    assert FAMILY.match(card_of(names)) is not None


def test_another_model_is_not_recognised(card_of):
    assert FAMILY.match(card_of(["model.layers.0.self_attn.q_proj.weight"], {"model_type": "llama"})) is None
    assert FAMILY.match(card_of()) is None


def test_a_config_of_the_published_type_is_recognised(card_of):
    assert FAMILY.match(card_of(config={"model_type": "moondream1", "config": {}})) is not None


@pytest.mark.parametrize("sign", MOONDREAM3)
def test_moondream_3_is_recognised_and_refused(card_of, sign):
    card = card_of([*NAMES, sign], {"model_type": "moondream3"})
    assert FAMILY.match(card) is not None
    assert "not supported yet" in FAMILY.describe(card).notes[0]
    with pytest.raises(LoadError, match="Moondream 3 is not supported yet"):
        FAMILY.build(card, None)


def test_the_published_model_is_described_from_its_headers(card_of):
    card = card_of(
        {f"model.{n}": s for n, s in published_shapes().items()}, {"model_type": "moondream1", "config": {}}
    )
    info = FAMILY.describe(card)
    assert info.architecture == "Moondream 2"
    assert 1.9e9 < info.num_parameters < 2.0e9
    assert info.max_context == 2048
    assert info.dtype == "BF16"
    assert set(info.skills) == {"query", "caption", "point", "detect", "chat", "generate"}
    assert info.defaults["query"]["reasoning"] is False


def test_the_catalog_offers_the_embedded_model_first_and_the_published_one_at_a_pinned_revision():
    embedded, published = FAMILY.catalog()
    assert embedded.name == "kestrel/nano"
    assert embedded.embedded
    assert embedded.source.startswith("file:")
    assert "demonstration" in embedded.note
    assert (published.source, published.revision) == ("hf:vikhyatk/moondream2", "2025-06-21")


def write_tokenizer(directory, *, gpt2):
    added = (
        [{"id": 50256, "content": "<|endoftext|>"}] if gpt2 else [{"id": 1, "content": "<|md_reserved_0|>"}]
    )
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "added_tokens": added}))


@pytest.mark.parametrize("revision", ["2025-06-21", None, "main"])
def test_the_stale_tokenizer_of_the_published_repository_is_replaced(card_of, tmp_path, revision):
    write_tokenizer(tmp_path, gpt2=True)
    card = card_of(NAMES, model_id="vikhyatk/moondream2", revision=revision)
    assert FAMILY.tokenizer(card) == "hf:moondream/starmie-v1"
    refuse_legacy(card, forced=False)


def test_a_snapshot_whose_code_names_starmie_gets_it(card_of, tmp_path):
    write_tokenizer(tmp_path, gpt2=True)
    (tmp_path / "moondream.py").write_text('Tokenizer.from_pretrained("moondream/starmie-v1")')
    assert FAMILY.tokenizer(card_of(NAMES)) == "hf:moondream/starmie-v1"


def test_a_tokenizer_with_control_tokens_is_the_snapshots_own(card_of, tmp_path):
    write_tokenizer(tmp_path, gpt2=False)
    assert FAMILY.tokenizer(card_of(NAMES)) is None
    assert FAMILY.tokenizer(card_of(NAMES, model_id="vikhyatk/moondream2")) is None
    refuse_legacy(card_of(NAMES), forced=False)


@pytest.mark.parametrize(("model_id", "revision"), [("a/model", None), ("vikhyatk/moondream2", "2025-04-14")])
def test_a_snapshot_of_the_gpt2_era_is_refused_unless_a_tokenizer_is_forced(
    card_of, tmp_path, model_id, revision
):
    write_tokenizer(tmp_path, gpt2=True)
    card = card_of(NAMES, model_id=model_id, revision=revision)
    assert FAMILY.tokenizer(card) is None
    with pytest.raises(LoadError, match="tokenizer_path"):
        refuse_legacy(card, forced=False)
    refuse_legacy(card, forced=True)


def test_a_forced_tokenizer_is_the_users_word(load, tiny_dir, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    write_tokenizer(tmp_path, gpt2=True)
    with pytest.raises(LoadError, match="GPT-2"):
        load(tmp_path)
    assert load(tmp_path, tokenizer_path=tiny_dir).main.tokenizer.vocab_size == 277


def test_the_tiny_checkpoint_is_a_checkpoint_like_any_other(tiny_dir):
    card = read_card("a/model", tiny_dir)
    assert FAMILY.match(card) is not None
    assert FAMILY.describe(card).num_parameters < 300_000
    assert RuntimeConfig(model_path=tiny_dir).label

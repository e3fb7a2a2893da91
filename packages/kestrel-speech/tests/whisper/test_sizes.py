"""Every published size, without a byte of its weights: names and shapes against transformers, in both layouts."""

import math

import pytest
import torch

from kestrel.errors import LoadError
from kestrel.loading.fit import find_fit
from kestrel.ops import resolve_ops
from kestrel.spi import ModelCard, TensorInfo
from kestrel_speech import WhisperFamily
from kestrel_speech.whisper.config import GenerationConfig, WhisperConfig
from kestrel_speech.whisper.model import WhisperModel
from kestrel_speech.whisper.names import parameter_name
from kestrel_speech.whisper.weights import TIED, BiasedKeys

# name: width, encoder layers, decoder layers, heads, mel bins, vocabulary, parameters in millions as published
SIZES = {
    "tiny.en": (384, 4, 4, 6, 80, 51864, 37.8),
    "tiny": (384, 4, 4, 6, 80, 51865, 37.8),
    "base.en": (512, 6, 6, 8, 80, 51864, 72.6),
    "base": (512, 6, 6, 8, 80, 51865, 72.6),
    "small.en": (768, 12, 12, 12, 80, 51864, 241.7),
    "small": (768, 12, 12, 12, 80, 51865, 241.7),
    "medium.en": (1024, 24, 24, 16, 80, 51864, 763.9),
    "medium": (1024, 24, 24, 16, 80, 51865, 763.9),
    "large": (1280, 32, 32, 20, 80, 51865, 1543.3),
    "large-v2": (1280, 32, 32, 20, 80, 51865, 1543.3),
    "large-v3": (1280, 32, 32, 20, 128, 51866, 1543.5),
    "large-v3-turbo": (1280, 32, 4, 20, 128, 51866, 808.9),
    "distil-small.en": (768, 12, 4, 12, 80, 51864, 166.1),
    "distil-medium.en": (1024, 24, 2, 16, 80, 51864, 394.4),
    "distil-large-v2": (1280, 32, 2, 20, 80, 51865, 756.2),
    "distil-large-v3": (1280, 32, 2, 20, 128, 51866, 756.4),
}
HEADS = {"tiny.en": 8, "tiny": 6, "base.en": 5, "base": 8, "small.en": 19, "small": 10, "medium.en": 18, "medium": 6,
         "large": 9, "large-v2": 23, "large-v3": 10, "large-v3-turbo": 6, "distil-small.en": 24,
         "distil-medium.en": 16, "distil-large-v2": 20, "distil-large-v3": 20}  # fmt: skip
ORIGINAL = [
    ("encoder.layer_norm", "encoder.ln_post"), ("decoder.layer_norm", "decoder.ln"),
    ("embed_positions.weight", "positional_embedding"), ("embed_tokens", "token_embedding"), (".layers.", ".blocks."),
    ("encoder_attn_layer_norm", "cross_attn_ln"), ("self_attn_layer_norm", "attn_ln"), ("final_layer_norm", "mlp_ln"),
    ("encoder_attn", "cross_attn"), ("self_attn", "attn"), ("fc1", "mlp.0"), ("fc2", "mlp.2"),
    ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out"),
]  # fmt: skip


def published(size):
    """config.json and tensors of a size, as transformers would save them."""
    transformers = pytest.importorskip("transformers")
    dim, encoder, decoder, heads, mels, vocabulary, _ = SIZES[size]
    config = transformers.WhisperConfig(
        vocab_size=vocabulary, num_mel_bins=mels, d_model=dim, encoder_layers=encoder, decoder_layers=decoder,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=4 * dim, decoder_ffn_dim=4 * dim,
    )  # fmt: skip
    with torch.device("meta"):
        state = transformers.WhisperForConditionalGeneration(config).state_dict()
    tensors = {name: TensorInfo(tuple(t.shape), "F16", "model.safetensors") for name, t in state.items()}
    return config.to_dict(), tensors


def original_name(name):
    name = name.removeprefix("model.")
    for hub, original in ORIGINAL:
        name = name.replace(hub, original)
    return name


class Names:
    def __init__(self, tensors):
        self.tensors = tensors


def fit(config, tensors):
    with torch.device("meta"):
        model = WhisperModel(config, resolve_ops(), torch.float16, page_size=16)
    found = find_fit(
        model, BiasedKeys(Names(tensors)).tensors, rename=parameter_name, ignore={}, transforms={}, tied=TIED
    )
    found.check("Whisper")
    return model


@pytest.mark.parametrize("size", SIZES)
def test_every_tensor_of_a_published_size_has_its_place(size, tmp_path):
    config, tensors = published(size)
    card = ModelCard(model_id=f"openai/whisper-{size}", path=tmp_path, config=config, tensors=tensors)
    family, sizes = WhisperFamily(), WhisperConfig.from_card(card)
    assert family.match(card) is not None
    fit(sizes, tensors)
    tensors.pop("proj_out.weight")
    fit(sizes, tensors)
    millions = family.describe(card).num_parameters / 1e6
    assert millions == pytest.approx(SIZES[size][-1], abs=0.06)
    generation = GenerationConfig.from_card(card, sizes)
    assert generation.is_multilingual == (not size.endswith(".en"))
    assert len(generation.alignment_heads) == HEADS[size]


@pytest.mark.parametrize("size", ["tiny.en", "base", "large-v3-turbo"])
def test_the_original_layout_needs_no_config(size, tmp_path):
    config, tensors = published(size)
    tensors.pop("proj_out.weight")
    original = {original_name(name): info for name, info in tensors.items()}
    card = ModelCard(model_id="a/whisper", path=tmp_path, tensors=original)
    assert WhisperFamily().match(card) is not None
    sizes = WhisperConfig.from_card(card)
    assert sizes == WhisperConfig.from_hf(config)
    fit(sizes, original)


def test_both_layouts_hold_the_same_model(tiny_dir, tmp_path, built):
    from safetensors.torch import load_file, save_file

    from kestrel.config import RuntimeConfig
    from kestrel.loading import SafetensorsReader, load_tokenizer, read_card
    from kestrel.spi import BuildContext

    state = {original_name(name): t for name, t in load_file(tiny_dir / "model.safetensors").items()}
    save_file(state, tmp_path / "model.safetensors")
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    card = read_card("a/model", tmp_path)
    ctx = BuildContext(
        device=torch.device("cpu"), dtype=torch.float32, ops=resolve_ops(), weights=SafetensorsReader.of(card),
        tokenizer=lambda: load_tokenizer(card.directory), config=RuntimeConfig(model_path=tmp_path),
    )  # fmt: skip
    other = WhisperFamily().build(card, ctx)
    mine, theirs = built.main.model.state_dict(), other.main.model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"d_model": None}, "lacks d_model"),
        ({"activation_function": "relu"}, "'gelu'"),
        ({"encoder_layers": 0}, "whole number from 1"),
        ({"encoder_attention_heads": 5}, "no multiple"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, says):
    config, _ = published("tiny")
    config = {name: value for name, value in {**config, **changes}.items() if value is not None}
    with pytest.raises(LoadError, match=says):
        WhisperConfig.from_hf(config)


def test_alignment_heads_of_other_models_are_the_upper_half(tmp_path):
    config = WhisperConfig(
        vocab_size=51865, dim=64, encoder_layers=4, decoder_layers=4, encoder_heads=2, decoder_heads=2,
        encoder_ffn=64, decoder_ffn=64,
    )  # fmt: skip
    card = ModelCard(model_id="a/whisper", path=tmp_path)
    heads = GenerationConfig.from_card(card, config).alignment_heads
    assert heads == tuple((layer, head) for layer in (2, 3) for head in (0, 1))
    assert len(heads) == math.prod((2, 2))

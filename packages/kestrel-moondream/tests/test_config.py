import pytest

from kestrel.errors import LoadError
from kestrel_moondream.config import MoondreamConfig


def test_an_empty_config_dictionary_means_the_published_model():
    config = MoondreamConfig.from_mapping({"model_type": "moondream1", "config": {}})
    assert (config.text.dim, config.text.ff_dim, config.text.n_layers, config.text.n_heads) == (
        2048,
        8192,
        24,
        32,
    )
    assert (config.text.head_dim, config.text.rot_dim, config.text.max_context) == (64, 32, 2048)
    assert (config.vision.enc_dim, config.vision.enc_ff_dim, config.vision.enc_n_layers) == (1152, 4304, 27)
    assert (config.vision.grid, config.vision.num_positions) == (27, 729)
    assert (config.region.coord_out_dim, config.region.size_bins, config.region.inner_dim) == (
        1024,
        1024,
        8192,
    )
    assert config.tokenizer.templates.query == ((1, 15381, 2), (3,))


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: {"config": c}])
def test_sections_are_read_at_the_top_or_under_config(wrap):
    config = MoondreamConfig.from_mapping(
        wrap({"text": {"dim": 64, "n_heads": 4}, "vision": {"crop_size": 140}})
    )
    assert config.text.dim == config.region.dim == config.vision.proj_out_dim == 64
    assert config.text.n_kv_heads == 4
    assert config.vision.grid == 10


def test_templates_and_ids_come_from_the_config():
    given = {
        "bos_id": 9, "eos_id": 8, "coord_id": 11,
        "templates": {
            "caption": {"short": [1, 2, 3]}, "query": {"prefix": [4], "suffix": [5, 6]}, "detect": None,
        },
    }  # fmt: skip
    ids = MoondreamConfig.from_mapping({"tokenizer": given}).tokenizer
    assert (ids.bos_id, ids.eos_id, ids.coord_id, ids.size_id) == (9, 8, 11, 6)
    assert ids.templates.caption == {"short": (1, 2, 3)}
    assert ids.templates.query == ((4,), (5, 6))
    assert ids.templates.detect is None
    assert ids.templates.point == ((1, 2581, 2), (3,))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"text": {"dim": 65, "n_heads": 4}}, "multiple of n_heads"),
        ({"text": {"dim": 64, "n_heads": 4}, "region": {"dim": 32}}, "region.dim"),
        ({"vision": {"crop_size": 379}}, "crop_size"),
        ({"text": {"n_layers": "many"}}, "whole number"),
        ({"text": {"n_heads": 0}}, "n_heads"),
        ({"tokenizer": {"coord_id": 60000}}, "vocabulary"),
        ({"tokenizer": {"templates": {"query": {"prefix": ["one"], "suffix": []}}}}, "token ids"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(config, says):
    with pytest.raises(LoadError, match=says):
        MoondreamConfig.from_mapping(config)


def test_an_unknown_setting_is_named_in_the_log(caplog):
    MoondreamConfig.from_mapping({"text": {"rope_scaling": 2, "moe": None, "prefix_attn": 730}})
    assert [r.getMessage() for r in caplog.records if "text.rope_scaling" in r.getMessage()]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["text_model.transformer.embd.wte.weight", "model.text.wte"])
@pytest.mark.parametrize(("width", "heads"), [(2048, 32), (1024, 16)])
def test_a_lone_file_has_the_sizes_of_the_published_model_of_its_width(card_of, name, width, heads):
    config = MoondreamConfig.from_card(card_of({name: (51200, width)}))
    assert (config.text.dim, config.text.n_heads, config.text.n_kv_heads) == (width, heads, heads)
    assert config.vision.enc_dim // config.vision.enc_n_heads == 72


def test_a_lone_file_of_no_published_width_asks_for_its_config(card_of):
    with pytest.raises(LoadError, match=r"config\.json"):
        MoondreamConfig.from_card(card_of({"model.text.wte": (300, 64)}))

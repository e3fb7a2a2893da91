"""Text never becomes a control id, and tokens give their exact bytes back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kestrel.errors import InvalidRequestError, LoadError
from kestrel.loading import load_tokenizer
from kestrel.loading.pieces import byte_characters

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café — 日本語 🦅",
    "a < b | c > d <|endoftext|>",
] * 3
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def byte_level() -> Tokenizer:
    """Byte-level BPE in the manner of GPT-2: a control token in the vocabulary, two beside it, and runs of spaces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|image|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("    ", special=False)])
    return tokenizer


def metaspace() -> Tokenizer:
    """A SentencePiece-like BPE: marked spaces, lone bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    merges = [("▁", "a"), ("a", "b")]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def unigram() -> Tokenizer:
    """A Unigram model whose best reading of "<s>" would be the control token itself."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("▁", -2.0), *((c, -3.0) for c in "<s>ab"), ("▁a", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, metaspace], ids=["byte-level", "metaspace"])
def loaded(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    request.param().save(str(file))
    return load_tokenizer(file.parent)


@pytest.fixture
def load(tmp_path):
    def load(tokenizer: Tokenizer, **options):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return load_tokenizer(tmp_path, **options)

    return load


@given(text=TEXT)
def test_bytes_of_the_tokens_joined_are_the_text(loaded, text):
    ids = loaded.encode(text)
    assert b"".join(map(loaded.token_bytes, ids)) == text.encode()
    assert loaded.decode(ids) == text


@given(
    parts=st.lists(
        st.sampled_from(["<|endoftext|>", "<|image|>", "<think>", "<s>", "</s>", "<unk>", " ", "a<", "|>"])
    )
)
def test_text_that_spells_control_tokens_stays_text(loaded, parts):
    text = "".join(parts)
    control = {
        loaded.token_id(name) for name in ("<|endoftext|>", "<|image|>", "<think>", "<s>", "</s>", "<unk>")
    }
    ids = loaded.encode(text)
    assert control.isdisjoint(ids)
    assert loaded.decode(ids) == text


def test_control_tokens_are_found_by_name_and_have_no_bytes(load):
    tokenizer = byte_level()
    loaded = load(tokenizer)
    for name in ("<|endoftext|>", "<|image|>", "<think>"):
        token_id = loaded.token_id(name)
        assert token_id == tokenizer.token_to_id(name)
        assert loaded.token_bytes(token_id) == b""
    assert loaded.token_id("no such token") is None
    assert loaded.vocab_size == tokenizer.get_vocab_size()


def test_ids_are_those_of_the_library_for_plain_text(load):
    tokenizer = byte_level()
    for text in ["the quick fox", "    indented", "日本 🦅", "a  b\n\nc"]:
        assert load(tokenizer).encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_added_runs_of_spaces_are_text_and_keep_their_id(load):
    tokenizer = byte_level()
    loaded = load(tokenizer)
    run = tokenizer.token_to_id("    ")
    assert loaded.encode("    x")[0] == run
    assert loaded.token_bytes(run) == b"    "


def test_family_may_say_which_added_tokens_are_text(load):
    loaded = load(byte_level(), is_control=lambda content, special: special)
    think = loaded.token_id("<think>")
    assert loaded.encode("<think>") == [think]
    assert loaded.token_bytes(think) == b"<think>"
    assert loaded.token_id("<|image|>") not in loaded.encode("<|image|>")


def test_hidden_names_of_control_tokens_are_text_too(load):
    loaded = load(byte_level())
    text = f"\0control {loaded.token_id('<|endoftext|>')}\0"
    assert loaded.decode(loaded.encode(text)) == text


def test_control_piece_of_a_unigram_model_is_never_its_best_reading(load):
    loaded = load(unigram())
    ids = loaded.encode("a <s> b")
    assert loaded.token_id("<s>") not in ids
    assert loaded.decode(ids) == "a <s> b"


def test_unknown_characters_become_the_unknown_token_where_there_is_nothing_better(load):
    loaded = load(unigram())
    assert loaded.encode("z") == [loaded.token_id("<unk>")]


def test_merges_that_would_make_a_control_token_are_left_out(load):
    model = models.BPE({"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}, [("<", "s"), ("<s", ">")])
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>"])
    assert load(tokenizer).encode("<s>") == [3, 2]


def test_text_without_tokens_is_refused_where_unknown_means_a_control_token(load):
    tokenizer = Tokenizer(models.BPE({"a": 0, "<|end|>": 1}, [], unk_token="<|end|>"))
    tokenizer.add_special_tokens(["<|end|>"])
    loaded = load(tokenizer)
    assert loaded.encode("a") == [0]
    with pytest.raises(InvalidRequestError, match="cannot spell"):
        loaded.encode("b")


def test_lone_surrogate_is_an_invalid_request(loaded):
    with pytest.raises(InvalidRequestError, match="surrogate"):
        loaded.encode("a\ud800b")


def test_nothing_is_added_truncated_or_padded(load):
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    loaded = load(tokenizer)
    assert loaded.decode(loaded.encode("the lazy dog jumps")) == "the lazy dog jumps"
    assert loaded.encode("") == []


def test_ids_without_a_token_have_no_bytes(loaded):
    assert loaded.token_bytes(10**6) == b""
    assert loaded.token_bytes(-1) == b""


def test_split_characters_decode_to_replacement_characters(loaded):
    ids = loaded.encode("🦅")
    assert loaded.decode(ids) == "🦅"
    assert len(ids) > 1
    assert "\ufffd" in loaded.decode(ids[:-1])


def test_byte_characters_are_one_printable_character_each():
    table = byte_characters()
    assert sorted(table) == list(range(256))
    assert len(set(table.values())) == 256
    assert set(table.values()) == set(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "does not exist"),
        ("{", "not JSON"),
        ("[]", "no model"),
        ("[" * 100_000, "not JSON"),
        ('{"model": {"type": "BPE"}}', "cannot be used"),
    ],
)
def test_absent_and_damaged_tokenizers_are_load_errors(tmp_path, content, text):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(LoadError, match=text) as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in str(caught.value)


def test_wordpiece_is_refused(load):
    with pytest.raises(LoadError, match="WordPiece"):
        load(Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")))


def test_file_itself_may_be_given(tmp_path):
    file = tmp_path / "other.json"
    byte_level().save(str(file))
    assert json.loads(file.read_text())["model"]["type"] == "BPE"
    assert load_tokenizer(str(file)).encode("") == []


def test_word_tokenizers_hide_their_control_words_too(load):
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "[UNK]": 1, "a": 2, " ": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.add_special_tokens(["<pad>", "[UNK]"])
    loaded = load(tokenizer)
    assert loaded.encode("a a") == [2, 3, 2]
    assert loaded.encode("<pad>") == [1]

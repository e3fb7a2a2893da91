"""Word times: the pass against transformers' attention, the path against a plain float64 search, words and clean-up."""

import numpy as np
import pytest
import torch
from whisper_oracle import noise

from kestrel.spi import AudioItem, CrossView, Limits
from kestrel.state import CrossTensors
from kestrel_speech.whisper.align import Alignment, median_filter
from kestrel_speech.whisper.dtw import first_columns
from kestrel_speech.whisper.encoder import Encoder
from kestrel_speech.whisper.grouping import Unit, attach_marks, words_of
from kestrel_speech.whisper.segments import Piece
from kestrel_speech.whisper.words import Marks, TimedWord, time_words, with_words

CLIP = noise(4, 2.6)
TEXT = [72, 101, 108, 108, 111, 32, 119, 111]
NUM_FRAMES = 260


@pytest.fixture(scope="module")
def window(built):
    """The cross entries of ``CLIP``."""
    driver = built.main
    prepared = driver.prepare(AudioItem(samples=CLIP, sample_rate=16_000), {})
    state = driver.spec.states[1]
    tensors = CrossTensors.allocate(state, 1, dtype=torch.float32, device=torch.device("cpu"))
    views = {
        state.name: CrossView(
            k_LEKSD=tensors.k_LEKSD, v_LEKSD=tensors.v_LEKSD, entries_B=torch.tensor([1]),
            lens_B=torch.tensor([150], dtype=torch.int32), cu_seqlens=torch.tensor([0, 150], dtype=torch.int32),
            limits=Limits(max_rows=1, max_tokens=150, max_query_len=150, max_context_len=150),
        )
    }  # fmt: skip
    driver.write_cross(driver.encode("audio", [prepared]), [prepared], views)
    return views


@pytest.fixture(scope="module")
def alignment(built, window):
    special = built.prompt._special
    opening = (special.sot, special.languages["en"], special.transcribe)
    given = {"opening": opening, "text": tuple(TEXT), "num_frames": NUM_FRAMES}
    with torch.inference_mode():
        (found,) = built.passes["align"].infer([given], [window])
    return found


@pytest.fixture(scope="module")
def attention(tiny_dir, oracle, built):
    """(matrix, probabilities) of the same text by transformers' own attention, in float64."""
    transformers = pytest.importorskip("transformers")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        tiny_dir, attn_implementation="eager"
    ).eval()
    ids = [oracle.id[name] for name in ("startoftranscript", "en", "transcribe", "notimestamps")]
    ids += [*TEXT, oracle.id["endoftext"]]
    with torch.no_grad():
        made = model(oracle.features(CLIP), decoder_input_ids=torch.tensor([ids]), output_attentions=True)
    rows = slice(3, len(ids) - 1)
    chances = made.logits[0, rows][: len(TEXT), :256].double().softmax(-1)
    heads = oracle.model.generation_config.alignment_heads
    columns = NUM_FRAMES // 2
    weights = np.stack([made.cross_attentions[a][0, b, :, :columns].double().numpy() for a, b in heads])
    weights /= weights.sum(-1, keepdims=True)
    weights = (weights - weights.mean(1, keepdims=True)) / weights.std(1, keepdims=True)
    padded = np.pad(weights, ((0, 0), (0, 0), (3, 3)), mode="reflect")
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(padded, 7, axis=-1), axis=-1)
    return smooth.mean(0)[rows], chances[range(len(TEXT)), TEXT].numpy()


def plain_first_columns(cost):
    """The same path by the plainest search."""
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0.0
    came = {}
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            diagonal, up, left = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
            if diagonal < up and diagonal < left:
                came[i, j], best = (i - 1, j - 1), diagonal
            elif up < diagonal and up < left:
                came[i, j], best = (i - 1, j), up
            else:
                came[i, j], best = (i, j - 1), left
            total[i, j] = cost[i - 1, j - 1] + best
    at, path = (rows, columns), []
    while at != (0, 0):
        path.append(at)
        at = came.get(at, (0, 0))
    return [min(j for i, j in path if i == row + 1) - 1 for row in range(rows)]


def test_the_pass_sees_what_transformers_attention_says(alignment, attention):
    matrix, chances = attention
    assert alignment.matrix_TJ.shape == matrix.shape
    assert np.abs(alignment.matrix_TJ - matrix).max() < 1e-2, "z-scores of small deviations"
    assert np.abs(alignment.probabilities - chances).max() < 1e-4


def test_token_times_are_those_of_a_float64_path(alignment, attention):
    assert first_columns(-alignment.matrix_TJ).tolist() == plain_first_columns(-attention[0])


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (5, 5), (12, 40), (40, 12)])
@pytest.mark.parametrize("ties", [False, True])
def test_the_path_is_that_of_the_plainest_search(shape, ties):
    rng = np.random.default_rng(sum(shape))
    cost = rng.normal(size=shape)
    if ties:
        cost = cost.round()
    assert first_columns(cost).tolist() == plain_first_columns(cost)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 50])
def test_the_median_is_that_of_seven_neighbours(length):
    x = torch.randn(2, 3, length, generator=torch.Generator().manual_seed(length))
    if length <= 3:
        assert torch.equal(median_filter(x), x)
        return
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (3, 3)), mode="reflect")
    wanted = np.median(np.lib.stride_tricks.sliding_window_view(padded, 7, axis=-1), axis=-1)
    assert np.allclose(median_filter(x).numpy(), wanted)


class Spelled:
    """A tokenizer of pieces: id i stands for ``pieces[i]``."""

    def __init__(self, *pieces):
        self.pieces = [p if isinstance(p, bytes) else p.encode() for p in pieces]
        self.ids = range(len(pieces))

    def token_bytes(self, token_id):
        return self.pieces[token_id]


@pytest.mark.parametrize(
    ("pieces", "language", "words"),
    [
        ((" Ever", " tr", "ied", ",", " no"), "en", [(" Ever", 1), (" tried", 2), (",", 1), (" no", 1)]),
        (("He", "llo", ".", "..", " I", "'m"), "en", [("Hello", 2), ("...", 2), (" I'm", 2)]),
        (("你", b"\xe5\xa5", b"\xbd", "吗"), "zh", [("你", 1), ("好", 2), ("吗", 1)]),
        (("你", b"\xe5\xa5", b"\xbd"), "en", [("你好", 3)]),
        ((" a", b"\xff", b"\xe4"), "en", [(" a\ufffd\ufffd", 3)]),
    ],
)
def test_ids_are_joined_to_words(pieces, language, words):
    tokenizer = Spelled(*pieces)
    assert words_of(list(tokenizer.ids), tokenizer, language) == [Unit(*word) for word in words]


def test_marks_join_the_words_that_they_belong_to():
    texts = [" (", "Ever", " tried", ",", '"', " no", ".", ".", " “", "x", "”"]
    attach_marks(texts, "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、")
    assert texts == ["", " (Ever", ' tried,"', "", "", " no..", "", "", "", " “x”", ""]


def test_words_get_the_times_of_their_first_ids():
    tokenizer = Spelled(" a", "b", " c", ".")
    matrix = np.full((5, 20), -1.0)
    for row, column in enumerate([0, 4, 6, 12, 15]):
        matrix[row, column : column + 4] = 3.0
    alignment = Alignment(matrix_TJ=matrix, probabilities=np.array([0.5, 1.0, 0.25, 0.75]))
    words = time_words([0, 1, 2, 3], alignment, tokenizer, "en")
    assert [(w.text, w.count, w.probability) for w in words] == [
        (" ab", 2, 0.75),
        (" c", 1, 0.25),
        (".", 1, 0.75),
    ]
    assert [w.start for w in words] == sorted(w.start for w in words)
    assert [w.end for w in words[:-1]] == [w.start for w in words[1:]]


SPECIAL_TEXT = 256


class Ids:
    """Special ids of which only those of text matter."""

    def text_of(self, ids):
        return [i for i in ids if i < SPECIAL_TEXT]


def spoken(*words):
    """Timed words of one id each, from (text, start, end)."""
    return [TimedWord(text, 1, start, end, 0.9) for text, start, end in words]


def settle(words, *pieces, offset=0.0, last_speech=0.0):
    """Words as (word, start, end) per piece, and the pieces' own times."""
    made = with_words(
        [Piece(ids=(1,) * n, start=start, end=end) for n, start, end in pieces], words, Ids(), Marks('"', ".,!"),
        offset=offset, last_speech=last_speech,
    )  # fmt: skip
    return [[(w.word, round(w.start, 2), round(w.end, 2)) for w in p.words] for p in made], [
        (round(p.start, 2), round(p.end, 2)) for p in made
    ]


def test_words_go_to_the_segments_that_their_ids_are_in():
    words = spoken((" a", 0.1, 0.4), (" b", 0.4, 0.6), (" c", 1.0, 1.3))
    per_piece, times = settle(words, (2, 0.0, 0.8), (1, 0.9, 1.4), offset=30.0, last_speech=30.0)
    assert per_piece == [[(" a", 30.1, 30.4), (" b", 30.4, 30.6)], [(" c", 31.0, 31.3)]]
    assert times == [(30.1, 30.6), (31.0, 31.3)]


def test_a_pause_belongs_to_no_word_at_the_end_of_a_sentence():
    words = spoken((" a", 0.0, 0.2), (" b", 0.2, 0.4), (".", 0.4, 3.0), (" c", 3.0, 3.2), (" d", 3.2, 3.4))
    (found,), _ = settle(words, (5, 0.0, 3.4))
    assert found[1] == (" b.", 0.2, 0.4), "the mark's time was cut before it joined its word"
    words = spoken((" a", 0.0, 0.2), (".", 0.2, 0.2), (" b", 0.2, 3.0), (" c", 3.0, 3.2), (" d", 3.2, 3.4))
    (found,), _ = settle(words, (5, 0.0, 3.4))
    assert found[1] == (" b", 2.6, 3.0)


def test_the_first_word_behind_a_pause_is_not_longer_than_speech():
    words = spoken((" a", 0.0, 5.0), (" b", 5.0, 5.2), (" c", 5.2, 5.4), (" d", 5.4, 5.6))
    (found,), times = settle(words, (4, 0.0, 5.6))
    assert found[0] == (" a", 4.6, 5.0)
    assert times == [(4.6, 5.6)]


def test_a_segment_is_believed_against_an_over_long_word():
    words = spoken((" a", 4.0, 5.0), (" b", 5.0, 5.2), (" c", 5.2, 9.0))
    (found,), times = settle(words, (3, 4.7, 5.6), last_speech=4.0)
    assert times == [(4.7, 5.6)]
    assert found[0][1] == 4.3, "typical length before its end"
    assert found[-1][2] == 5.9


def test_segments_without_text_have_no_words():
    per_piece, times = settle(spoken((" a", 0.0, 0.2)), (0, 1.0, 2.0), (1, 2.0, 3.0))
    assert per_piece[0] == []
    assert times[0] == (1.0, 2.0)


def legible(text):
    """Without broken characters, which random weights write and which may reach over a segment's end."""
    return text.replace("\ufffd", "")


def test_a_transcription_with_words_spells_its_text(transcribe):
    output = transcribe(noise(6, 5.0), language="en", timestamps="word").output
    words = [word for segment in output["segments"] for word in segment["words"]]
    said = "".join(segment["text"] for segment in output["segments"])
    assert words
    assert legible(said).startswith(legible("".join(word["word"] for word in words)))
    assert all(0 <= word["start"] <= word["end"] <= 5.0 and 0 <= word["probability"] <= 1 for word in words)
    plain = transcribe(noise(6, 5.0), language="en").output
    assert plain["segments"][0].keys() == output["segments"][0].keys() - {"words"}


@pytest.mark.parametrize("cached", [True, False])
def test_a_window_is_encoded_once_for_its_language_its_text_and_its_words(transcribe, monkeypatch, cached):
    encoded = []
    plain = Encoder.forward

    def forward(self, features_NMF):
        encoded.extend(window.numpy().tobytes() for window in features_NMF)
        return plain(self, features_NMF)

    monkeypatch.setattr(Encoder, "forward", forward)
    settings = {"temperature": [0.0, 0.6], "logprob_threshold": 0.0}  # every attempt fails
    transcribe(noise(6, 2.9), timestamps="word", settings=settings, config={"enable_prefix_cache": cached})
    assert len(encoded) == len(set(encoded)) > 0

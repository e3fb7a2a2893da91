"""Speech is found where it is, whatever the blocks, and nowhere in silence."""

import numpy as np
import pytest

from kestrel.errors import InvalidRequestError
from kestrel_speech.energy import EnergyModel, is_silence
from kestrel_speech.vad import FrameModel, SpeechDetector, VadOptions, _Spans, speech_spans

RATE = 16000
EXACT = VadOptions(speech_pad_ms=0)


def noise(seconds, level_db, seed=0):
    """White noise with an RMS of ``level_db`` dB of full scale."""
    count = round(seconds * RATE)
    return (np.random.default_rng(seed).standard_normal(count) * 10 ** (level_db / 20)).astype(np.float32)


def speech(seconds, level_db=-20.0, seed=1):
    """Noise that swells and fades four times a second, as syllables do."""
    time = np.arange(round(seconds * RATE)) / RATE
    return noise(seconds, level_db, seed) * (0.35 + 0.65 * np.sin(np.pi * 4 * time) ** 2).astype(np.float32)


def recording(*parts, floor_db=-50.0):
    """Stretches of speech (positive seconds) and pauses (negative) over a noise floor."""
    spoken = [
        speech(p, seed=i) if p > 0 else np.zeros(round(-p * RATE), np.float32) for i, p in enumerate(parts)
    ]
    joined = np.concatenate(spoken)
    return joined + noise(len(joined) / RATE, floor_db, seed=99)


def spans_of(frames, hop=160, num_samples=None, **options):
    """Spans of a list of probabilities, one per ``hop`` samples."""
    spans = _Spans(VadOptions(**options), hop)
    found = spans.feed(np.asarray(frames, np.float32))
    return [*found, *spans.finish(len(frames) * hop if num_samples is None else num_samples)]


def test_speech_between_pauses_is_found():
    found = speech_spans(recording(-3, 4, -5, 2, -3), EXACT)
    np.testing.assert_allclose(found, [(3, 7), (12, 14)], atol=0.1)


def test_spans_are_padded_inside_the_recording():
    found = speech_spans(recording(-0.2, 4, -5, 2, -0.1))
    np.testing.assert_allclose(found, [(0, 4.6), (8.8, 11.3)], atol=0.1)


@pytest.mark.parametrize("at", [None, 0, 15_999, 16_000, 40_000, 48_100])
def test_digital_silence_has_no_loud_frame_anywhere(at):
    samples = np.full(48_123, 0.25, dtype=np.float32)  # an offset is no sound
    if at is not None:
        samples[at : at + 20] += 0.1
    assert is_silence(samples) == (at is None)
    assert is_silence(samples[:0])


def test_pause_shorter_than_the_shortest_silence_joins():
    parts = recording(2, -1.5, 2, -2.5, 2)
    assert len(speech_spans(parts)) == 2
    assert len(speech_spans(parts, VadOptions(min_silence_duration_ms=500))) == 3


@pytest.mark.parametrize("level", [-40.0, -30.0, -12.0])
def test_level_of_the_recording_does_not_matter(level):
    gain = np.float32(10 ** ((level + 20) / 20))
    found = speech_spans(recording(-3, 4, -5, 2, -3) * gain, EXACT)
    np.testing.assert_allclose(found, [(3, 7), (12, 14)], atol=0.1)


def test_floor_follows_a_change_of_noise():
    quiet = recording(-5, 3, -5, floor_db=-60)
    loud = recording(*[-5, 3] * 12, -5, floor_db=-35)
    found = speech_spans(np.concatenate([quiet, loud]), EXACT)
    expected = [(5, 8), *((13 + 8 * i + 5, 13 + 8 * i + 8) for i in range(12))]
    np.testing.assert_allclose(found[-4:], expected[-4:], atol=0.1)


@pytest.mark.parametrize("seconds", [0.05, 1, 45])
def test_silence_is_no_speech(seconds):
    assert speech_spans(np.zeros(round(seconds * RATE), np.float32)) == []
    assert speech_spans(noise(seconds, -80)) == []
    assert speech_spans(np.full(round(seconds * RATE), 0.25, np.float32)) == []  # an offset is no sound


def test_what_cannot_be_told_apart_is_speech():
    assert speech_spans(noise(5, -30)) == [(0.0, 5.0)]


def test_no_samples_have_no_speech():
    assert speech_spans(np.zeros(0, np.float32)) == []
    assert speech_spans([]) == []


@pytest.mark.parametrize("size", [1, 319, 1000, 16000, 70001])
def test_blocks_do_not_change_the_spans(size):
    whole = recording(-1, 2, -3, 1, -0.5) if size == 1 else recording(-3, 4, -5, 2, -3, 6, -9, 1)
    blocks = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert speech_spans(blocks) == speech_spans(whole)


def test_spans_come_out_while_the_recording_goes_on():
    whole = recording(-3, 4, -8, 4, -8)
    detector = SpeechDetector()
    early = detector.push(whole[: 21 * RATE])
    assert len(early) == 1
    assert [*early, *detector.push(whole[21 * RATE :]), *detector.flush()] == [
        (round(a * RATE), round(b * RATE)) for a, b in speech_spans(whole)
    ]


def test_memory_is_bounded():
    model = EnergyModel()
    for _ in range(60):
        model.push(noise(1, -30))
        assert len(model._pending) <= 10 * RATE


def test_hysteresis_keeps_a_span_together():
    assert spans_of([0.9, 0.4, 0.4, 0.9, 0.1, 0.1], min_silence_duration_ms=20, speech_pad_ms=0) == [(0, 640)]
    assert spans_of([0.9, 0.2, 0.2, 0.9], min_silence_duration_ms=20, speech_pad_ms=0) == [
        (0, 160),
        (480, 640),
    ]


def test_short_speech_is_dropped():
    frames = [0, 0.9, 0, 0, 0.9, 0.9, 0.9, 0, 0]
    options = {"min_silence_duration_ms": 20, "speech_pad_ms": 0}
    assert spans_of(frames, **options) == [(160, 320), (640, 1120)]
    assert spans_of(frames, min_speech_duration_ms=20, **options) == [(640, 1120)]


def test_padding_shares_a_short_pause():
    frames = [0.9, 0, 0, 0, 0, 0.9, *[0] * 20]
    assert spans_of(frames, min_silence_duration_ms=20, speech_pad_ms=50) == [(0, 480), (480, 1760)]
    assert spans_of(frames, min_silence_duration_ms=20, speech_pad_ms=10) == [(0, 320), (640, 1120)]


def test_long_speech_is_cut_at_its_last_pause():
    frames = [*[0.9] * 40, *[0.0] * 12, *[0.9] * 60]
    options = {"min_silence_duration_ms": 500, "speech_pad_ms": 0, "max_speech_duration_s": 0.8}
    assert spans_of(frames, **options) == [(0, 40 * 160), (52 * 160, 112 * 160)]


def test_long_speech_without_a_pause_is_cut_where_it_is_too_long():
    options = {"min_silence_duration_ms": 500, "speech_pad_ms": 0, "max_speech_duration_s": 0.5}
    assert spans_of([0.9] * 120, **options) == [(0, 8000), (8000, 16000), (16000, 19200)]


def test_no_span_is_longer_than_asked_and_none_overlap():
    random = np.random.default_rng(3)
    for seed in range(30):
        frames = np.repeat(random.uniform(0, 1, 80), random.integers(1, 12, 80))
        found = spans_of(frames, max_speech_duration_s=1.0, min_silence_duration_ms=300, speech_pad_ms=100)
        edges = [edge for span in found for edge in span]
        assert edges == sorted(edges), seed
        assert all(0 < end - start <= RATE for start, end in found), seed
        assert not found or found[-1][1] <= len(frames) * 160


@pytest.mark.parametrize(
    "given",
    [
        {"threshold": 0}, {"threshold": 1.5}, {"threshold": "high"}, {"neg_threshold": -0.1},
        {"min_silence_duration_ms": -1}, {"speech_pad_ms": float("nan")}, {"max_speech_duration_s": 0.1},
        {"min_speech_duration_ms": True}, {"treshold": 0.5},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(given):
    with pytest.raises(InvalidRequestError, match=next(iter(given))):
        VadOptions.from_mapping(given)


def test_options_of_other_engines_are_understood():
    given = {"threshold": 0.6, "min_silence_duration_ms": 500, "speech_pad_ms": None}
    assert VadOptions.from_mapping(given) == VadOptions(threshold=0.6, min_silence_duration_ms=500)


def test_every_model_judges_every_frame():
    for count in (1, 319, 320, 321, 160_000, 160_001, 200_000):
        model: FrameModel = EnergyModel()
        frames = [*model.push(noise(1, -30)[:0]), *model.push(np.zeros(count, np.float32)), *model.flush()]
        assert len(frames) == -(-count // model.hop)

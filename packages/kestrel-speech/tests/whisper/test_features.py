"""Log-mel features against the published extractor."""

import numpy as np
import pytest
import torch
from whisper_oracle import noise

from kestrel.errors import InvalidMediaError
from kestrel.spi import AudioItem
from kestrel_speech.whisper.config import WhisperConfig
from kestrel_speech.whisper.features import log_mel, log_mels, prepare_audio

SIZES = {
    "vocab_size": 330, "dim": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_heads": 1, "decoder_heads": 1,
    "encoder_ffn": 8, "decoder_ffn": 8,
}  # fmt: skip


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("count", [480_000, 200_003, 800, 1])
def test_features_are_those_of_the_published_extractor(num_mels, count):
    extractor = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=num_mels)
    samples = noise(count, count / 16_000)[:count] + np.float32(0.3) * np.sin(
        np.arange(count) * 0.05, dtype=np.float32
    )
    wanted = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"][0]
    got = log_mel(samples, num_mels, 3000).numpy()
    assert got.shape == wanted.shape
    frames = count // 160
    assert np.abs(got - wanted)[:, :frames].max(initial=0) <= 1e-4
    assert (got[:, frames:] == 0).all(), "behind the sound, where the extractor sees silence"


def test_silence_has_features():
    features = log_mel(np.zeros(16_000, dtype=np.float32), 80, 3000)
    assert (features[:, :100] == (-10 + 4) / 4).all(), "the floor of a power"


def test_a_window_says_how_long_it_is_and_goes_to_cross_attention():
    config = WhisperConfig(**SIZES, audio_context=150)
    prepared = prepare_audio(AudioItem(samples=noise(0, 1.25), sample_rate=16_000), config)
    assert prepared.meta == {"duration_seconds": 1.25}
    assert (prepared.num_positions, prepared.cross_positions) == (0, 150)


@pytest.mark.parametrize(
    ("samples", "rate", "says"),
    [
        (noise(0, 3.1), 16_000, "at most 3 s"),
        (noise(0, 1), 8_000, "Resample"),
        (np.zeros(0, dtype=np.float32), 16_000, "more than 0"),
        (np.zeros((2, 100), dtype=np.float32), 16_000, "mono"),
        (np.zeros(100), 16_000, "float32"),
    ],
)
def test_what_is_no_window_is_refused(samples, rate, says):
    config = WhisperConfig(**SIZES, audio_context=150)
    with pytest.raises(InvalidMediaError, match=says):
        prepare_audio(AudioItem(samples=samples, sample_rate=rate), config)


def test_a_device_makes_the_same_features_of_sound():
    config = WhisperConfig(**SIZES, audio_context=150)
    clips = [noise(seed, seconds) for seed, seconds in ((1, 3.0), (2, 0.4), (3, 1.234))]
    items = [
        prepare_audio(AudioItem(samples=clip, sample_rate=16_000), config, by_device=True) for clip in clips
    ]
    sound, frames = (torch.cat([item.tensors[name] for item in items]) for name in ("sound", "frames"))
    together = log_mels(sound, frames, config.num_mels)
    for clip, features in zip(clips, together, strict=True):
        assert torch.equal(features, log_mel(clip, config.num_mels, config.num_frames))

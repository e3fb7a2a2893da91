"""Mel filters and the features made with them against librosa, an oracle that tests alone need."""

import numpy as np
import pytest

from kestrel_speech.mel import mel_filters
from kestrel_speech.whisper.features import log_mel

pytestmark = [
    pytest.mark.timeout(600),  # librosa compiles when it is imported
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what it imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def librosa():
    return pytest.importorskip("librosa")


@pytest.mark.parametrize(
    ("num_mels", "n_fft", "rate"), [(80, 400, 16_000), (128, 400, 16_000), (128, 512, 16_000)]
)
def test_filters_are_librosas(librosa, num_mels, n_fft, rate):
    wanted = librosa.filters.mel(sr=rate, n_fft=n_fft, n_mels=num_mels)
    np.testing.assert_allclose(mel_filters(num_mels, n_fft, rate), wanted, atol=1e-7)


@pytest.mark.parametrize("num_mels", [80, 128])
def test_features_are_made_of_librosas_spectrogram(librosa, num_mels):
    random = np.random.default_rng(0)
    samples = (random.standard_normal(48_000) * np.repeat(random.uniform(0, 0.3, 30), 1600)).astype(
        np.float32
    )
    power = librosa.feature.melspectrogram(
        y=samples, sr=16_000, n_fft=400, hop_length=160, n_mels=num_mels, pad_mode="reflect", dtype=np.float32
    )[:, :300]
    decades = np.log10(np.maximum(power, 1e-10))
    wanted = (np.maximum(decades, decades.max() - 8) + 4) / 4
    np.testing.assert_allclose(log_mel(samples, num_mels, 300).numpy(), wanted, atol=1e-4)


def test_a_triangle_has_the_area_one_and_reaches_to_its_neighbours():
    filters = mel_filters(80, 4096)
    assert filters.shape == (80, 2049)
    np.testing.assert_allclose(filters.sum(axis=1) * 16_000 / 4096, 1.0, atol=0.08)  # sampled at bins
    assert (filters >= 0).all()
    with pytest.raises(ValueError, match="read-only"):
        filters[0, 0] = 1

"""Resampling agrees with an independent implementation, whatever the blocks, and keeps what can be heard."""

import numpy as np
import pytest

from kestrel.media import resample
from kestrel.media.resample import Resampler

COMMON = [8000, 11025, 22050, 24000, 32000, 44100, 48000, 96000, 192000]
ODD = [7999, 44099, 15999]


def resampled(samples, source_rate, sizes=(10**9,), target_rate=16000):
    stream = Resampler(source_rate, target_rate)
    made, at, turn = [], 0, 0
    while at < len(samples):
        size = sizes[turn % len(sizes)]
        made.append(stream.push(samples[at : at + size]))
        at, turn = at + size, turn + 1
    return np.concatenate([*made, stream.flush()])


def noise(count):
    return np.random.default_rng(0).uniform(-0.5, 0.5, count).astype(np.float32)


@pytest.mark.parametrize("rate", [*COMMON, *ODD])
def test_blocks_do_not_change_a_bit(rate):
    samples = noise(rate // 2)
    whole = resampled(samples, rate)
    np.testing.assert_array_equal(resampled(samples, rate, (1, 7, 1000, 333, 5000)), whole)


@pytest.mark.parametrize("rate", [*COMMON, *ODD])
def test_tone_stays_the_tone(rate):
    time = np.arange(rate) / rate
    heard = resampled(np.sin(2 * np.pi * 1000 * time).astype(np.float32), rate)
    expected = np.sin(2 * np.pi * 1000 * np.arange(len(heard)) / 16000)
    np.testing.assert_allclose(heard[200:-200], expected[200:-200], atol=1e-5)  # 90 dB, and float32


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_polyphase_filter_of_scipy_agrees(rate):
    signal = pytest.importorskip("scipy.signal")
    kernel = resample._Kernel(*_ratio(rate))
    reach = kernel.reach * kernel.up
    taps = kernel.exact(np.arange(-reach, reach + 1) / kernel.up)
    samples = noise(rate // 4)
    expected = signal.resample_poly(
        samples.astype(np.float64), kernel.up, kernel.down, window=taps / kernel.up
    )
    heard = resampled(samples, rate)
    assert len(heard) == len(expected)
    np.testing.assert_allclose(heard, expected, atol=2e-5)  # its gain is not exactly 1 in every phase


@pytest.mark.parametrize("rate", [44100, 48000])
def test_default_filter_of_scipy_hears_the_same_speech_band(rate):
    signal = pytest.importorskip("scipy.signal")
    time = np.arange(rate) / rate
    samples = sum(np.sin(2 * np.pi * f * time + f) for f in (120.0, 440.0, 1313.0, 3001.0, 5200.0)) / 6
    up, down = _ratio(rate)
    expected = signal.resample_poly(samples, up, down, window=("kaiser", 12.0))
    heard = resampled(samples.astype(np.float32), rate)
    np.testing.assert_allclose(heard[500:-500], expected[500:-500], atol=3e-3)


@pytest.mark.timeout(600)  # librosa compiles when it is imported
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of what it imports
@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_librosa_hears_the_same(rate):
    librosa = pytest.importorskip("librosa")
    pytest.importorskip("soxr")
    time = np.arange(2 * rate) / rate
    tones = [f for f in (120.0, 440.0, 1313.0, 3001.0, 5200.0, 7100.0) if f < 0.45 * min(rate, 16000)]
    samples = (sum(np.sin(2 * np.pi * f * time + f) for f in tones) / 6).astype(np.float32)
    expected = librosa.resample(samples, orig_sr=rate, target_sr=16000, res_type="soxr_vhq")
    heard = resampled(samples, rate)
    count = min(len(heard), len(expected))
    np.testing.assert_allclose(heard[1000 : count - 1000], expected[1000 : count - 1000], atol=2e-4)


def test_what_16_khz_cannot_hold_is_removed():
    time = np.arange(48000) / 48000
    for frequency in (8300.0, 10000.0, 15000.0, 23000.0):
        heard = resampled(np.sin(2 * np.pi * frequency * time).astype(np.float32), 48000)
        assert np.abs(heard[200:-200]).max() < 1e-4


def test_constant_stays_constant():
    for rate in (8000, 44100, 44099):
        heard = resampled(np.full(rate, 0.25, np.float32), rate)
        np.testing.assert_allclose(heard[200:-200], 0.25, atol=1e-6)


def test_equal_rates_change_nothing():
    samples = noise(1000)
    np.testing.assert_array_equal(resampled(samples, 16000), samples)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100, 4801])
@pytest.mark.parametrize("rate", [8000, 44100, 48000, 44099])
def test_length_follows_the_ratio(count, rate):
    assert len(resampled(noise(count), rate)) == -(-count * 16000 // rate)


def _ratio(rate):
    common = np.gcd(rate, 16000)
    return int(16000 // common), int(rate // common)

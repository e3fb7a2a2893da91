"""Long recordings are cut at quiet places."""

import numpy as np

from kestrel_speech.cuts import quiet_cut

RATE = 16000


def loud(seconds, seed=0):
    return np.random.default_rng(seed).uniform(0.2, 0.5, round(seconds * RATE)).astype(np.float32)


def test_recording_that_fits_is_not_cut():
    assert quiet_cut(loud(10), 10 * RATE) == 10 * RATE


def test_cut_lies_in_the_quietest_window_at_its_smallest_sample():
    samples = loud(30)
    samples[17 * RATE : 17 * RATE + 1600] = 0.1
    samples[17 * RATE + 700] = -0.001
    assert quiet_cut(samples, 20 * RATE) == 17 * RATE + 700


def test_only_the_last_five_seconds_are_searched():
    samples = loud(30)
    samples[14 * RATE : 14 * RATE + 8000] = 0.0
    cut = quiet_cut(samples, 20 * RATE)
    assert 15 * RATE <= cut < 20 * RATE


def test_half_a_second_remains_behind_the_cut():
    samples = loud(20.1)
    samples[-8000:] = 0.0
    cut = quiet_cut(samples, 20 * RATE)
    assert len(samples) - cut >= RATE // 2


def test_first_of_equals_wins():
    assert quiet_cut(np.zeros(30 * RATE, np.float32), 20 * RATE) == 15 * RATE


def test_pieces_cover_a_long_recording():
    samples = loud(100)
    at, pieces = 0, []
    while at < len(samples):
        pieces.append(quiet_cut(samples[at:], 30 * RATE))
        at += pieces[-1]
    assert sum(pieces) == len(samples)
    assert all(RATE // 2 <= piece <= 30 * RATE for piece in pieces)

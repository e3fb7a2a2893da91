"""Philox against its published known answers and an independent version in Python integers."""

import pytest
import torch

from kestrel.ops.philox import Gumbel, Philox, gumbel_of

CPU = torch.device("cpu")

# Random123's kat_vectors file: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_in_integers(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(right >> 32) ^ c[1] ^ k[0], right % 2**32, (left >> 32) ^ c[3] ^ k[1], left % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, answer):
    words = Philox()(torch.tensor(counter), torch.tensor(key))

    assert tuple(words.tolist()) == answer


def test_philox_on_tensors_equals_philox_in_integers():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 2**32, (6, 200), generator=generator)

    got = Philox()(words[:4], words[4:]).T.tolist()

    want = [philox_in_integers(column[:4], column[4:]) for column in words.T.tolist()]
    assert [tuple(row) for row in got] == want


def test_gumbel_numbers_its_draws_by_seed_index_choice_and_token():
    seed, index, choice = 2**62 + 12345, 7, 3

    noise = Gumbel(10, CPU)(torch.tensor([seed]), torch.tensor([index]), torch.tensor([choice]))[0]

    for token in range(10):
        key = (seed % 2**32, seed >> 32)
        word = philox_in_integers((index, choice, token // 4, 0), key)[token % 4]
        uniform = torch.tensor((word + 0.5) / 2**32, dtype=torch.float64)
        torch.testing.assert_close(noise[token].double(), -(-(-uniform).log1p()).log(), rtol=1e-5, atol=1e-5)


def test_gumbel_has_the_mean_and_variance_of_its_distribution():
    rows = torch.arange(64)

    noise = Gumbel(8192, CPU)(rows, torch.zeros_like(rows), torch.zeros_like(rows))

    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.02)


def test_gumbel_of_a_row_is_the_same_alone_and_in_a_batch():
    rows = torch.arange(5)
    batch = Gumbel(33, CPU)(rows, rows + 1, rows * 2)

    alone = torch.cat([Gumbel(33, CPU)(row, row + 1, row * 2) for row in rows.split(1)])

    assert torch.equal(batch, alone)


def test_gumbel_of_single_tokens_is_the_noise_they_have_in_the_vocabulary():
    seeds, index, choice = (
        torch.tensor([2**63 - 5, 0, 77]),
        torch.tensor([0, 2**33, 9]),
        torch.tensor([1, 0, 63]),
    )
    whole = Gumbel(33, CPU)(seeds, index, choice)
    rows, ids = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([0, 32, 7, 1, 2, 30])

    some = gumbel_of(*(x[rows].numpy() for x in (seeds, index, choice)), ids.numpy())

    torch.testing.assert_close(torch.from_numpy(some), whole[rows, ids], rtol=1e-6, atol=1e-6)

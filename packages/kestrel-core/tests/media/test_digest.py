"""Digests of contents: every byte counts, and where one part ends."""

import os
import sys
import threading

import numpy as np
import pytest

from kestrel.media import begin_digest, content_digest
from kestrel.media.digest import WHOLE_BYTES


def numbers(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("size", [0, 1, 999, WHOLE_BYTES, WHOLE_BYTES + 1, 3 * WHOLE_BYTES + 5])
def test_equal_contents_have_one_digest_and_any_other_byte_another(size):
    content = numbers(size)
    digest = content_digest(b"name", content)
    assert len(digest) == 32
    assert content_digest(b"name", content.copy()) == digest == content_digest(b"name", content.tobytes())
    assert content_digest(b"nam", b"e", content) != digest
    for place in range(0, size, max(1, size // 5)):
        changed = content.copy()
        changed[place] ^= 1
        assert content_digest(b"name", changed) != digest


def test_pieces_are_hashed_in_order():
    size = WHOLE_BYTES // 2
    a, b = numbers(size, 1), numbers(size, 2)
    both = [np.concatenate(parts) for parts in ((a, b, a, b), (b, a, b, a), (a, b, b, a))]
    assert len({content_digest(content) for content in both}) == 3


def test_a_digest_that_was_begun_is_the_one_of_the_contents():
    parts = b"name", numbers(2 * WHOLE_BYTES, 1), numbers(9, 2)
    begun = [begin_digest(*parts) for _ in range(8)]  # more than there are threads
    assert {digest() for digest in begun} == {content_digest(*parts)}


def test_arrays_count_by_their_elements_in_order():
    content = numbers(6 * WHOLE_BYTES // 4).reshape(2, -1)
    assert content_digest(np.asfortranarray(content)) == content_digest(content)
    assert content_digest(content.T) != content_digest(content)


def test_threads_that_hash_at_once_do_not_disturb_each_other():
    contents = [numbers(WHOLE_BYTES + 7, seed) for seed in range(8)]
    want = [content_digest(content) for content in contents]
    found = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: content_digest(contents[i])})) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(8)] == want


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_starts_threads_of_its_own():
    content = numbers(2 * WHOLE_BYTES)
    want = content_digest(content)
    child = os.fork()
    if not child:
        os._exit(content_digest(content) != want)
    assert os.waitpid(child, 0)[1] == 0

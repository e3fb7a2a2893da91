"""Numbers of rows that programs are captured for."""

import pytest

from kestrel.runner import launch_sizes, row_buckets


def test_buckets_are_the_usual_ones_and_end_with_the_largest_batch():
    assert row_buckets(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert row_buckets(256)[-7:] == (64, 96, 128, 160, 192, 224, 256)
    assert row_buckets(1) == (1,)
    assert row_buckets(5) == (1, 2, 4, 5)
    assert row_buckets(100)[-2:] == (96, 100)
    assert row_buckets(300)[-2:] == (288, 300)


@pytest.mark.parametrize("most", [1, 3, 16, 97, 256, 1000])
def test_every_batch_has_a_bucket_that_is_not_much_larger(most):
    sizes = row_buckets(most)
    assert list(sizes) == sorted(set(sizes))
    for count in range(1, most + 1):
        bucket = min(size for size in sizes if size >= count)
        assert bucket < 2 * count or bucket - count <= 3


def test_kernels_are_compiled_for_every_bucket_of_rows_and_tokens():
    assert launch_sizes(12, 300) == {"decode": (1, 2, 4, 8, 12), "prefill": (128, 256, 300)}
    assert launch_sizes(1, 2048)["prefill"] == (128, 256, 512, 768, 1024, 1536, 2048)
    assert launch_sizes(1, 100)["prefill"] == (100,)

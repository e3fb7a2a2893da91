from dataclasses import replace

import torch

from kestrel.ops.cross_attention import CROSS_ATTENTION, cross_attention, write_cross

CPU = torch.device("cpu")


def test_written_entries_are_what_attention_reads():
    case = next(case for case in CROSS_ATTENTION.cases() if case.name == "decode")
    q, view, layer, scale = case.make(1, CPU, torch.float32).args
    lengths = view.lens_B.tolist()
    k, v = torch.randn(sum(lengths), 2, 4, 16).unbind(1)  # parts of one product
    write_cross(k, v, lengths, view, layer)
    out = cross_attention(q, view, layer, scale)
    start = 0
    for b, length in enumerate(lengths):
        keys, values = k[start : start + length], v[start : start + length]
        weights = torch.softmax(torch.einsum("hd,jhd->hj", q[b], keys) * scale, -1)
        assert torch.allclose(out[b], torch.einsum("hj,jhd->hd", weights, values), atol=1e-5)
        start += length


def test_writing_an_entry_leaves_the_others_alone():
    case = next(case for case in CROSS_ATTENTION.cases() if case.name == "decode")
    _, view, layer, _ = case.make(1, CPU, torch.float32).args
    before = view.k_LEKSD.clone()
    k, v = torch.randn(2, 18, 4, 16).unbind(0)
    write_cross(k, v, view.lens_B.tolist(), view, layer)
    mine = torch.zeros(before.shape[1], dtype=torch.bool)
    mine[view.entries_B] = True
    assert torch.equal(view.k_LEKSD[0].nan_to_num(), before[0].nan_to_num())
    assert torch.equal(view.k_LEKSD[1, ~mine].nan_to_num(), before[1, ~mine].nan_to_num())


def test_items_of_one_length_are_written_together_each_to_its_entry(monkeypatch):
    case = next(case for case in CROSS_ATTENTION.cases() if case.name == "decode")
    _, view, layer, _ = case.make(1, CPU, torch.float32).args
    lengths, entries = [2, 2, 3, 2], [3, 1, 4, 2]
    view = replace(view, k_LEKSD=torch.zeros(2, 5, 4, 12, 16), v_LEKSD=torch.zeros(2, 5, 4, 12, 16),
                   entries_B=torch.tensor(entries))  # fmt: skip
    k, v = torch.randn(2, sum(lengths), 4, 16).unbind(0)
    launches = []
    copy = torch.Tensor.index_copy_
    monkeypatch.setattr(torch.Tensor, "index_copy_", lambda *a: launches.append(1) or copy(*a))
    write_cross(k, v, lengths, view, layer)
    assert len(launches) == 2 * 3
    at = 0
    for entry, length in zip(entries, lengths, strict=True):
        for pool, rows in ((view.k_LEKSD, k), (view.v_LEKSD, v)):
            assert torch.equal(pool[layer, entry, :, :length], rows[at : at + length].transpose(0, 1))
            assert not pool[layer, entry, :, length:].any()
        at += length
    assert not view.k_LEKSD[1 - layer].any()

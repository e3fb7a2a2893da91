"""Independent versions of the ops of sampling and of rows, as those of ``naive``: row by row in plain Python."""

import math

import numpy as np
import torch

from kestrel.ops.philox import gumbel_of


def sample_argmax(logits):
    """Row by row in plain Python."""
    best = [largest(row.tolist()) for row in logits.double()]
    return longs([i for i, _ in best]), torch.tensor([x for _, x in best], dtype=torch.float64)


def largest(values):
    """The first NaN, else the first of the largest."""
    faults = [i for i, x in enumerate(values) if math.isnan(x)]
    i = faults[0] if faults else max(range(len(values)), key=values.__getitem__)
    return i, values[i]


def longs(values):
    return torch.tensor(values, dtype=torch.int64)


def entries(row_list, row):
    """What counts of a row's list."""
    return row_list.items_RKD[row, : int(row_list.length_R[row])].tolist()


def ids_in(ranges, vocab):
    mask = torch.zeros(vocab, dtype=torch.bool)
    for start, end in ranges:
        mask[start:end] = True
    return mask


def sample_process(
    logits,
    rows,
    tables,
    *,
    penalties=False,
    biases=False,
    statics=False,
    automata=False,
    hosts=False,
    prefers=False,
):
    out, vocab = [], logits.shape[1]
    for values, row in zip(logits.double().clone(), rows.tolist(), strict=True):
        repetition, presence, frequency = tables.floats_R6[row, 3:].tolist()
        index = int(tables.index_R[row])
        if penalties:
            seen = tables.counts_RV[row]
            count = seen % 2**30
            for i in seen.nonzero().flatten().tolist():
                values[i] = values[i] / repetition if values[i] > 0 else values[i] * repetition
                values[i] -= presence * (count[i] > 0) + frequency * count[i]
        if biases:
            for i, bits, first, last in entries(tables.biases, row):
                if first <= index < last:
                    values[i] += torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        banned = []
        if statics:
            banned += [(s, e) for s, e, first, last in entries(tables.statics, row) if first <= index < last]
        if automata:
            for (number,), state in zip(
                entries(tables.automata, row), tables.states_RA[row].tolist(), strict=False
            ):
                at = int(tables.bank.base_A[number]) + state
                banned += tables.bank.bounds_SK2[at, : int(tables.bank.num_bounds_S[at])].tolist()
        if hosts:
            banned += entries(tables.hosts, row)
        values[ids_in(banned, vocab)] = -math.inf
        for group, unless in tables.prefers if prefers else ():
            free = ids_in(entries(unless, row), vocab)
            inside = ids_in(entries(group, row), vocab) & ~free
            outside = ~inside & ~free
            mass = values[inside].logsumexp(0) if inside.any() else -math.inf
            if mass > (values[outside].max() if outside.any() else -math.inf):
                values[outside] = -math.inf
        out.append(values)
    processed = torch.stack(out) if out else logits.double()
    return (processed, *sample_argmax(processed), sample_argmax(logits)[1])


def sample_draw(logits, best, greedy, rows, tables, *, ranks=False, min_p=False):
    ids = []
    for values, row, first in zip(logits.double(), rows.tolist(), greedy.tolist(), strict=True):
        temperature, top_p, least = tables.floats_R6[row, :3].tolist()
        top_k, seed, choice, _ = tables.ints_R4[row].tolist()
        if temperature == 0:
            ids.append(first)
            continue
        scaled = (values - values.max()) / temperature
        order = scaled.sort(descending=True, stable=True).indices
        if ranks:
            order = order[:top_k] if top_k else order
            mass = scaled[order].softmax(0)
            before = mass.cumsum(0) - mass
            order = order if top_p >= 1 else order[before <= top_p]
        if min_p:
            order = order[scaled[order] >= math.log(least) if least else ...]
        order = order.sort().values
        words = [np.full(len(order), x) for x in (seed, int(tables.index_R[row]), choice)]
        noise = torch.from_numpy(gumbel_of(*words, order.numpy()))
        ids.append(int(order[(scaled[order] + noise).argmax()]))
    return longs(ids)


def sample_logprobs(logits, ids, count):
    values = logits.double().log_softmax(1)
    order = values.argsort(dim=1, descending=True, stable=True)[:, :count]
    return values.gather(1, ids[:, None])[:, 0], order, values.gather(1, order)


def sample_commit(
    ids, first, best, rows, tables, *, advances=False, penalties=False, automata=False, stops=False
):
    stopped, status = [], []
    for i, before, after, row in zip(ids.tolist(), first.tolist(), best.tolist(), rows.tolist(), strict=True):
        status.append(1 if not math.isfinite(before) else 2 if after == -math.inf else 0)
        stopped.append(stops and [i] in entries(tables.stops, row))
        tables.index_R[row] += advances
        if penalties:
            tables.counts_RV[row, i] += 1
        for place, (number,) in enumerate(entries(tables.automata, row) if automata else ()):
            at = int(tables.bank.base_A[number] + tables.states_RA[row, place])
            kind = tables.bank.classes_AV[number, i]
            tables.states_RA[row, place] = tables.bank.next[tables.bank.offset_S[at] + kind]
    return torch.tensor(stopped, dtype=torch.bool), torch.tensor(status, dtype=torch.uint8)


def row_inputs(rows, last_ids, live, block, ids, shown):
    for n, row in enumerate(rows.tolist()):
        ids[n] = last_ids[row]
        shown[:, n] = block[:, n] if live[row] else 0


def row_results(ids, stopped, status, rows, last_ids, live):
    for n, row in enumerate(rows.tolist()):
        last_ids[row] = ids[n]
        if live is not None and (stopped[n] or status[n]):
            live[row] = 0
    words = b"".join(i.to_bytes(8, "little", signed=True) for i in ids.tolist())
    return torch.tensor([*words, *stopped.tolist(), *status.tolist()], dtype=torch.uint8)


NAIVE = {
    f.__name__: f
    for f in (
        row_inputs, row_results, sample_argmax, sample_commit, sample_draw, sample_logprobs, sample_process,
    )
}  # fmt: skip

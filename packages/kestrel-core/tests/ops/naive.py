"""Independent versions of ops, written token by token in float64. Slow, and meant to be obviously right.
Those of sampling and rows: ``naive_sampling``.

They take the same arguments as the op, read NaN as "nothing may look here", and return what the op returns; tensors
that the op updates in place are updated here as well.
"""

import math
from functools import partial

import numpy as np
import torch


def wide(x):
    return None if x is None else x.double()


def layer_norm(x, weight, bias=None, eps=1e-5, offset=None):
    x = wide(x) if offset is None else wide(x) + wide(offset)
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    out = (x - mean) / (variance + eps).sqrt()
    out = out if weight is None else out * wide(weight)
    return out if bias is None else out + wide(bias)


def rms_norm(x, weight, eps=1e-6, *, add_one=False):
    x = wide(x)
    out = x / ((x * x).mean(-1, keepdim=True) + eps).sqrt()
    return out if weight is None else out * (wide(weight) + (1.0 if add_one else 0.0))


def add_norm(x, delta, weight, bias=None, eps=1e-6, *, kind="rms"):
    total = (x + delta).double()  # the residual stream lives in x's dtype
    if kind == "layer":
        return total, layer_norm(total, weight, bias, eps)
    return total, rms_norm(total, weight, eps, add_one=kind == "rms_plus_one")


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + torch.exp(-x))


def linear(x, weight, bias=None, epilogue=None, residual=None):
    y = wide(x) @ wide(weight).T
    y = y if bias is None else y + wide(bias)
    half = y.shape[-1] // 2
    if epilogue is None:
        return y
    if epilogue == "residual":
        return y + wide(residual)
    if epilogue == "accumulate":
        return residual.copy_(y + wide(residual))
    if epilogue.endswith("_mul"):
        act = {"silu_mul": silu, "gelu_tanh_mul": gelu_tanh}[epilogue]
        return act(y[..., :half]) * y[..., half:]
    return {"gelu": gelu, "gelu_tanh": gelu_tanh}[epilogue](y)


def norm_linear(
    x, weight, bias=None, epilogue=None, residual=None, *, kind="rms", gain=None, shift=None, eps=1e-6
):
    if kind == "layer":
        x = layer_norm(x, gain, shift, eps)
    else:
        x = rms_norm(x, gain, eps, add_one=kind == "rms_plus_one")
    return linear(x, weight, bias, epilogue, residual)


def linear_pair(x, weight, bias, other_weight, other_bias, other_epilogue, gain, shift, eps):
    normed = layer_norm(x, gain, shift, eps)
    return linear(normed, weight, bias), linear(normed, other_weight, other_bias, other_epilogue)


def linear_sum(x, weight, bias, other_x, other_weight, other_bias, residual):
    return linear(x, weight, bias) + linear(other_x, other_weight, other_bias) + wide(residual)


def fp8_linear(x, weight, scale, bias=None, epilogue=None, residual=None):
    full = wide(weight).clone()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            full[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= float(scale[i, j])
    return linear(x, full.to(x.dtype), bias, epilogue, residual)


def rope(x_THD, cos_TR, sin_TR):
    out = wide(x_THD).clone()
    half = cos_TR.shape[-1] // 2
    for i in range(half):
        cos, sin = wide(cos_TR)[:, i, None], wide(sin_TR)[:, i + half, None]
        a, b = wide(x_THD)[:, :, i], wide(x_THD)[:, :, i + half]
        out[:, :, i] = a * cos - b * sin
        out[:, :, i + half] = a * sin + b * cos
    return out


def write_kv(k_TKD, v_TKD, view, layer):
    for t, slot in enumerate(view.slots_T.tolist()):
        page, offset = divmod(slot, view.page_size)
        view.k_LPKSD[layer, page, :, offset] = k_TKD[t].to(view.k_LPKSD.dtype)
        view.v_LPKSD[layer, page, :, offset] = v_TKD[t].to(view.v_LPKSD.dtype)


def qk_norm_rope_kv_write(
    q, k, v, view, layer, cos=None, sin=None, qw=None, kw=None, eps=1e-6, *, add_one=False, gives_keys=False
):
    if qw is not None:
        q = rms_norm(q, qw, eps, add_one=add_one)
    if kw is not None:
        k = rms_norm(k, kw, eps, add_one=add_one)
    if cos is not None:
        q, k = rope(q, cos, sin), rope(k, cos, sin)
    write_kv(k, v, view, layer)
    return (q, k) if gives_keys else q


def copy_page(k_LPKSD, v_LPKSD, src, dst, filled):
    for pool in (k_LPKSD, v_LPKSD):
        for layer in range(pool.shape[0]):
            for offset in range(filled):
                pool[layer, dst, :, offset] = pool[layer, src, :, offset]


def _read(view, layer, b, head, origin, pool, own_TKD, j):
    if own_TKD is not None and j >= int(view.computed_B[b]):
        return own_TKD[origin + j, head].double()
    return pool[layer, int(view.page_table_BN[b, j // view.page_size]), head, j % view.page_size].double()


def paged_attention(q_THD, view, layer, scale, softcap=None, gate_THD=None, k_TKD=None, v_TKD=None):
    num_heads, num_kv = q_THD.shape[1], view.k_LPKSD.shape[2]
    out = torch.zeros(q_THD.shape, dtype=torch.float64)
    cu = view.cu_seqlens.tolist()
    for b in range(len(cu) - 1):
        for t in range(cu[b], cu[b + 1]):
            p = int(view.computed_B[b]) + t - cu[b]
            high = max(p + 1, int(view.bidirectional_end_T[t]))
            low = 0 if view.window is None else max(0, p - view.window + 1)
            computed = int(view.computed_B[b])
            for h in range(num_heads):
                kv = h // (num_heads // num_kv)
                read = partial(_read, view, layer, b, kv, cu[b] - computed)
                keys = torch.stack([read(view.k_LPKSD, k_TKD, j) for j in range(low, high)])
                values = torch.stack([read(view.v_LPKSD, v_TKD, j) for j in range(low, high)])
                scores = keys @ q_THD[t, h].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.exp(scores - scores.max())
                out[t, h] = (weights / weights.sum()) @ values
    return out if gate_THD is None else output_gate(out, gate_THD)


def decode_attention(
    q, k, v, view, layer, scale, cos=None, sin=None, qw=None, kw=None, eps=1e-6, softcap=None, gate=None, *,
    add_one=False,
):  # fmt: skip
    q = qk_norm_rope_kv_write(q, k, v, view, layer, cos, sin, qw, kw, eps, add_one=add_one)
    return paged_attention(q, view, layer, scale, softcap, gate)


def vision_attention(q_NSHD, k_NSHD, v_NSHD, scale):
    scores = torch.einsum("nshd,nthd->nhst", wide(q_NSHD), wide(k_NSHD)) * scale
    return torch.einsum("nhst,nthd->nshd", torch.softmax(scores, -1), wide(v_NSHD))


def cross_attention(q_THD, view, layer, scale):
    out = torch.zeros(q_THD.shape, dtype=torch.float64)
    cu = view.cu_seqlens.tolist()
    for b in range(len(cu) - 1):
        entry, length = int(view.entries_B[b]), int(view.lens_B[b])
        for t in range(cu[b], cu[b + 1]):
            for h in range(q_THD.shape[1]):
                kv = h // (q_THD.shape[1] // view.k_LEKSD.shape[2])
                scores = view.k_LEKSD[layer, entry, kv, :length].double() @ q_THD[t, h].double() * scale
                weights = torch.exp(scores - scores.max())
                out[t, h] = (weights / weights.sum()) @ view.v_LEKSD[layer, entry, kv, :length].double()
    return out


def write_cross(k_NKD, v_NKD, lengths, view, layer):
    start = 0
    for b, length in enumerate(lengths):
        entry = int(view.entries_B[b])
        for pool, new in ((view.k_LEKSD, k_NKD), (view.v_LEKSD, v_NKD)):
            for j in range(length):
                pool[layer, entry, :, j] = new[start + j].to(pool.dtype)
        start += length


def stores_after(view, row, count, pool, state):
    """Copy ``state`` to every slot that asks for row ``row`` after ``count`` tokens."""
    for b, n, slot in view.stores.tolist():
        if (b, n) == (row, count):
            pool[slot] = state.to(pool.dtype)


def gated_delta(q_TKD, k_TKD, v_THE, gate_TH, beta_TH, view, layer, part="state"):
    pool = view.parts[part][layer]
    heads, per_key = v_THE.shape[1], v_THE.shape[1] // q_TKD.shape[1]
    out = torch.zeros(v_THE.shape, dtype=torch.float64)
    cu = view.cu_seqlens.tolist()
    for b in range(len(cu) - 1):
        slot = int(view.slots_B[b])
        state = pool[slot].double()
        for t in range(cu[b], cu[b + 1]):
            for h in range(heads):
                q, k = (x[t, h // per_key].double() for x in (q_TKD, k_TKD))
                q = q / math.sqrt(float(q @ q) + 1e-6) / math.sqrt(q.shape[0])
                k = k / math.sqrt(float(k @ k) + 1e-6)
                old = math.exp(float(gate_TH[t, h])) * state[h]
                delta = float(beta_TH[t, h]) * (v_THE[t, h].double() - old.T @ k)
                state[h] = old + torch.outer(k, delta)
                out[t, h] = state[h].T @ q
            stores_after(view, b, t + 1 - cu[b], pool, state)
        pool[slot] = state.to(pool.dtype)
    return out


def causal_conv(x_TC, weight_CW, bias_C, view, layer, part="conv", activation="silu"):
    pool = view.parts[part][layer]
    out = torch.zeros(x_TC.shape, dtype=torch.float64)
    cu = view.cu_seqlens.tolist()
    for b in range(len(cu) - 1):
        slot = int(view.slots_B[b])
        past = [column.double() for column in pool[slot].unbind(-1)]
        for t in range(cu[b], cu[b + 1]):
            past.append(x_TC[t].double())
            y = sum(column * weight_CW[:, j].double() for j, column in enumerate(past))
            y = y if bias_C is None else y + bias_C.double()
            out[t] = silu(y) if activation == "silu" else y
            past = past[1:]
            stores_after(view, b, t + 1 - cu[b], pool, torch.stack(past, -1))
        pool[slot] = torch.stack(past, -1).to(pool.dtype)
    return out


def gated_delta_step(qkv_TC, z_THE, a_TH, b_TH, weights, key_heads, view, layer):
    heads, dim = z_THE.shape[1:]
    keys = (qkv_TC.shape[1] - heads * dim) // 2
    mixed = causal_conv(qkv_TC, weights.conv_CW, None, view, layer)
    q, k = (x.reshape(-1, key_heads, keys // key_heads) for x in (mixed[:, :keys], mixed[:, keys : 2 * keys]))
    step = torch.log1p(torch.exp(wide(a_TH) + wide(weights.dt_bias_H)))
    gate, beta = -torch.exp(wide(weights.a_log_H)) * step, 1 / (1 + torch.exp(-wide(b_TH)))
    out = gated_delta(q, k, mixed[:, 2 * keys :].reshape(-1, heads, dim), gate, beta, view, layer)
    return rms_norm(out, weights.norm_E, weights.eps) * silu(wide(z_THE))


def gated_norm(o, z, weight, eps=1e-6):
    return rms_norm(o, weight, eps) * silu(wide(z))


def delta_gates(a, b, a_log, dt_bias):
    step = torch.log1p(torch.exp(wide(a) + wide(dt_bias)))
    return -torch.exp(wide(a_log)) * step, 1 / (1 + torch.exp(-wide(b)))


def output_gate(x, gate, residual=None):
    y = wide(x) / (1 + torch.exp(-wide(gate)))
    return y if residual is None else y + wide(residual)


def moe_route(logits, top_k):
    weights, experts = torch.zeros(len(logits), top_k).double(), torch.zeros(len(logits), top_k).long()
    for t, row in enumerate(wide(logits)):
        p = torch.exp(row - row.max()) / torch.exp(row - row.max()).sum()
        chosen = sorted(range(len(row)), key=lambda e: (-float(row[e]), e))[:top_k]
        experts[t] = torch.tensor(chosen)
        weights[t] = p[chosen] / p[chosen].sum()
    return weights, experts


def grouped_experts(x, weights, experts, gate_up, down, activation="silu_mul"):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for weight, e in zip(weights[t], experts[t], strict=True):
            hidden = linear(x[t], gate_up[e], epilogue=activation)
            out[t] += wide(weight) * (wide(down[e]) @ hidden)
    return out


def rope_angles(positions, freq, rows=None):
    count, tokens = len(freq), positions.shape[1]
    out = np.zeros((2, tokens, count))
    for t in range(tokens):
        for i in range(count):
            position = float(positions[0 if rows is None else int(rows[i]), t])
            angle = float(np.float32(position) * np.float32(freq[i]))  # the angle is a float32
            out[:, t, i] = math.cos(angle), math.sin(angle)
    return tuple(torch.from_numpy(out))


def resize_crops(pixels, crops, starts, weights, size):
    """Two passes over one picture at a time, in Python's integers."""
    out = np.zeros((len(crops), *size, 3), np.uint8)
    taps, half = len(weights), 1 << 21

    def byte(total):
        return min(max(total >> 22, 0), 255)

    for m, (offset, height, width, row, column, _, _) in enumerate(crops.tolist()):
        picture = pixels[offset : offset + height * width * 3].view(height, width, 3).tolist()
        table = [(int(starts[s]), [int(w) for w in weights[:, s]]) for s in range(len(starts))]
        for c in range(3):
            lines = []
            for line in picture:
                pixel = [p[c] for p in line] + [0] * taps
                made = [table[column + j] for j in range(size[1])]
                lines.append([byte(half + sum(pixel[a + k] * w[k] for k in range(taps))) for a, w in made])
            lines += [[0] * size[1]] * taps
            for i in range(size[0]):
                a, w = table[row + i]
                for j in range(size[1]):
                    out[m, i, j, c] = byte(half + sum(lines[a + k][j] * w[k] for k in range(taps)))
    return torch.from_numpy(out)


def fp8_grouped_experts(x, weights, experts, gate_up, gate_up_scale, down, down_scale, activation="silu_mul"):
    full = []
    for weight, scale in ((gate_up, gate_up_scale), (down, down_scale)):
        rows = wide(weight).clone()
        for e, i, j in np.ndindex(*scale.shape):
            rows[e, 128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= float(scale[e, i, j])
        full.append(rows.to(x.dtype))
    return grouped_experts(x, weights, experts, *full, activation)


def eight_bits(x):
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn)


def e4m3_norm(x, eps=1e-5, delta=None, offset=None, *, kind="layer"):
    total = x if delta is None else x + delta
    inner = wide(total) if offset is None else wide(total) + wide(offset)
    normed = layer_norm(inner, None, None, eps) if kind == "layer" else rms_norm(inner, None, eps)
    return total, eight_bits(normed / math.sqrt(x.shape[-1]) * 448)


def e4m3_cast(x, factor, activation=None):
    return eight_bits(factor * {None: lambda x: x, "gelu": gelu, "gelu_tanh": gelu_tanh}[activation](wide(x)))


def e4m3_linear(values, weight, scale, bias=None, residual=None, *, dtype):
    out = linear(values, wide(weight) * float(scale), bias)
    return (out if residual is None else out + wide(residual)).to(dtype)


def log_mel(sound, frames, filters, hop=160):
    half, size = filters.shape[1] - 1, 2 * (filters.shape[1] - 1)
    n, k = np.arange(size), np.arange(half + 1)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * n / size)
    waves = np.exp(-2j * np.pi * np.outer(k, n) / size) * window
    out = torch.zeros(len(sound), len(filters), sound.shape[1] // hop, dtype=torch.float64)
    for i, samples in enumerate(sound.double().cpu().numpy()):
        padded = np.pad(samples, half, mode="reflect")
        power = [np.abs(waves @ padded[f * hop : f * hop + size]) ** 2 for f in range(out.shape[2])]
        bands = filters.double().cpu() @ torch.tensor(np.stack(power, 1))
        decades = bands.clamp(min=1e-10).log10()
        out[i] = (torch.maximum(decades, decades.max() - 8) + 4) / 4
        out[i, :, int(frames[i]) :] = 0
    return out.to(sound.device)


NAIVE = {
    f.__name__: f
    for f in (
        add_norm, causal_conv, copy_page, cross_attention, decode_attention, delta_gates,
        e4m3_cast, e4m3_linear, e4m3_norm, fp8_grouped_experts, fp8_linear, gated_delta,
        gated_delta_step, gated_norm, grouped_experts,
        layer_norm, linear, linear_pair, linear_sum, log_mel, moe_route, norm_linear, output_gate, paged_attention,
        qk_norm_rope_kv_write, resize_crops, rms_norm, rope, rope_angles, vision_attention, write_cross, write_kv,
    )
}  # fmt: skip

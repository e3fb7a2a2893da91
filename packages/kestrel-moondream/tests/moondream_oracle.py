"""Moondream 2 once more: numpy, float64, one sequence, every step recomputed. Shares no code with the package.

Weights are a mapping of names in the Hugging Face layout (without ``model.``) to float64 arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image


def layer_norm(x, weight, bias):
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5) * weight + bias


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def tile_counts(width, height, patch=14, margin=4, crop=378, limit=12):
    both = 2 * margin * patch
    window = crop - both
    h, w = max(1, height - both), max(1, width - both)
    if h <= window or w <= window:
        return (1, 1)
    mh, mw = -(-h // window), -(-w // window)
    if mh * mw > limit:
        r = (limit / (mh * mw)) ** 0.5
        return (max(1, int(mh * r)), max(1, int(mw * r)))
    th, tw = max(mh, int((limit * h / w) ** 0.5)), max(mw, int((limit * w / h) ** 0.5))
    if th * tw > limit:
        if tw > th:
            tw = limit // th
        else:
            th = limit // tw
    return (max(1, th), max(1, tw))


def width_first(image, width, height):
    """Lanczos in the order of passes that every Pillow before 13 took."""
    return image.resize((width, image.height), Image.LANCZOS).resize((width, height), Image.LANCZOS)


@dataclass
class Oracle:
    """``sizes`` is the ``config`` dictionary of config.json with every key spelled out."""

    weights: dict
    sizes: dict

    def w(self, name):
        return self.weights[name]

    def linear(self, name, x):
        return x @ self.w(f"{name}.weight").T + self.w(f"{name}.bias")

    def norm(self, name, x):
        return layer_norm(x, self.w(f"{name}.weight"), self.w(f"{name}.bias"))

    def mlp(self, name, x):
        return self.linear(f"{name}.fc2", gelu_tanh(self.linear(f"{name}.fc1", x)))

    # ---- vision ------------------------------------------------------------------------------------------------

    def crops(self, pixels):
        v = self.sizes["vision"]
        size, patch, margin = v["crop_size"], v["enc_patch_size"], v["overlap_margin"]
        window = size - 2 * margin * patch
        height, width = pixels.shape[:2]
        rows, cols = tile_counts(width, height, patch, margin, size, v["max_crops"])
        image = Image.fromarray(pixels)
        big = width_first(image, cols * window + 2 * margin * patch, rows * window + 2 * margin * patch)
        out = [np.asarray(width_first(image, size, size))]
        for i in range(rows):
            for j in range(cols):
                box = (j * window, i * window, j * window + size, i * window + size)
                out.append(np.asarray(big.crop(box)))
        return out, rows, cols

    def vision(self, crop):
        """One uint8 crop [S, S, 3] to [patches, width]."""
        v = self.sizes["vision"]
        patch, heads = v["enc_patch_size"], v["enc_n_heads"]
        grid = v["crop_size"] // patch
        x = (crop.astype(np.float64) / 255 - 0.5) / 0.5
        flat = np.zeros((grid * grid, 3 * patch * patch))
        for r in range(grid):
            for c in range(grid):
                piece = x[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch]
                flat[r * grid + c] = np.stack([piece[..., channel].ravel() for channel in range(3)]).ravel()
        x = self.linear("vision.patch_emb", flat) + self.w("vision.pos_emb")[0]
        for n in range(v["enc_n_layers"]):
            x = self.vision_block(n, x, heads)
        return self.norm("vision.post_ln", x)

    def vision_block(self, n, x, heads):
        name = f"vision.blocks.{n}"
        q, k, value = np.split(self.linear(f"{name}.attn.qkv", self.norm(f"{name}.ln1", x)), 3, axis=-1)
        d = q.shape[-1] // heads
        outs = []
        for h in range(heads):
            part = slice(h * d, (h + 1) * d)
            outs.append(softmax(q[:, part] @ k[:, part].T / math.sqrt(d)) @ value[:, part])
        x = x + self.linear(f"{name}.attn.proj", np.concatenate(outs, -1))
        return x + self.mlp(f"{name}.mlp", self.norm(f"{name}.ln2", x))

    def stitch(self, local, rows, cols):
        """[rows * cols][grid, grid, C] to one grid, inner margins dropped."""
        m = self.sizes["vision"]["overlap_margin"]
        bands = []
        for i in range(rows):
            band = []
            for j in range(cols):
                tile = local[i * cols + j]
                tile = tile[0 if i == 0 else m : tile.shape[0] if i == rows - 1 else -m]
                tile = tile[:, 0 if j == 0 else m : tile.shape[1] if j == cols - 1 else -m]
                band.append(tile)
            bands.append(np.concatenate(band, 1))
        return np.concatenate(bands, 0)

    def pool(self, whole, out):
        h, w = whole.shape[:2]
        pooled = np.zeros((out, out, whole.shape[2]))
        for i in range(out):
            for j in range(out):
                ys = slice(i * h // out, -(-(i + 1) * h // out))
                xs = slice(j * w // out, -(-(j + 1) * w // out))
                pooled[i, j] = whole[ys, xs].mean((0, 1))
        return pooled

    def image(self, pixels):
        """Embeddings [positions, C] of an upright RGB image."""
        crops, rows, cols = self.crops(pixels)
        grid = self.sizes["vision"]["crop_size"] // self.sizes["vision"]["enc_patch_size"]
        maps = [self.vision(c) for c in crops]
        local = [m.reshape(grid, grid, -1) for m in maps[1:]]
        pooled = self.pool(self.stitch(local, rows, cols), grid).reshape(grid * grid, -1)
        return self.mlp("vision.proj_mlp", np.concatenate([maps[0], pooled], -1))

    # ---- text --------------------------------------------------------------------------------------------------

    def rope(self, x, positions):
        """x [T, D] of one head; the first half of D is turned."""
        rot = x.shape[-1] // 2
        half = rot // 2
        freq = np.array(
            [self.sizes["text"].get("rope_theta", 10000.0) ** (-2 * i / rot) for i in range(half)]
        )
        angle = positions[:, None] * freq[None]
        a, b = x[:, :half], x[:, half:rot]
        turned = [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle), x[:, rot:]]
        return np.concatenate(turned, -1)

    def attention(self, n, x, sees):
        t = self.sizes["text"]
        heads, kv = t["n_heads"], t["n_kv_heads"]
        d = t["dim"] // heads
        fused = self.linear(f"text.blocks.{n}.attn.qkv", x)
        positions = np.arange(len(x))
        outs = []
        for h in range(heads):
            g = h // (heads // kv)
            q = self.rope(fused[:, h * d : (h + 1) * d], positions)
            k = self.rope(fused[:, (heads + g) * d : (heads + g + 1) * d], positions)
            v = fused[:, (heads + kv + g) * d : (heads + kv + g + 1) * d]
            scores = np.where(sees, q @ k.T / math.sqrt(d), -np.inf)
            outs.append(softmax(scores) @ v)
        return self.linear(f"text.blocks.{n}.attn.proj", np.concatenate(outs, -1))

    def decoder(self, x, ranges=()):
        """Hidden states [T, C] before the final norm; each (start, end) of ``ranges`` sees itself fully."""
        sees = np.tril(np.ones((len(x), len(x)), dtype=bool))
        for start, end in ranges:
            sees[start:end, start:end] = True
        for n in range(self.sizes["text"]["n_layers"]):
            h = self.norm(f"text.blocks.{n}.ln", x)
            x = x + self.attention(n, h, sees) + self.mlp(f"text.blocks.{n}.mlp", h)
        return x

    def logits(self, hidden):
        return self.linear("text.lm_head", self.norm("text.post_ln", hidden))

    def token(self, i):
        return self.w("text.wte")[i][None]

    def prompt(self, ids, images=(), bos=0):
        """Embeddings of BOS, images and ``ids`` (an int, or an embedding [n, C]), and the bidirectional ranges."""
        parts, ranges, at = [self.token(bos)], [], 1
        for features in images:
            ranges.append((0 if at == 1 else at, at + len(features)))
            parts.append(features)
            at += len(features)
        parts += [i if isinstance(i, np.ndarray) else self.token(i) for i in ids]
        return np.concatenate(parts), ranges

    # ---- region ------------------------------------------------------------------------------------------------

    def fourier(self, values, w):
        phi = 2 * math.pi * np.asarray(values, dtype=np.float64).reshape(1, -1) @ w
        return np.concatenate([np.cos(phi), np.sin(phi)], -1)

    def encode_coord(self, value):
        return self.linear("region.coord_encoder", self.fourier([value], self.w("region.coord_features")))

    def encode_size(self, width, height):
        return self.linear(
            "region.size_encoder", self.fourier([width, height], self.w("region.size_features"))
        )

    def decode_coord(self, hidden):
        logits = self.mlp("region.coord_decoder", hidden)
        return int(logits.argmax()) / self.sizes["region"]["coord_out_dim"]

    def decode_size(self, hidden):
        logits = self.mlp("region.size_decoder", hidden).reshape(2, -1)
        bins = logits.shape[1]
        return tuple(2 ** (int(row.argmax()) / (bins - 1) * 10 - 10) for row in logits)

    # ---- loops -------------------------------------------------------------------------------------------------

    def greedy(self, x, ranges, count, *, suppress=(3,), eos=0):
        """Ids of a greedy answer; ``suppress`` from the second token on. A final EOS is included."""
        out = []
        while len(out) < count:
            logits = self.logits(self.decoder(x, ranges)[-1])
            if out:
                logits[list(suppress)] = -np.inf
            out.append(int(logits.argmax()))
            if out[-1] == eos:
                break
            x = np.concatenate([x, self.token(out[-1])])
        return out

    def objects(self, x, ranges, kind, max_objects, *, coord=5, eos=0):
        """Points or boxes, and whether EOS ended the loop."""
        out = []

        def step(embedding):
            nonlocal x
            x = np.concatenate([x, embedding])
            return self.decoder(x, ranges)[-1]

        h = self.decoder(x, ranges)[-1]
        while len(out) < max_objects:
            logits = self.logits(h)
            if logits[eos] > logits[coord]:
                return out, True
            cx = self.decode_coord(h)
            h = step(self.encode_coord(cx))
            cy = self.decode_coord(h)
            h = step(self.encode_coord(cy))
            if kind == "point":
                out.append((cx, cy))
                continue
            w, hh = self.decode_size(h)
            h = step(self.encode_size(w, hh))
            out.append(tuple(min(1, max(0, s)) for s in (cx - w / 2, cy - hh / 2, cx + w / 2, cy + hh / 2)))
        return out, False

    def reasoning(self, x, ranges, count, *, answer=3, coord=5, size=6, eos=0):
        """Ids of reasoning and answer together (one budget), with the value behind every coordinate id."""
        ids, values = [], []
        phase, phase_len = "reason", 0
        while len(ids) < count:
            h = self.decoder(x, ranges)[-1]
            logits = self.logits(h)
            if phase == "open":
                chosen = answer
            else:
                if phase_len:
                    logits[[eos, size] if phase == "reason" else [answer]] = -np.inf
                chosen = int(logits.argmax())
            ids.append(chosen)
            phase_len += 1
            embedding = self.token(chosen)
            if chosen == coord:
                values.append(self.decode_coord(h))
                embedding = self.encode_coord(values[-1])
            if chosen == eos:
                break
            if phase == "open":
                phase, phase_len = "answer", 0
            elif phase == "reason" and chosen == answer:
                phase = "open"
            x = np.concatenate([x, embedding])
        return ids, values

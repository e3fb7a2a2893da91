"""Trains the nano model; every picture and task is drawn on the device. Resumable: run the same command again.

python -m training.train --out runs/nano --steps 14000
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from . import phrases as p
from . import tokenizer as nano_tokenizer
from .batches import Tasks, pack
from .checkpoint import load_shards, optimizer_tensors, restore_moments, save_shards
from .crops import batch_crops
from .losses import loss_terms, quantised, right_queries
from .model import NanoConfig, NanoModel
from .pieces import Vocabulary
from .render import Renderer
from .scenes import COMPACT, ELONGATED, Sampler

ELONGATED_SHARE = 0.15
AHEAD = 32  # steps whose scenes and tasks are sampled together, so that small launches are shared
WARMUP = 300
REWARM = 100  # after a resume without moments


@dataclass(slots=True)
class Progress:
    """What has been seen so far, and sums since the last report (kept on the device to avoid waiting)."""

    step: int = 0
    seconds: float = 0.0
    losses: list[Tensor] = field(default_factory=list)
    right: Tensor | None = None
    asked: Tensor | None = None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and log")
    parser.add_argument("--moments", type=Path, help="folder for optimizer moments (default: --out)")
    parser.add_argument("--steps", type=int, default=14000)
    parser.add_argument("--batch", type=int, default=256, help="pictures per step; each carries 14 tasks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop and save after this long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--report", type=int, default=200)
    return parser.parse_args()


class Source:
    """Endless batches: crops, tiling and tasks."""

    def __init__(
        self, device: torch.device, seed: int, batch: int, config: NanoConfig, *, compiled: bool, ahead: int
    ) -> None:
        self.batch, self.config, self.ahead = batch, config, ahead
        self.sampler = Sampler(device, seed)
        self.renderer = Renderer(self.sampler, compiled=compiled)
        self.vocabulary = Vocabulary(nano_tokenizer.load(), device)
        self.shapes = random.Random(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, tuple[int, int], Tasks]]:
        while True:
            sizes = [
                self.shapes.choice(ELONGATED if self.shapes.random() < ELONGATED_SHARE else COMPACT)
                for _ in range(self.ahead)
            ]
            scenes = self.sampler.scenes(torch.tensor(sizes).repeat_interleave(self.batch, 0))
            tasks = pack(scenes, self.vocabulary, self.sampler)
            for i, (height, width) in enumerate(sizes):
                rows = slice(i * self.batch, (i + 1) * self.batch)
                images = self.renderer.draw(scenes[rows], height, width)
                yield *batch_crops(images, self.config), tasks[rows]


class Trainer:
    def __init__(
        self, args: argparse.Namespace, config: NanoConfig | None = None, ahead: int = AHEAD
    ) -> None:
        self.args, self.device, self.progress = args, torch.device(args.device), Progress()
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.model = NanoModel(config or NanoConfig()).to(self.device)
        self.named = {n: q for n, q in self.model.named_parameters() if q.requires_grad}
        matrices = [q for n, q in self.named.items() if q.dim() == 2 and n != "text.wte"]
        others = [q for n, q in self.named.items() if q.dim() != 2 or n == "text.wte"]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": args.decay}, {"params": others, "weight_decay": 0.0}],
            lr=args.lr, betas=(0.9, 0.98), fused=self.device.type == "cuda",
        )  # fmt: skip
        self.average = {n: q.detach().clone() for n, q in self.model.named_parameters()}
        self.warm_from = 0
        self.resume()
        self.source = Source(self.device, args.seed + 1000 * (1 + self.progress.step), args.batch, self.model.config,
                             compiled=not args.no_compile, ahead=ahead)  # fmt: skip
        self.loss_terms = loss_terms
        if not args.no_compile:
            for block in (*self.model.vision.blocks, *self.model.text.blocks):
                block.compile()
            self.loss_terms = torch.compile(loss_terms)

    def resume(self) -> None:
        log = self.args.out / "progress.json"
        weights = load_shards(self.args.out, "weights")
        if not weights or not log.exists():
            return
        saved = json.loads(log.read_text())
        self.progress.step, self.progress.seconds = saved["step"], saved["seconds"]
        self.model.load_state_dict(weights, strict=True)
        average = load_shards(self.args.out, "average")
        self.average = {n: average[n].to(self.device).float() for n in self.average}
        moments = load_shards(self.args.moments or self.args.out, "moments")
        restore_moments(self.optimizer, self.named, moments, self.progress.step)
        self.warm_from = 0 if moments else self.progress.step
        print(
            f"resumed at step {self.progress.step}, moments {'restored' if moments else 'lost'}", flush=True
        )

    def save(self) -> None:
        save_shards(dict(self.model.state_dict()), self.args.out, "weights")
        save_shards({n: q.half() for n, q in self.average.items()}, self.args.out, "average")
        save_shards(
            optimizer_tensors(self.optimizer, self.named), self.args.moments or self.args.out, "moments"
        )
        (self.args.out / "progress.json").write_text(
            json.dumps({"step": self.progress.step, "seconds": round(self.progress.seconds, 1)})
        )

    def rate(self) -> float:
        step, total = self.progress.step, self.args.steps
        warm = min(1.0, (step + 1) / WARMUP)
        if self.warm_from:
            warm = min(warm, (step - self.warm_from + 1) / REWARM)
        return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / total))))

    def step(self, crops: Tensor, tiles: tuple[int, int], tasks: Tasks) -> None:
        scale = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * scale
        values = quantised(tasks, self.model)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = self.model(crops, tiles, tasks.tokens, values)
            token, coord, size, right = self.loss_terms(self.model, hidden, tasks)
        (token + 0.25 * coord + 0.15 * size).backward()
        torch.nn.utils.clip_grad_norm_(list(self.named.values()), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        decay = min(self.args.ema, (1 + self.progress.step) / (10 + self.progress.step))
        names = list(self.named)
        torch._foreach_lerp_(
            [self.average[n] for n in names], [self.named[n].detach() for n in names], 1 - decay
        )
        self.progress.step += 1
        self._tally(torch.stack([token, coord, size]).detach(), right, tasks)

    def _tally(self, losses: Tensor, right: Tensor, tasks: Tasks) -> None:
        ok, asked = right_queries(right, tasks)
        kinds, pr = len(p.QUESTION_NAMES), self.progress
        hits = torch.zeros(kinds, device=self.device).index_add_(
            0, tasks.kind.flatten(), (ok & asked).flatten().float()
        )
        seen = torch.zeros(kinds, device=self.device).index_add_(
            0, tasks.kind.flatten(), asked.flatten().float()
        )
        pr.right, pr.asked = (
            hits + (0 if pr.right is None else pr.right),
            seen + (0 if pr.asked is None else pr.asked),
        )
        pr.losses.append(losses)

    def report(self) -> None:
        pr = self.progress
        assert pr.right is not None
        assert pr.asked is not None
        share = (pr.right / pr.asked.clamp(min=1)).tolist()
        token, coord, size = torch.stack(pr.losses).mean(0).tolist()
        kinds = " ".join(f"{n}={100 * v:.0f}" for n, v in zip(p.QUESTION_NAMES, share, strict=True))
        line = (
            f"step {pr.step} {pr.seconds:.0f}s token {token:.4f} coord {coord:.3f} size {size:.3f} | {kinds}"
        )
        print(line, flush=True)
        with (self.args.out / "log.txt").open("a") as log:
            log.write(line + "\n")
        pr.losses, pr.right, pr.asked = [], None, None

    def run(self) -> None:
        self.args.out.mkdir(parents=True, exist_ok=True)
        start, before = time.time(), self.progress.seconds
        for crops, tiles, tasks in self.source:
            if self.progress.step >= self.args.steps or self.progress.seconds - before > self.args.seconds:
                break
            self.step(crops, tiles, tasks)
            if self.progress.step % 20 == 0 and self.device.type == "cuda":
                torch.cuda.synchronize()
            self.progress.seconds = before + time.time() - start
            if self.progress.step % self.args.report == 0:
                self.report()
        self.save()


if __name__ == "__main__":
    Trainer(parse()).run()

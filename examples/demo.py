"""Kestrel in a minute: the embedded model answers questions about the pictures in ``examples/images``.

Run ``hatch run demo``, or ``python examples/demo.py [--images FOLDER] [--output FOLDER]``. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.rule import Rule
from rich.table import Table

from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, SyncEngine
from kestrel.errors import KestrelError
from kestrel.media import MediaLimits, annotate, normalise_image
from kestrel.types import ChunkKind

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Tour:
    """What to ask about one picture: questions in order, then what to look for (None: nothing)."""

    file: str
    questions: tuple[str, ...]
    look_for: str | None = None


GREEDY = {"temperature": 0.0, "max_tokens": 64}  # the same answers every time
TOURS = (
    Tour(
        file="shapes.png",
        questions=(
            "How many red circles are there?",
            "What color is the square?",
            "Is there a green triangle?",
        ),
        look_for="red circle",
    ),
    Tour(file="bars.png", questions=("Which bar is tallest?", "How many bars are there?"), look_for="bar"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the closing table."""

    what: str
    result: EngineResult


def main() -> int:
    """0 when every question was answered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name, hub id or path; default: the embedded model")
    parser.add_argument("--images", type=Path, default=HERE / "images", help="where the pictures are")
    parser.add_argument(
        "--output", type=Path, default=HERE.parent / "demo-output", help="where annotated ones go"
    )
    args = parser.parse_args()
    console = Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())
    try:
        show(console, RuntimeConfig(model=args.model), pictures(args.images), args.output)
    except KestrelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def show(console: Console, config: RuntimeConfig, images: Path, output: Path) -> None:
    """The whole demonstration."""
    started = time.perf_counter()
    with progress(console) as report:
        engine = SyncEngine(config, progress=report)
    with engine:
        model = engine.model()
        console.print(
            f"{model.model_id}: {model.info.num_parameters / 1e6:.1f} M parameters, {model.info.dtype or 'as stored'}, "
            f"ready after {time.perf_counter() - started:.1f} s. It can {', '.join(model.skills)}."
        )
        for note in model.info.notes:
            console.print(note, style="dim")
        rows: list[Row] = []
        for tour in TOURS:
            rows += take(console, engine, tour, images, output)
    console.print()
    console.print(summary(rows))


def pictures(folder: Path) -> Path:
    """``folder`` if it holds the pictures of ``TOURS``, else a temporary folder with drawn ones."""
    if all((folder / tour.file).is_file() for tour in TOURS):
        return folder
    drawn = Path(tempfile.mkdtemp(prefix="kestrel-demo-"))
    shapes = Image.new("RGB", (420, 300), (222, 224, 228))
    draw = ImageDraw.Draw(shapes)
    for x, y in ((75, 75), (210, 215), (345, 95)):
        draw.ellipse((x - 38, y - 38, x + 38, y + 38), fill=(222, 32, 38))
    draw.rectangle((55, 185, 120, 250), fill=(38, 78, 218))
    shapes.save(drawn / "shapes.png")
    bars = Image.new("RGB", (420, 300), (246, 246, 246))
    draw = ImageDraw.Draw(bars)
    for at, (letter, height, colour) in enumerate(
        (("A", 90, "#2640da"), ("B", 210, "#26a03a"), ("C", 140, "#f68412"))
    ):
        draw.rectangle((60 + 110 * at, 260 - height, 130 + 110 * at, 260), fill=colour)
        draw.text((88 + 110 * at, 266), letter, fill="black", font=ImageFont.load_default(24))
    bars.save(drawn / "bars.png")
    return drawn


def take(console: Console, engine: SyncEngine, tour: Tour, images: Path, output: Path) -> Iterator[Row]:
    """Rows of one picture, each printed as it is answered."""
    path = images / tour.file
    console.print()
    console.print(Rule(tour.file, align="left", characters="─"))
    for question in tour.questions:
        console.print(f"{question} ", style="bold", end="")
        stream = engine.query(path, question, stream=True, settings=GREEDY)
        for chunk in stream:
            if chunk.kind is ChunkKind.TEXT:
                console.print(chunk.text, end="", style="green")
        result = stream.result()
        m = result.metrics
        console.print(
            f"   ({m.ttft_ms:.0f} ms to the first token; {m.cached_tokens} of {m.input_tokens} tokens were cached)",
            style="dim",
        )
        yield Row(f"{tour.file}: {question}", result)
    captioned = engine.caption(path, length="normal", settings=GREEDY)
    console.print("caption: ", style="bold", end="")
    console.print(captioned.output["caption"], style="green")
    yield Row(f"{tour.file}: caption", captioned)
    if tour.look_for is not None:
        yield from find(console, engine, path, tour.look_for, output)


def find(console: Console, engine: SyncEngine, path: Path, what: str, output: Path) -> Iterator[Row]:
    """Points at and boxes around ``what``, drawn into a copy of the picture."""
    pointed, detected = engine.point(path, what), engine.detect(path, what)
    points, boxes = pointed.output["points"], detected.output["objects"]
    console.print(f"point at {what}: ", style="bold", end="")
    console.print("; ".join(f"({p['x']:.2f}, {p['y']:.2f})" for p in points) or "none found", style="green")
    console.print(f"detect {what}: ", style="bold", end="")
    console.print(
        "; ".join(
            f"({b['x_min']:.2f}, {b['y_min']:.2f}) to ({b['x_max']:.2f}, {b['y_max']:.2f})" for b in boxes
        )
        or "none found",
        style="green",
    )
    target = output / f"{path.stem}.annotated.png"
    output.mkdir(parents=True, exist_ok=True)
    pixels = normalise_image(path, MediaLimits()).pixels
    annotate(pixels, points=points, boxes=boxes, labels=[what] * len(boxes)).save(target)
    console.print("drawn: ", style="bold", end="")
    console.print(str(target), style="cyan")
    yield Row(f"{path.name}: point at {what}", pointed)
    yield Row(f"{path.name}: detect {what}", detected)


def summary(rows: list[Row]) -> Table:
    """What each answer cost. The second question about a picture finds the picture in the prefix cache."""
    table = Table(
        title="How fast (tokens in, of them cached, and out)",
        title_justify="left",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    table.add_column("asked")
    for column in ("in", "cached", "out", "first token", "decode"):
        table.add_column(column, justify="right")
    for row in rows:
        m = row.result.metrics
        table.add_row(
            row.what,
            str(m.input_tokens),
            str(m.cached_tokens),
            str(m.output_tokens),
            f"{m.ttft_ms:.0f} ms",
            rate_of(row.result),
        )
    return table


def rate_of(result: EngineResult) -> str:
    """Tokens per second while decoding, from the first token on."""
    gaps, decode_s = result.metrics.output_tokens - 1, result.metrics.decode_time_ms / 1000.0
    return f"{gaps / decode_s:.0f} tokens/s" if gaps > 0 and decode_s > 0 else "-"


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Reports of loading as a bar, on a terminal only."""
    if not console.is_terminal:
        yield lambda what, done, total: None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as bars:
        tasks = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=None)
            bars.update(tasks[what], completed=done, total=total or None)

        yield report


if __name__ == "__main__":
    sys.exit(main())

"""``check_family``: is a model family what the engine takes it for? For families' own test suites."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import LoadError
from kestrel.loading import SafetensorsReader, load_tokenizer, read_card
from kestrel.ops import resolve_ops
from kestrel.spi import (
    Batch,
    BuildContext,
    Built,
    Call,
    ModelCard,
    ModelFamily,
    PromptFormat,
    StepDriver,
    TensorInfo,
    TextTokenizer,
    TokenDriver,
    WeightReader,
)
from kestrel.testing.bare import BareLoop
from kestrel.testing.capture import CaptureGuard
from kestrel.testing.replays import replayed
from kestrel.testing.samples import sample_call, sample_item
from kestrel.types import Layout, Prepared, Text, Token, Tokens

__all__ = ["FamilyReport", "build_tiny", "check_family"]

MAX_TOKENS = 12
CHUNK = 7  # of no page size, so that chunks end anywhere
TENSORS_TRIED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyReport:
    """What ``check_family`` ran: skills whose prompts it decoded, and kinds of media that it prepared."""

    skills: tuple[str, ...] = ()
    media: tuple[str, ...] = ()


def check_family(family: ModelFamily, *, seed: int = 0, optional: Collection[str] = ()) -> FamilyReport:
    """Build ``family.tiny()`` the way the engine does and hold it to the interface's promises; return what ran.

    Recognition from headers; strict loading in both directions (``optional``: tensors that a checkpoint may lack);
    digests that are stable and tell content apart; text that never becomes control ids; layouts that fit the spec;
    batched, chunked and captured launches with the tokens of plain ones, and so replays through a whole lane; nothing
    in the forward pass that a captured program cannot hold. Float32 on the CPU. Raises AssertionError saying what is
    wrong.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, torch.no_grad():
        directory = Path(name)
        built, card = build_tiny(family, directory, seed)
        _check_recognition(family, card, built)
        _check_strictness(family, card, optional)
        driver = built.main
        items = _check_media(driver)
        if isinstance(driver, StepDriver):
            _check_steps(driver, items)
            return FamilyReport(media=tuple(items))
        _check_spec(driver)
        _check_control_text(driver.tokenizer, directory)
        skills: tuple[str, ...] = ()
        if built.prompt is not None:
            calls = _calls(family, driver, built.prompt, items)
            _check_prompts(driver, built.prompt, calls)
            _check_runs(driver, built.prompt, calls)
            skills = tuple(dict.fromkeys(call.skill for call in calls))
        return FamilyReport(skills=skills, media=tuple(items))


def build_tiny(family: ModelFamily, directory: Path, seed: int = 0) -> tuple[Built, ModelCard]:
    """The family's tiny checkpoint, written to ``directory`` and built from there; and its card."""
    tiny = family.tiny()
    assert tiny is not None, f"{family.name}.tiny() gives no checkpoint; nothing can be checked without one"
    tiny.write(directory, seed)
    card = read_card(f"{family.name}/tiny", directory)
    return _build(family, card, SafetensorsReader.of(card)), card


def _build(family: ModelFamily, card: ModelCard, reader: WeightReader) -> Built:
    context = BuildContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        ops=resolve_ops(),
        weights=reader,
        tokenizer=lambda: load_tokenizer(card.directory),
        config=RuntimeConfig(model_path=card.path, device="cpu", dtype="float32"),
    )
    return family.build(card, context)


def _check_recognition(family: ModelFamily, card: ModelCard, built: Built) -> None:
    assert family.match(card) is not None, f"{family.name} does not match its own tiny checkpoint"
    stranger = ModelCard(
        model_id="some/stranger",
        path=card.path,
        config={"model_type": "stranger"},
        tensors={"stranger.weight": TensorInfo((1,), "F32", "model.safetensors")},
    )
    assert family.match(stranger) is None, f"{family.name} matches a checkpoint that has nothing of it"
    info = family.describe(card)
    assert info.family == family.name, f"describe() names the family {info.family!r}, not {family.name!r}"
    assert info.num_parameters > 0, "describe() counts no parameters"
    if built.prompt is not None:
        assert set(info.skills) == set(built.prompt.skills), (
            f"describe() promises the skills {sorted(info.skills)}, the prompts have {sorted(built.prompt.skills)}"
        )


class _Edited:
    """A reader with one tensor more, less or of another shape."""

    def __init__(self, reader: WeightReader, tensors: Mapping[str, TensorInfo]) -> None:
        self._reader = reader
        self._tensors = MappingProxyType(dict(tensors))

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        if self._reader.tensors.get(name) == self._tensors[name]:
            return self._reader.get(name)
        return torch.zeros(self._tensors[name].shape)


def _check_strictness(family: ModelFamily, card: ModelCard, optional: Collection[str]) -> None:
    names = sorted(card.tensors.keys() - set(optional))
    step = max(1, len(names) // TENSORS_TRIED)
    for name in names[::step]:
        rest = {n: info for n, info in card.tensors.items() if n != name}
        error = _load_error(family, card, rest)
        assert error is not None, f"a checkpoint without {name!r} loads"
        assert error.missing or family.match(replace(card, tensors=rest)) is None, (
            f"the error about the missing {name!r} does not list it as missing"
        )
        longer = replace(card.tensors[name], shape=(*card.tensors[name].shape, 3))
        assert _load_error(family, card, {**card.tensors, name: longer}) is not None, (
            f"a checkpoint whose {name!r} has another shape loads"
        )
    stray = "stray.weight"
    error = _load_error(family, card, {**card.tensors, stray: TensorInfo((1,), "F32", "model.safetensors")})
    assert error is not None, f"a checkpoint with the unknown tensor {stray!r} loads"
    assert stray in error.unexpected, f"the error about the unknown {stray!r} does not list it"


def _load_error(family: ModelFamily, card: ModelCard, tensors: Mapping[str, TensorInfo]) -> LoadError | None:
    try:
        _build(family, replace(card, tensors=tensors), _Edited(SafetensorsReader.of(card), tensors))
    except LoadError as error:
        return error
    return None


def _check_media(driver: TokenDriver | StepDriver) -> dict[str, list[Prepared]]:
    """Two prepared items of every kind that the driver takes and core can make."""
    found: dict[str, list[Prepared]] = {}
    for spec in driver.spec.media:
        items = [sample_item(spec.kind, seed) for seed in (0, 0, 1)]
        prepared = [driver.prepare(item, {}) for item in items if item is not None]
        if not prepared:
            continue
        first, again, other = prepared
        assert first.digest == again.digest, (
            f"the digest of a {spec.kind} changes from one preparation to the next"
        )
        assert first.digest != other.digest, f"two different {spec.kind}s have one digest"
        assert first.kind == spec.kind, f"a {spec.kind} is prepared as {first.kind!r}"
        assert first.cost <= spec.max_cost, f"a small {spec.kind} costs more than one launch may"
        if isinstance(driver, TokenDriver):
            _check_encoding(driver, spec.kind, [first, other], into_positions=spec.into == "positions")
        found[spec.kind] = [first, other]
    return found


def _check_encoding(driver: TokenDriver, kind: str, items: list[Prepared], *, into_positions: bool) -> None:
    together = driver.encode(kind, items)
    alone = torch.cat([driver.encode(kind, [item]) for item in items])
    assert together.shape == alone.shape, f"{kind}s encoded together have shape {tuple(together.shape)}"
    scale = alone.abs().max().clamp(min=1.0)
    assert (together - alone).abs().max() <= 1e-4 * scale, (
        f"{kind}s encoded together differ from encoded alone"
    )
    if into_positions:
        wanted = (sum(item.num_positions for item in items), driver.spec.hidden_size)
        assert all(item.num_positions > 0 for item in items), f"a {kind} fills no position"
        assert together.shape == wanted, f"encoding {kind}s gives {tuple(together.shape)}, not {wanted}"


def _check_spec(driver: TokenDriver) -> None:
    spec = driver.spec
    names = [state.name for state in spec.states]
    assert len(names) == len(set(names)), f"two states share a name: {names}"
    ids = [*spec.eos_ids, *(output.token_id for output in spec.aux if output.token_id is not None)]
    assert all(0 <= i < spec.vocab_size for i in ids), f"{ids} are not all ids of the vocabulary"
    assert driver.tokenizer.vocab_size <= spec.vocab_size, "the tokenizer has ids that the model lacks"


def _check_control_text(tokenizer: TextTokenizer, directory: Path) -> None:
    file = directory / "tokenizer.json"
    spec = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for entry in spec.get("added_tokens", ()):
        name = entry["content"]
        control = tokenizer.token_id(name)
        if control is None or tokenizer.token_bytes(control):
            continue
        ids = tokenizer.encode(f"a {name} b")
        assert control not in ids, f"text that spells {name} becomes its control id {control}"
        assert all(tokenizer.token_bytes(i) for i in ids), f"text that spells {name} becomes a control id"


def _calls(
    family: ModelFamily, driver: TokenDriver, prompt: PromptFormat, items: Mapping[str, Sequence[Prepared]]
) -> list[Call]:
    tiny = family.tiny()
    promised = tiny.skills if tiny is not None and tiny.skills else tuple(sorted(prompt.skills))
    unknown = set(promised) - prompt.skills
    assert not unknown, f"tiny() promises {sorted(unknown)}, which its prompts do not have"
    calls = []
    for skill in promised:
        reasons = (False, True) if prompt.defaults(skill).get("reasoning") is not None else (False,)
        media = list(items.get("audio" if skill == "transcribe" else "image", ()))
        for text, shown in (("What is here", media[:1]), ("another", media[1:])):
            for reasoning in reasons:
                call = sample_call(skill, text, shown, driver.spec.media, reasoning=reasoning)
                calls += [] if call is None else [call]
    assert calls or not promised, (
        f"none of the skills {promised} can be tried; tell kestrel.testing.samples of them"
    )
    return calls


def _check_prompts(driver: TokenDriver, prompt: PromptFormat, calls: Sequence[Call]) -> None:
    for call in calls:
        prompt.validate(call.skill, call)
        _check_layout(driver, call.skill, driver.layout(prompt.segments(call.skill, call)))
    by_shape: dict[tuple[str, bool], list[Call]] = {}
    for call in calls:
        by_shape.setdefault((call.skill, call.reasoning), []).append(call)
    for (skill, _), (first, *others) in by_shape.items():
        wanted = [s for s in prompt.segments(skill, first) if isinstance(s, Tokens)]
        for other in others:
            got = [s for s in prompt.segments(skill, other) if isinstance(s, Tokens)]
            assert got == wanted, (
                f"{skill}: the user's text changes the prompt's control ids; give it as Text"
            )
        if skill != "caption":
            texts = [s for s in prompt.segments(skill, first) if isinstance(s, Text)]
            assert texts, f"{skill}: the user's text is in no Text segment"


def _check_layout(driver: TokenDriver, skill: str, layout: Layout) -> None:
    spec, size = driver.spec, len(layout)
    assert 0 < size <= spec.max_positions, f"{skill}: a prompt of {size} positions"
    assert all(0 <= i < spec.vocab_size for i in layout.tokens), f"{skill}: ids outside the vocabulary"
    assert not layout.aux or {len(bins) for bins in layout.aux} == {spec.aux_width}, (
        f"{skill}: aux of a wrong width"
    )
    assert not layout.positions or (
        len(layout.positions) == spec.position_rows and all(len(row) == size for row in layout.positions)
    ), f"{skill}: positions are not {spec.position_rows} rows of {size}"
    end = 0
    for span in layout.spans:
        assert end <= span.start < span.end <= size, f"{skill}: spans overlap or leave the prompt"
        assert span.end - span.start == layout.media[span.item].num_positions, (
            f"{skill}: a span of a wrong length"
        )
        end = span.end
    assert all(0 <= start < stop <= size for start, stop in layout.bidirectional), (
        f"{skill}: a range leaves the prompt"
    )


class _Guarded(TokenDriver):
    """A driver whose forward pass must be one that a captured program can hold."""

    def __init__(self, driver: TokenDriver) -> None:
        self._driver = driver
        self.spec, self.tokenizer = driver.spec, driver.tokenizer
        self.encode, self.write_cross = driver.encode, driver.write_cross  # type: ignore[method-assign]

    def embed(self, batch: Batch) -> torch.Tensor:
        with _guard():
            return self._driver.embed(batch)

    def forward(self, batch: Batch, x_TC: torch.Tensor) -> torch.Tensor:
        with _guard():
            return self._driver.forward(batch, x_TC)

    def logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        with _guard():
            return self._driver.logits(h_NC)

    def aux_logits(self, h_NC: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        with _guard():
            return self._driver.aux_logits(h_NC, ids_N)


def _guard() -> CaptureGuard:
    return CaptureGuard()  # type: ignore[no-untyped-call, unused-ignore]


def _check_runs(driver: TokenDriver, prompt: PromptFormat, calls: Sequence[Call]) -> None:
    layouts = [driver.layout(prompt.segments(call.skill, call)) for call in calls]
    decodings = [prompt.decoding(call.skill, call) for call in calls]
    longest = max(map(len, layouts), default=0) + MAX_TOKENS + 1

    def run(
        picked: Sequence[int], *, by: TokenDriver = driver, chunk: int | None = None, captured: bool = False
    ) -> list[list[Token]]:
        loop = BareLoop(by, max_rows=len(picked), max_len=longest, captured=captured)
        return loop.run(
            [layouts[i] for i in picked], [decodings[i] for i in picked], max_tokens=MAX_TOKENS, chunk=chunk
        )

    everyone = range(len(calls))
    alone = [run([i])[0] for i in everyone]
    for what, others in (
        ("run together", run(everyone)),
        ("prefilled in chunks", run(everyone, chunk=CHUNK)),
        ("captured", run(everyone, by=_Guarded(driver), captured=True)),
    ):
        for call, wanted, got in zip(calls, alone, others, strict=True):
            assert got == wanted, f"{call.skill} {what} gives {_ids(got)}, alone {_ids(wanted)}"
    firsts = list({call.skill: i for i, call in reversed(list(enumerate(calls)))}.values())
    replays = replayed(driver, [layouts[i] for i in firsts], [decodings[i] for i in firsts], MAX_TOKENS)
    for i, got in zip(firsts, replays, strict=True):
        assert _ids(got) == _ids(alone[i]), (
            f"{calls[i].skill} replayed from captured programs gives {_ids(got)}, alone {_ids(alone[i])}"
        )


def _ids(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]


def _check_steps(driver: StepDriver, items: Mapping[str, Sequence[Prepared]]) -> None:
    prepared = [item for kind in items.values() for item in kind]
    together = _step_tokens(driver, prepared)
    for item, wanted in zip(prepared, together, strict=True):
        assert _step_tokens(driver, [item]) == [wanted], f"a {item.kind} run alone differs from run together"


def _step_tokens(driver: StepDriver, prepared: Sequence[Prepared]) -> list[list[int]]:
    states = dict(enumerate(driver.start(prepared, [None] * len(prepared))))
    tokens: list[list[int]] = [[] for _ in prepared]
    for _ in range(10_000):
        if not states:
            return tokens
        for i, progress in zip(list(states), driver.step(list(states.values())), strict=True):
            tokens[i] += [token.id for token in progress.tokens]
            if progress.done:
                driver.close(states.pop(i))
    raise AssertionError("a step driver does not finish a short clip in 10,000 steps")

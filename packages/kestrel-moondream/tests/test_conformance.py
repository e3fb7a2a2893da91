"""The family passes the public conformance check, and the check sees what it is there to see."""

from dataclasses import replace

import pytest
import torch

from kestrel.spi import Built, Match, TextTokenizer
from kestrel.testing.families import check_family
from kestrel.types import Text, Tokens
from kestrel_moondream import MoondreamFamily
from kestrel_moondream.driver import MoondreamDriver
from kestrel_moondream.prompt import MoondreamPrompt


def test_the_family_keeps_the_interfaces_promises():
    report = check_family(MoondreamFamily())
    assert set(report.skills) == {"query", "caption", "point", "detect", "chat", "generate"}
    assert set(report.media) == {"image", "point", "box"}


class Broken(MoondreamFamily):
    """The family with its driver or prompts replaced."""

    driver: type[MoondreamDriver] = MoondreamDriver
    prompt: type[MoondreamPrompt] = MoondreamPrompt

    def build(self, card, ctx):
        built = super().build(card, ctx)
        main = self.driver(built.main.config, built.main.model, self.tokenizer_of(built), ctx.device)
        return replace(built, main=main, prompt=self.prompt(main.config))

    def tokenizer_of(self, built: Built) -> TextTokenizer:
        return built.main.tokenizer


class ReadsBack(MoondreamDriver):
    def forward(self, batch, x_TC):
        return super().forward(batch, x_TC) * (1.0 if x_TC[0, 0].item() < 1e9 else 2.0)


class MasksByBoolean(MoondreamDriver):
    def embed(self, batch):
        x = super().embed(batch)
        x[batch.ids_T == 4] += 1
        return x


class SeesItsNeighbours(MoondreamDriver):
    def forward(self, batch, x_TC):
        return super().forward(batch, x_TC + x_TC.mean(0))


class CallsEverythingEqual(MoondreamDriver):
    def prepare(self, item, settings):
        return replace(super().prepare(item, settings), digest=bytes(32))


class PutsTextIntoTokens(MoondreamPrompt):
    def segments(self, skill, call):
        found = super().segments(skill, call)
        return [Tokens(tuple(t.encode())) if isinstance(s, Text) and (t := s.text) else s for s in found]


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (ReadsBack, "reads a number back"),
        (MasksByBoolean, "boolean mask"),
        (SeesItsNeighbours, "run together"),
        (CallsEverythingEqual, "one digest"),
    ],
)
def test_a_broken_driver_is_found(driver, says):
    family = type("Family", (Broken,), {"driver": driver})()
    with pytest.raises(AssertionError, match=says):
        check_family(family)


def test_user_text_among_the_control_ids_is_found():
    family = type("Family", (Broken,), {"prompt": PutsTextIntoTokens})()
    with pytest.raises(AssertionError, match="give it as Text"):
        check_family(family)


def test_a_tokenizer_that_parses_control_tokens_is_found():
    class Parses:
        def __init__(self, inner):
            self._inner = inner
            self.vocab_size = inner.vocab_size
            self.decode, self.token_bytes, self.token_id = inner.decode, inner.token_bytes, inner.token_id

        def encode(self, text):
            return [0] if "<|endoftext|>" in text else self._inner.encode(text)

    family = type("Family", (Broken,), {"tokenizer_of": lambda self, built: Parses(built.main.tokenizer)})()
    with pytest.raises(AssertionError, match="control id"):
        check_family(family)


def test_a_family_that_matches_everything_is_found():
    family = type("Family", (MoondreamFamily,), {"match": lambda self, card: Match()})()
    with pytest.raises(AssertionError, match="nothing of it"):
        check_family(family)


@pytest.mark.parametrize("what", ["without", "unknown tensor"])
def test_a_lenient_loader_is_found(monkeypatch, what):
    from kestrel_moondream import weights

    def lenient(model, reader, *, device, dtype, rename, **_):
        found = {rename(name): reader.get(name) for name in reader.names()}
        model.to_empty(device=device)
        strict = what != "without"
        if strict:
            found = {name: t for name, t in found.items() if name in model.state_dict()}
        try:
            model.load_state_dict(found, strict=strict)
        except RuntimeError as error:
            from kestrel.errors import LoadError

            raise LoadError(str(error), missing=["something"]) from error

    monkeypatch.setattr(weights, "load_weights", lenient)
    with pytest.raises(AssertionError, match=what):
        check_family(MoondreamFamily())


def test_a_family_without_a_tiny_checkpoint_cannot_be_checked():
    family = type("Family", (MoondreamFamily,), {"tiny": lambda self: None})()
    with pytest.raises(AssertionError, match="no checkpoint"):
        check_family(family)
    assert torch.is_grad_enabled(), "the check leaves torch as it was"

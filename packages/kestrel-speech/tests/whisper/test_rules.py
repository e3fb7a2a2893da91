"""Decoding rules against those of transformers, on random logits and along random histories; each rule alone."""

import numpy as np
import pytest
import torch

from kestrel.config import Settings
from kestrel.sampling import Sampler, SamplingParams
from kestrel.spi import Automaton
from kestrel.types import Token
from kestrel_speech.whisper.rules import WindowRules
from kestrel_speech.whisper.tokens import SpecialIds

BEGIN = 270  # of times, in the tiny vocabulary
EOT, NO_TIMES = 256, 269


@pytest.fixture(scope="module")
def rules(built):
    return built.prompt._rules


@pytest.fixture(scope="module")
def special(built) -> SpecialIds:
    return built.prompt._special


class Row:
    """One row of the sampler under ``decoding``."""

    def __init__(self, spec, decoding, history=()):
        self.sampler = Sampler(spec, 1, torch.device("cpu"))
        self.params = SamplingParams.resolve(
            Settings(temperature=0.0, logprobs=True, top_logprobs=20), decoding, spec
        )
        self.history = [Token(i) for i in history]
        self.restart()

    def restart(self):
        """Stand where the history ends."""
        self.sampler.set_row(0, self.params, seed=0, history=self.history)

    def pick(self, logits):
        """The most likely id that the rules leave, and its log-probability."""
        made = self.sampler.sample(logits[None], [0], torch.tensor([0]))
        return int(made.ids[0]), float(made.logprob[0]), int(made.status[0])


def processors(special, max_initial):
    """transformers' rules, for ids that follow a prompt of one."""
    logits_process = pytest.importorskip("transformers.generation.logits_process")

    class Config:
        eos_token_id = bos_token_id = special.eot
        no_timestamps_token_id = special.no_timestamps
        max_initial_timestamp_index = max_initial
        _detect_timestamp_from_logprob = True

    times = logits_process.WhisperTimeStampLogitsProcessor(Config(), begin_index=1)
    never = sorted({*special.non_speech, *special.control})
    return [
        logits_process.SuppressTokensLogitsProcessor(never),
        logits_process.SuppressTokensAtBeginLogitsProcessor(list(special.blanks), begin_index=1),
        times,
    ]


@pytest.mark.parametrize("max_initial", [50, 7, None])
def test_along_random_histories_the_rules_are_those_of_transformers(built, rules, special, max_initial):
    generator = torch.Generator().manual_seed(3)
    decoding = rules.window(with_times=True, max_initial=max_initial)
    theirs = processors(special, max_initial)
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(12):
        history: list[int] = []
        row = Row(built.main.spec, decoding)
        for _ in range(20):
            logits = torch.randn(special.vocab_size, generator=generator) * 3
            logits[BEGIN:] += float(rng.choice([-4, 0, 1]))
            logits[EOT] -= 6
            wanted = logits[None].clone()
            for process in theirs:
                wanted = process(torch.tensor([[special.sot, *history]]), wanted)
            token, logprob, status = row.pick(logits)
            assert status == 0
            assert token == int(wanted.argmax())
            assert logprob == pytest.approx(float(wanted.log_softmax(-1).max()), abs=1e-4)
            history.append(token)
            seen.add((token >= BEGIN, len(history) > 1 and history[-2] >= BEGIN))
            if token == EOT:
                break
    assert len(seen) == 4, "text and times followed each other in every way"


def allowed(built, rules, history, **options):
    """The ids that may follow ``history``."""
    decoding = rules.window(with_times=True, **options)
    row = Row(built.main.spec, decoding, history)
    found = set()
    for token in range(built.main.spec.vocab_size):
        logits = torch.full((built.main.spec.vocab_size,), -100.0)
        logits[token] = 100.0
        row.restart()
        picked, _, _ = row.pick(logits)
        if picked == token:
            found.add(token)
    return found


def times(*steps):
    return {BEGIN + step for step in steps}


def test_the_first_id_is_a_time_of_at_most_one_second(built, rules):
    assert allowed(built, rules, []) == times(*range(51))


def test_a_time_that_opens_a_segment_is_followed_by_text(built, rules, special):
    found = allowed(built, rules, [BEGIN + 5])
    assert not found & times(*range(151))
    assert special.eot in found
    assert ord("a") in found or 65 in found


def test_a_time_that_closes_text_is_repeated_or_left_behind(built, rules, special):
    found = allowed(built, rules, [BEGIN + 5, 65, BEGIN + 9])
    assert found & set(range(special.eot)) == set(), "no text"
    assert times(*range(9, 151)) <= found
    assert special.eot in found
    assert not found & times(*range(9))


def test_times_increase_behind_text(built, rules):
    found = allowed(built, rules, [BEGIN + 5, 65, BEGIN + 9, BEGIN + 9, 66])
    assert found & times(*range(151)) == times(*range(10, 151))


def test_text_that_goes_on_may_end_with_a_time_at_once(built, rules):
    found = allowed(built, rules, [], goes_on=True)
    assert found & times(*range(151)) == times(*range(1, 151))
    assert 65 in found


def test_suppressed_ids_are_the_callers_or_the_checkpoints(built, rules, special):
    history = [BEGIN]
    assert not set(special.non_speech) & allowed(built, rules, history)
    own = allowed(built, rules, history, suppress=(65,))
    assert 65 not in own
    assert special.non_speech[0] in own
    assert not set(special.control) & own, "what opens a prompt is never written"


def test_equal_questions_share_their_rules(rules):
    first = rules.window(with_times=True, max_initial=50)
    assert rules.window(with_times=True, max_initial=50) is first
    other = rules.window(with_times=True, max_initial=50, suppress=(1,))
    assert {rule for rule in other.rules if isinstance(rule, Automaton)} <= set(first.rules)


def test_rules_of_a_published_size_have_a_state_for_every_time():
    ids = SpecialIds(
        vocab_size=51866, eot=50257, sot=50258, translate=50359, transcribe=50360, start_of_lm=50361,
        start_of_previous=50362, no_speech=50363, no_timestamps=50364, is_multilingual=True, languages={"en": 50259},
        non_speech=(1, 2), blanks=(220, 50257),
    )  # fmt: skip
    automaton = next(r for r in WindowRules(ids).window(with_times=True).rules if isinstance(r, Automaton))
    assert (ids.time_begin, ids.num_times) == (50365, 1501)
    assert len(automaton.mask) == 1 + 3 * 1501

"""What SamplingParams refuses at the door, and how settings and decoding combine."""

import pytest

from kestrel.config import Settings
from kestrel.errors import InvalidRequestError
from kestrel.sampling import SamplingParams
from kestrel.spi import Decoding, LogitRule, TokenSpec

SPEC = TokenSpec(vocab_size=17, hidden_size=3, max_positions=64)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"stop_token_ids": [17]}, "stop_token_ids names token 17"),
        ({"logit_bias": {400: 1.0}}, "logit_bias names token 400"),
        ({"repetition_penalty": 1e-9}, "from 0.01 to 100"),
        ({"repetition_penalty": 1e9}, "from 0.01 to 100"),
    ],
)
def test_ids_outside_the_vocabulary_and_extreme_penalties_are_refused(values, names):
    with pytest.raises(InvalidRequestError, match=names):
        SamplingParams.resolve(Settings.from_mapping(values), Decoding(), SPEC)


def test_an_unknown_logit_rule_is_refused():
    with pytest.raises(InvalidRequestError, match="prefer_group"):
        SamplingParams.resolve(Settings(), Decoding(rules=(LogitRule(op="prefer_gruop"),)), SPEC)


def test_a_greedy_decoding_wins_over_the_temperature():
    assert SamplingParams.resolve(Settings(temperature=1.0), Decoding(greedy=True), SPEC).temperature == 0


@pytest.mark.parametrize(
    ("own", "cap", "want"), [(5, None, 5), (None, 7, 7), (5, 7, 5), (9, 7, 7), (None, None, None)]
)
def test_the_smaller_max_tokens_wins(own, cap, want):
    params = SamplingParams.resolve(Settings(max_tokens=own), Decoding(max_tokens=cap), SPEC)

    assert params.max_tokens == want

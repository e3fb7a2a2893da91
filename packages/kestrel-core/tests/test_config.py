"""Whatever is given as a setting is either kept as a plain value or refused by name."""

import fractions
from dataclasses import fields

import numpy as np
import pytest

from kestrel.config import RuntimeConfig, Settings
from kestrel.errors import InvalidRequestError, shown


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no repr")


NOBODY_MEANT = [
    True, "", "\0", "x", b"x", "1", -1, 0, 1.5, 10**400, -(10**400), 10**5000, float("nan"), float("inf"), 1j,
    [], [1], [None], ["x", 1], {}, {"a": 1}, {1: 2}, {None: 1}, {1}, fractions.Fraction(1, 2), np.int64(1),
    np.float32(0.5), np.array(1), np.array([1.0]), object(), Unshowable(), len, "\ud800", "a" * 100_000,
]  # fmt: skip


def refusal(kind, name, value):
    """The message, or "" when the value is taken."""
    try:
        kind(**{name: value})
    except InvalidRequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [Settings, RuntimeConfig])
def test_whatever_is_given_is_taken_or_refused_in_a_line(kind):
    for field in fields(kind):
        messages = [refusal(kind, field.name, value) for value in NOBODY_MEANT]
        assert any(messages), field.name
        assert max(map(len, messages)) < 1000, field.name


def test_both_ways_to_give_settings_agree():
    given = {"stop": "END", "stop_token_ids": [3], "logit_bias": {"5": 1}, "seed": np.int64(7)}
    assert Settings(**given) == Settings.from_mapping(given)
    assert Settings(**given).stop == ("END",)
    assert Settings(**given).logit_bias == {5: 1.0}


def test_numbers_of_numpy_become_plain_ones():
    settings = Settings(max_tokens=np.int32(3), temperature=np.float32(0.5), top_p=np.float64(0.5))
    assert type(settings.max_tokens) is int
    assert type(settings.temperature) is float


def test_settings_do_not_change_with_what_they_were_made_of():
    bias = {1: 2.0}
    settings = Settings(logit_bias=bias)
    bias[1] = 99.0
    assert settings.logit_bias == {1: 2.0}


def test_none_is_not_given():
    assert Settings(n=None, min_tokens=None, stop=None, logit_bias=None, logprobs=None) == Settings()


@pytest.mark.parametrize("given", [[], [("temperature", 1)], "x", 1])
def test_settings_that_are_no_mapping_are_refused(given):
    with pytest.raises(InvalidRequestError, match="give a mapping"):
        Settings.from_mapping(given)


@pytest.mark.parametrize("key", [1, None, b"a", "a" * 10_000])
def test_unknown_keys_of_any_kind_are_named(key):
    with pytest.raises(InvalidRequestError, match="unknown setting"):
        Settings.from_mapping({key: 1})
    with pytest.raises(InvalidRequestError, match="unknown engine setting"):
        RuntimeConfig.from_mapping({key: 1})


def test_one_domain_is_no_list_of_letters():
    with pytest.raises(InvalidRequestError, match="allowed_media_domains is a str; give a list"):
        RuntimeConfig(allowed_media_domains="example.com")


def test_shown_values_are_short_and_never_fail():
    assert shown("a") == "'a'"
    assert len(shown("a" * 10**6)) < 300
    assert shown(10**5000) == "a int that cannot be shown"
    assert shown(Unshowable()) == "a Unshowable that cannot be shown"


@pytest.mark.parametrize(
    "device", ["cuda:", "cpu:", "mps:0", "auto:", "cuda:-1", "cuda:１", "cuda:" + "9" * 30]
)
def test_a_device_that_no_machine_has_is_refused_with_the_choices(device):
    with pytest.raises(InvalidRequestError, match=r"device is .*Choices: auto, cpu, cuda, cuda:N, mps"):
        RuntimeConfig(device=device)

"""transcribe: what it takes, under which names, and what it refuses before anything is decoded."""

import pytest

from kestrel.config import Settings
from kestrel.errors import InvalidRequestError
from kestrel.skills import SpokenSegment, SpokenWord, TranscribeSkill, Transcript, ladder_of, options_of

SKILL = TranscribeSkill()
DEFAULTS = {
    "temperature": (0.0, 0.5),
    "best_of": 5,
    "max_tokens": 444,
    "compression_ratio_threshold": 2.4,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
}


def parse(settings=None, **inputs):
    return SKILL.parse({"audio": b"x", **inputs}, SKILL.settings(settings, DEFAULTS))


def test_defaults_are_the_familys():
    call = parse()
    assert ladder_of(call.settings).temperatures == (0.0, 0.5)
    assert ladder_of(call.settings).best_of == 5
    assert (call.settings.temperature, call.settings.max_tokens) == (0.0, 444)
    options = options_of(call)
    assert (options.task, options.timestamps, options.clips, options.vad_filter) == (
        "transcribe",
        "segment",
        (),
        None,
    )


def test_a_setting_of_none_turns_a_threshold_off():
    ladder = ladder_of(parse({"logprob_threshold": None, "no_speech_threshold": 0.3}).settings)
    assert (ladder.logprob_threshold, ladder.no_speech_threshold) == (None, 0.3)
    assert ladder.compression_ratio_threshold == 2.4


def test_settings_may_come_among_the_inputs_under_other_engines_names():
    call = parse(
        {"max_tokens": 9}, log_prob_threshold=-2, temperature=[0.0, 0.4, 1.0], best_of=2, beam_size=1, seed=7
    )
    ladder = ladder_of(call.settings)
    assert (ladder.logprob_threshold, ladder.temperatures, ladder.best_of) == (-2, (0.0, 0.4, 1.0), 2)
    assert (call.settings.seed, call.settings.max_tokens, call.settings.temperature) == (7, 9, 0.0)
    assert parse(max_new_tokens=12).settings.max_tokens == 12


def test_settings_survive_being_handed_over_as_settings():
    settings = SKILL.settings({"temperature": 0.3, "best_of": 3}, DEFAULTS)
    again = SKILL.settings(settings, DEFAULTS)
    assert ladder_of(again) == ladder_of(settings)


@pytest.mark.parametrize(
    ("given", "clips"),
    [
        ({"clip_start_seconds": 2}, ((2.0, None),)),
        ({"clip_end_seconds": 3.5}, ((0.0, 3.5),)),
        ({"clip_timestamps": "0,5,10"}, ((0.0, 5.0), (10.0, None))),
        ({"clip_timestamps": [1, 2, 3, 4]}, ((1.0, 2.0), (3.0, 4.0))),
        ({"clip_timestamps": [{"start": 1, "end": 2}, {"start": 5}]}, ((1.0, 2.0), (5.0, None))),
        ({"clip_timestamps": "0"}, ()),
    ],
)
def test_clips_in_every_spelling(given, clips):
    assert options_of(parse(**given)).clips == clips


def test_other_spellings_of_options():
    options = options_of(
        parse(word_timestamps=True, timestamps="segment", suppress_tokens="-1", hotwords="  ")
    )
    assert (options.timestamps, options.suppress_tokens, options.hotwords) == ("word", None, None)
    assert options_of(parse(suppress_tokens="5, 7")).suppress_tokens == (5, 7)
    assert options_of(parse(suppress_tokens=[])).suppress_tokens == ()
    assert options_of(parse(hallucination_silence_threshold=2)).with_words


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"timestamp": "word"}, "Did you mean 'timestamps'"),
        ({"timestamps": "words"}, "Did you mean 'word'"),
        ({"task": "summarise"}, "Choices: transcribe, translate"),
        ({"beam_size": 5}, "beam search is not supported yet"),
        ({"patience": 2.0}, "not supported yet"),
        ({"temperature": [0.4, 0.2]}, "strictly increases"),
        ({"temperature": 1.5}, "from 0 to 1"),
        ({"best_of": 9}, "from 1 to 8"),
        ({"no_speech_threshold": 2}, "from 0 to 1"),
        ({"logprob_threshold": "low"}, "finite number"),
        ({"clip_start_seconds": 5, "clip_end_seconds": 4}, "positive length"),
        ({"clip_timestamps": [0, 5, 4, 9]}, "order clips"),
        ({"clip_timestamps": [1], "clip_end_seconds": 2}, "contradict"),
        ({"clip_start_seconds": -1}, "seconds from 0"),
        ({"sample_rate": 0}, "whole number of Hz"),
        ({"sample_rate": 44.1}, "whole number of Hz"),
        ({"suppress_tokens": [-1, 5]}, r"\[-1\]"),
        ({"vad_parameters": 3}, "mapping"),
        ({"batch_size": 0}, "from 1 to"),
        ({"initial_prompt": 3}, "give a string"),
        ({"audio": [0.0, 1.0]}, "one-dimensional array"),
        ({"audio": None}, "give a path"),
    ],
)
def test_what_cannot_be_is_refused(given, says):
    with pytest.raises(InvalidRequestError, match=says):
        parse(**given)


def test_a_setting_of_another_skill_is_refused():
    with pytest.raises(InvalidRequestError, match="takes no setting 'top_k'"):
        SKILL.settings({"top_k": 4}, DEFAULTS)


def test_the_result_has_its_shape_and_times_in_milliseconds():
    word = SpokenWord(word=" Hi", start=1.00049, end=1.5, probability=0.98765)
    segment = SpokenSegment(
        text=" Hi there.", start=1.0004, end=2.0, words=(word,), scores={"temperature": 0.0}
    )
    made = Transcript(
        segments=(segment,), language="en", task="transcribe", clip_start=1.0, clip_end=3.0, source_duration=9.0,
        language_probability=0.5, scores={"no_speech_prob": 0.1},
    ).as_output()  # fmt: skip
    assert made == {
        "text": "Hi there.", "language": "en", "task": "transcribe", "duration_seconds": 2.0,
        "source_duration_seconds": 9.0, "clip_start_seconds": 1.0, "clip_end_seconds": 3.0,
        "segments": [
            {"text": " Hi there.", "start": 1.0, "end": 2.0, "temperature": 0.0,
             "words": [{"word": " Hi", "start": 1.0, "end": 1.5, "probability": 0.9877}]},
        ],
        "language_probability": 0.5, "no_speech_prob": 0.1,
    }  # fmt: skip


def test_plain_settings_are_settings():
    assert isinstance(SKILL.settings(None, DEFAULTS), Settings)
    assert SKILL.setting_names() >= {"temperature", "best_of", "timeout_s"}

"""The ladder of temperatures: when another attempt is made, which one counts, and what silence is."""

import asyncio
import math

import pytest

from kestrel.config import Settings
from kestrel.errors import RequestCancelledError
from kestrel.skills import Ladder
from kestrel.spi import Completion, Decoding, Finish, Infer
from kestrel.types import Prepared, Token, TokenLogprobs
from kestrel_speech.whisper.loops import LoopStop, without_loop
from kestrel_speech.whisper.window import WindowDecoder, WindowPrompt, compression_ratio

LADDER = Ladder(
    temperatures=(0.0, 0.4, 0.8), best_of=3, compression_ratio_threshold=2.4, logprob_threshold=-1.0,
    no_speech_threshold=0.6,
)  # fmt: skip
WINDOW = Prepared(kind="audio", digest=bytes(32), num_positions=0, tensors={})
GOOD, LOOP = "Ever tried. Ever failed.", "again and " * 40


def completion(text="", *, logprob=-0.2, no_speech=0.01, reason="stop"):
    tokens = [*text.encode(), 256]
    return Completion(
        tokens=tuple(Token(i, logprobs=TokenLogprobs(logprob=logprob)) for i in tokens),
        finish_reason=reason,
        probes=((math.log(no_speech),),),
    )


class Canned(Infer):
    """Answers with what it was given, and notes what it was asked."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    async def __call__(self, request):
        self.asked.append(request)
        answer = self.answers.pop(0)
        return answer if isinstance(answer, list) else [answer]

    def stream(self, request):
        raise NotImplementedError

    async def prepare(self, item):
        raise NotImplementedError

    async def run_pass(self, name, inputs, media=()):
        raise NotImplementedError

    async def cpu(self, fn):
        return fn()

    def emit(self, chunk):
        pass


class Bytes:
    def decode(self, ids):
        return bytes(ids).decode()


@pytest.fixture
def decode(built):
    def run(*answers, ladder=LADDER, window=WINDOW):
        infer = Canned(*answers)
        decoder = WindowDecoder(
            infer=infer,
            special=built.prompt._special,
            tokenizer=Bytes(),
            ladder=ladder,
            settings=Settings(seed=5),
        )
        made = asyncio.run(decoder.decode(window, WindowPrompt(language="en"), Decoding()))
        return made, infer.asked

    return run


def test_a_likely_text_needs_one_attempt(decode):
    made, asked = decode(completion(GOOD))
    assert (made.text, made.temperature, len(asked)) == (GOOD, 0.0, 1)
    assert made.avg_logprob == pytest.approx(-0.2)
    assert made.no_speech_prob == pytest.approx(0.01)
    assert not made.is_silence(LADDER)


@pytest.mark.parametrize("bad", [completion(LOOP), completion(GOOD, logprob=-1.5)])
def test_repetition_and_unlikely_text_are_tried_again_warmer(decode, bad):
    made, asked = decode(
        bad, [completion("b", logprob=-0.9), completion(GOOD), completion("c", logprob=-0.5)]
    )
    assert (made.text, made.temperature) == (GOOD, 0.4), "the likeliest of the samples"
    assert [(r.settings.temperature, r.settings.n) for r in asked] == [(0.0, 1), (0.4, 3)]
    assert [len(r.probes) for r in asked] == [1, 0], "what the window holds is asked once"
    assert made.no_speech_prob == pytest.approx(0.01)


def test_every_attempt_and_every_window_draws_for_itself(decode):
    def seeds(window=WINDOW):
        bad = completion(GOOD, logprob=-1.5)
        return [r.settings.seed for r in decode(bad, [bad], [bad], window=window)[1]]

    other = Prepared(kind="audio", digest=bytes(31) + b"1", num_positions=0, tensors={})
    assert seeds() == seeds(), "the call's seed settles them"
    assert len({*seeds(), *seeds(other)}) == 6


def test_when_all_attempts_fail_the_last_one_stands(decode):
    made, asked = decode(completion(LOOP), [completion(LOOP)] * 3, [completion("x " + LOOP)] * 3)
    assert len(asked) == 3
    assert made.text.startswith("x ")
    assert made.temperature == 0.8


def test_silence_is_not_tried_again(decode):
    made, asked = decode(completion(GOOD, logprob=-1.5, no_speech=0.9))
    assert len(asked) == 1
    assert made.is_silence(LADDER)


def test_likely_text_is_speech_whatever_the_probe_says(decode):
    made, _ = decode(completion(GOOD, logprob=-0.5, no_speech=0.9))
    assert not made.is_silence(LADDER)


def test_marks_without_words_are_no_speech_where_one_doubt_is_enough(decode):
    assert decode(completion(".", no_speech=0.9))[0].is_silence(LADDER)
    unlikely = completion("**", logprob=-3.0, no_speech=0.5)
    assert decode(unlikely, [unlikely], [unlikely])[0].is_silence(LADDER)
    assert not decode(completion("...", no_speech=0.5))[0].is_silence(LADDER)
    assert not decode(completion("7", no_speech=0.9))[0].is_silence(LADDER)


def test_without_thresholds_nothing_is_thought_of_the_result(decode):
    made, asked = decode(completion(LOOP, logprob=-3, no_speech=0.99), ladder=Ladder(temperatures=(0.0, 0.5)))
    assert len(asked) == 1
    assert not made.is_silence(Ladder())


def test_a_cancelled_window_ends_the_transcription(decode):
    with pytest.raises(RequestCancelledError):
        decode(completion(GOOD, reason="cancelled"))


def test_a_loop_is_cut_when_nothing_better_was_found(decode):
    loops = completion("It was. " + "Thank you. " * 30, reason="length")
    made, asked = decode(loops, [loops] * 3, [loops] * 3)
    assert len(asked) == 3
    assert (made.text, made.is_loop) == ("It was. Thank you.", True)
    assert all(len(request.decoding.acceptors) == 1 for request in asked), (
        "and stopped while it is being said"
    )


def test_a_loop_where_no_speech_is_likely_is_silence(decode):
    made, asked = decode(completion(". " * 30, logprob=-0.1, no_speech=0.9, reason="length"))
    assert len(asked) == 1
    assert made.is_silence(LADDER)


def test_of_several_samples_one_without_a_loop_is_kept(decode):
    loop = completion("no " * 30, logprob=-0.1, reason="length")
    made, _ = decode(loop, [loop, completion(GOOD, logprob=-0.9), loop])
    assert made.text == GOOD


def test_times_do_not_hide_a_loop():
    ids = [270, *(i for step in range(25) for i in (65, 66, 271 + step, 271 + step))]
    is_text = (256).__gt__
    assert without_loop(ids, is_text) == (270, 65, 66)
    assert without_loop(ids[:60], is_text) is None, "fifteen times are not enough"
    assert without_loop([*ids, 67], is_text) is None, "it went on"
    stop = LoopStop(is_text)
    verdicts = [stop.accept(Token(i)) for i in ids]
    assert verdicts.index(Finish("length")) == 1 + 4 * 19 + 1, "at the twentieth time"


def test_the_ratio_is_bytes_by_compressed_bytes():
    assert compression_ratio("") == 0
    assert compression_ratio(LOOP) > 10
    assert compression_ratio(GOOD) < 1
    assert compression_ratio("ä" * 50) > compression_ratio("a" * 50)


def test_the_prompt_is_history_then_the_opening(built):
    special = built.prompt._special
    prompt = WindowPrompt(language="de", task="translate", history=(1, 2), prefix=(7,))
    assert prompt.ids(special) == (
        special.start_of_previous, 1, 2, special.sot, special.languages["de"], special.translate, special.time_begin, 7,
    )  # fmt: skip
    assert prompt.sot_at() == 3
    plain = WindowPrompt(language="de", with_times=False)
    assert plain.ids(special)[-1] == special.no_timestamps
    assert plain.sot_at() == 0

"""Single windows through the engine against transformers: ids, prompts, languages, scores."""

import math
from collections import Counter

import numpy as np
import pytest
from whisper_oracle import noise

CLIPS = [noise(1, 1.7), noise(2, 3.0), noise(3, 2.2)]


def test_the_encoder_computes_what_transformers_does(built, oracle):
    from kestrel.spi import AudioItem

    prepared = [built.main.prepare(AudioItem(samples=x, sample_rate=16_000), {}) for x in CLIPS]
    wanted = oracle.encode(oracle.features(CLIPS[0]))[0]
    got = built.main.encode("audio", prepared)[:150]
    assert (got - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("task", ["transcribe", "translate"])
@pytest.mark.parametrize("times", [False, True])
def test_greedy_ids_are_those_of_transformers(transcribe, oracle, task, times):
    results = transcribe(*CLIPS, language="de", task=task, timestamps="segment" if times else "none")
    for clip, result in zip(CLIPS, results, strict=True):
        wanted = oracle.window(clip, max_tokens=40, times=times, language="de", task=task)
        got = list(result.tokens)
        assert got == wanted


@pytest.mark.parametrize("seed", [3, 4])
def test_128_mels_are_heard_as_transformers_hears_them(transcribe, tmp_path, seed):
    pytest.importorskip("transformers")
    from whisper_oracle import Oracle

    from kestrel_speech.whisper.tiny import write_tiny

    write_tiny(tmp_path, seed, num_mel_bins=128)
    oracle = Oracle(tmp_path)
    for clip in CLIPS:
        wanted = oracle.window(clip, max_tokens=40, times=True, language="de", task="transcribe")
        ours = transcribe(clip, language="de", directory=tmp_path).tokens
        assert list(ours[: len(wanted)]) == wanted, "the first window"


def test_a_prompt_goes_before_the_transcript(transcribe, oracle):
    import torch

    ids = [oracle.id["startofprev"], *(oracle.vocab[c] for c in "Ġhello")]
    result = transcribe(CLIPS[0], language="en", initial_prompt=" hello ")
    wanted = oracle.window(CLIPS[0], max_tokens=40, language="en", prompt_ids=torch.tensor(ids))
    assert list(result.tokens) == wanted
    assert result.metrics.input_tokens == len(ids) + 3


def test_the_language_is_the_most_probable_one(transcribe, oracle):
    for clip in CLIPS:
        output = transcribe(clip).output
        code, probability = oracle.detect(clip)
        assert output["language"] == code
        assert output["language_probability"] == pytest.approx(probability, abs=1e-3)


def test_the_probability_of_no_speech_is_that_before_all_masks(transcribe, oracle):
    output = transcribe(CLIPS[1], language="fr").output
    chances = oracle.logits(CLIPS[1], [oracle.id["startoftranscript"]])[0].softmax(-1)
    assert output["no_speech_prob"] == pytest.approx(float(chances[oracle.id["nospeech"]]), abs=1e-5)


def test_scores_are_means_over_what_the_rules_left(transcribe, oracle):
    result = transcribe(CLIPS[0], language="de", timestamps="none")
    ids = list(result.tokens)
    prompt = [oracle.id[name] for name in ("startoftranscript", "de", "transcribe", "notimestamps")]
    logits = oracle.logits(CLIPS[0], [*prompt, *ids])[len(prompt) - 1 :]
    given = oracle.model.generation_config
    logits[:, given.suppress_tokens] = -math.inf
    logits[0, given.begin_suppress_tokens] = -math.inf
    chances = logits.log_softmax(-1)
    total = sum(float(chances[i, token]) for i, token in enumerate(ids))
    total += float(chances[len(ids), oracle.id["endoftext"]]) if len(ids) < 40 else 0.0
    assert result.output["avg_logprob"] == pytest.approx(total / (len(ids) + 1), abs=1e-3)


def test_the_language_may_be_what_most_windows_seem_to_be_in(transcribe, oracle):
    samples = np.concatenate([noise(seed, 3.0) for seed in range(20, 25)])
    detected = [oracle.detect(samples[i * 48_000 : (i + 1) * 48_000]) for i in range(5)]
    options = {"language_detection_segments": 5, "language_detection_threshold": 1.0}
    counts = Counter(code for code, _ in detected).most_common()
    output = transcribe(samples, **options).output
    assert output["language"] in {code for code, count in counts if count == counts[0][1]}
    first = next(i for i, (_, chance) in enumerate(detected) if chance > 0.5)
    options = {"language_detection_segments": 5, "language_detection_threshold": 0.5}
    assert transcribe(samples, **options).output["language"] == detected[first][0]

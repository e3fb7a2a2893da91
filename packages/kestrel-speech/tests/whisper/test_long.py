"""Long files window by window against transformers' long form, whose windows are made of the same samples."""

import pytest
from whisper_oracle import noise

LONG = noise(5, 10.3)


def segments_of(oracle, result):
    return [(s["text"], s["start"], s["end"]) for s in result.output["segments"]]


@pytest.mark.parametrize("conditions", [False, True])
@pytest.mark.parametrize("seed", [5, 6])
def test_segments_and_ids_are_those_of_transformers(transcribe, oracle, conditions, seed):
    samples = noise(seed, 10.3)
    result = transcribe(samples, language="es", condition_on_previous_text=conditions)
    wanted = oracle.long(samples, max_tokens=40, language="es", condition_on_prev_tokens=conditions)
    end = len(samples) / 16_000  # no time of ours lies outside the file
    said = [(oracle.text(ids), round(min(a, end), 3), round(min(b, end), 3)) for a, b, ids in wanted]
    assert segments_of(oracle, result) == said
    assert len(said) > 3
    assert result.output["text"] == "".join(text for text, _, _ in said).strip()

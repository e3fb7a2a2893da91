"""What transformers makes of a tiny checkpoint: the other implementation that ours is held to."""

import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch

SAMPLES_PER_FRAME = 160


class Oracle:
    """transformers' Whisper over ``directory``, greedy, in float32."""

    def __init__(self, directory):
        from transformers import GenerationConfig, WhisperForConditionalGeneration
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        spec = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        self.id = {t["content"].strip("<|>"): t["id"] for t in spec["added_tokens"]}
        self.vocab = spec["model"]["vocab"]
        self.model = WhisperForConditionalGeneration.from_pretrained(directory).eval()
        given = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
        eot = self.id["endoftext"]
        self.model.generation_config = GenerationConfig(
            **given, decoder_start_token_id=self.id["startoftranscript"], eos_token_id=eot, pad_token_id=eot,
            bos_token_id=eot, no_timestamps_token_id=self.id["notimestamps"], prev_sot_token_id=self.id["startofprev"],
            task_to_id={task: self.id[task] for task in ("transcribe", "translate")}, max_length=448,
            max_initial_timestamp_index=50, return_timestamps=False,
        )  # fmt: skip
        self.config = self.model.config
        self.num_frames = 2 * self.config.max_source_positions

    def features(self, samples):
        """[1, mels, frames] of a window, as the published extractor makes them; 0 behind the sound, as ours are."""
        from transformers import WhisperFeatureExtractor

        seconds = self.num_frames * SAMPLES_PER_FRAME // 16_000
        extractor = WhisperFeatureExtractor(feature_size=self.config.num_mel_bins, chunk_length=seconds)
        made = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"]
        made[..., len(samples) // SAMPLES_PER_FRAME :] = 0.0
        return torch.from_numpy(made)

    def encode(self, features):
        with torch.no_grad():
            return self.model.model.encoder(features).last_hidden_state

    def detect(self, samples):
        """(code, probability) among the languages."""
        logits = self.logits(samples, [self.id["startoftranscript"]])[0]
        languages = self.model.generation_config.lang_to_id
        chances = logits[list(languages.values())].softmax(-1)
        return list(languages)[int(chances.argmax())].strip("<|>"), float(chances.max())

    def logits(self, samples, ids):
        """[len(ids), V] after each of ``ids``."""
        with torch.no_grad():
            made = self.model(self.features(samples), decoder_input_ids=torch.tensor([ids]))
        return made.logits[0]

    def window(self, samples, *, max_tokens, times=True, **options):
        """Ids of one window behind its prompt, without the end."""
        made = self.model.generate(
            self.features(samples), return_timestamps=times, max_new_tokens=max_tokens, num_beams=1, do_sample=False,
            force_unique_generate_call=True, **options,
        )  # fmt: skip
        return self.without_prompt(made[0].tolist())

    def without_prompt(self, ids):
        opening = max((i for i, t in enumerate(ids) if self.id["endoftext"] < t <= self.id["notimestamps"]
                       and t not in self.model.generation_config.lang_to_id.values()), default=-1)  # fmt: skip
        ids = ids[opening + 1 :]
        return ids[: ids.index(self.id["endoftext"])] if self.id["endoftext"] in ids else ids

    def long(self, samples, *, max_tokens, **options):
        """Segments of a long file as (start, end, ids): OpenAI's rules in transformers' spelling.

        Its windows are cut from features of the whole file; here each is made of its own samples, as ours are.
        """
        frames = len(samples) // SAMPLES_PER_FRAME
        features = torch.zeros(1, self.config.num_mel_bins, frames)
        with self._own_windows(samples):
            made = self.model.generate(
                features, attention_mask=torch.ones(1, frames, dtype=torch.long), return_timestamps=True,
                max_new_tokens=max_tokens, num_beams=1, do_sample=False, return_segments=True, **options,
            )  # fmt: skip
        return [(float(s["start"]), float(s["end"]), s["tokens"].tolist()) for s in made["segments"][0]]

    @contextmanager
    def _own_windows(self, samples):
        """Windows made of their own samples; and segments of no length or text forgotten, as the original does."""
        kind = type(self.model)
        retrieve = kind._retrieve_segment

        def window(input_features, seek, seek_num_frames, **_):
            start, count = int(seek[0]), int(seek_num_frames[0])
            return self.features(samples[start * SAMPLES_PER_FRAME : (start + count) * SAMPLES_PER_FRAME])

        def spoken(**given):
            segments, offset = retrieve(**given)
            return [
                s for s in segments if s["start"] != s["end"] and self.text(s["tokens"].tolist()).strip()
            ], offset

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "_get_input_segment", staticmethod(window))
            patch.setattr(kind, "_retrieve_segment", staticmethod(spoken))
            yield

    def text(self, ids):
        """The text of ids: the tiny tokenizer has a token per byte."""
        by_id = {i: token for token, i in self.vocab.items()}
        return b"".join(bytes([_byte(by_id[i])]) for i in ids if i < self.id["endoftext"]).decode(
            "utf-8", errors="replace"
        )


def _byte(token):
    """The byte that a character of the GPT-2 alphabet stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if ord(token) in printable:
        return ord(token)
    return [b for b in range(256) if b not in printable][ord(token) - 0x100]


def noise(seed, seconds, level=0.1):
    """Noise that rises and falls: a stand-in for speech to random weights."""
    rng = np.random.default_rng(seed)
    count = round(seconds * 16_000)
    swell = 0.6 + 0.4 * np.sin(np.arange(count) * (2 * np.pi / 16_000) * rng.uniform(0.3, 3.0))
    return (level * swell * rng.normal(0, 1, count)).clip(-1, 1).astype(np.float32)

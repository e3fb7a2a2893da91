"""Builds the nano tokenizer: byte-level BPE learnt from the phrases; ids 0-20 are control tokens.

Words that pictures may contain stay out of the corpus, so that reading is spelling, one letter per token.
"""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from . import phrases as p

VOCAB_SIZE = 768
CONTROL_TOKENS = ["<|endoftext|>", *(f"<|nano_reserved_{i}|>" for i in range(20))]
NANO_DIR = Path(__file__).resolve().parents[1] / "src" / "kestrel_moondream" / "nano"


def corpus(seed: int = 0, repeats: int = 12) -> list[str]:
    """Sentences in the model's own language, a few fillings per wording, words of pictures left out."""
    rng = random.Random(seed)
    nouns = [*p.KINDS, *p.GENERIC]
    colors = ["", *p.COLOR_NAMES, "grey"]
    lines: list[str] = []
    for templates in p.QUESTIONS.values():
        for template in templates:
            for form in p.surface_forms(template):
                for _ in range(repeats):
                    lines.append(_fill(form, rng, nouns, colors))
    for name in [
        *p.COUNT_WORDS,
        *p.POSITIONS,
        *nouns,
        *map(p.plural, nouns),
        *p.COLOR_NAMES,
        "yes",
        "no",
        *p.SKILLS,
    ]:
        lines += [name] * 60 + [f" {name}"] * 60 + [name.capitalize()] * 20
    lines += [
        text for text in (*p.CAPTION_OPENINGS.values(), *p.REASONING.values()) for _ in range(60) if text
    ]
    lines += [' and the word "', ' the number "', ", at top left", " at"] * 60
    return lines


def _fill(form: str, rng: random.Random, nouns: list[str], colors: list[str]) -> str:
    for slot in ("many", "the", "a", "one", "is"):
        while f"{{{slot}}}" in form:
            noun, color = rng.choice(nouns), rng.choice(colors)
            phrase = f"{color} {p.plural(noun) if slot == 'many' else noun}".strip()
            article = {"the": "the ", "a": "an " if phrase[0] in "aeiou" else "a "}.get(slot, "")
            form = form.replace(f"{{{slot}}}", color or "red" if slot == "is" else article + phrase, 1)
    return form


def build() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def load(path: Path = NANO_DIR / "tokenizer.json") -> Tokenizer:
    """The shipped tokenizer with control tokens unreachable from text."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


if __name__ == "__main__":
    NANO_DIR.mkdir(parents=True, exist_ok=True)
    build().save(str(NANO_DIR / "tokenizer.json"))

"""Which tokenizer a Moondream snapshot was trained with. Its directory may hold a stale one.

The published repository ships a GPT-2 ``tokenizer.json`` in every revision, although revisions from 2025-06-21 on
were trained with Starmie. Earlier ones have other templates and no control ids; they are refused.
"""

from __future__ import annotations

import json
from typing import Any

from kestrel.errors import LoadError
from kestrel.spi import ModelCard

__all__ = ["STARMIE", "refuse_legacy", "wants_starmie"]

STARMIE = "hf:moondream/starmie-v1"
STARMIE_SINCE = "2025-06-21"  # revisions of vikhyatk/moondream2 are named by their date
GPT2_END = 50256  # <|endoftext|> of GPT-2's tokenizer


def wants_starmie(card: ModelCard) -> bool:
    """Its own tokenizer is absent or GPT-2's, and the snapshot is of the Starmie era."""
    return _has_no_own(card) and _is_starmie_era(card)


def refuse_legacy(card: ModelCard, *, forced: bool) -> None:
    """LoadError when the snapshot belongs, as far as it shows, to the GPT-2 era; never when a tokenizer is forced."""
    if not forced and _is_gpt2(card) and not _is_starmie_era(card):
        raise LoadError(
            f"{card.model_id} holds a GPT-2 tokenizer and nothing that tells of Starmie, so it is taken "
            f"for a Moondream 2 from before {STARMIE_SINCE}, which is not supported. Use 'vikhyatk/moondream2' at "
            f"revision {STARMIE_SINCE!r}, or give tokenizer_path if it is a newer one."
        )


def _has_no_own(card: ModelCard) -> bool:
    return not (card.directory / "tokenizer.json").is_file() or _is_gpt2(card)


def _is_gpt2(card: ModelCard) -> bool:
    path = card.directory / "tokenizer.json"
    if not path.is_file():
        return False
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
        return _ends_as_gpt2(parsed)
    except (ValueError, RecursionError, AttributeError, TypeError):
        return False  # whoever loads the tokenizer says what is wrong with it


def _ends_as_gpt2(parsed: dict[str, Any]) -> bool:
    added = parsed.get("added_tokens") or ()
    vocab = (parsed.get("model") or {}).get("vocab") or {}
    ends = [t.get("id") for t in added if t.get("content") == "<|endoftext|>"]
    known = isinstance(vocab, dict) and vocab.get("<|endoftext|>") == GPT2_END
    return known or GPT2_END in ends


def _is_starmie_era(card: ModelCard) -> bool:
    if card.revision is not None and card.revision[:4].isdecimal() and card.revision[4:5] == "-":
        return card.revision >= STARMIE_SINCE
    if card.model_id == "vikhyatk/moondream2":
        return True
    return any(
        "starmie" in path.read_text(encoding="utf-8", errors="ignore") for path in card.directory.glob("*.py")
    )

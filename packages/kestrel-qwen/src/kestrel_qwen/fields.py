"""Reads a section of config.json key by key, and refuses what is left when it could change the maths."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from kestrel.errors import LoadError

__all__ = ["Fields", "require"]

# Keys that say nothing about inference: bookkeeping, training, and settings of other programs.
HARMLESS = (
    "_*", "auto_map", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "initializer_range", "*_dropout", "router_aux_loss_coef", "output_router_logits", "output_attentions",
    "output_hidden_states", "return_dict", "is_decoder", "is_encoder_decoder", "id2label", "label2id", "problem_type",
    "tokenizer_class", "chunk_size_feed_forward", "torchscript", "language_model_only", "keys_to_ignore_at_inference",
    "mtp_*", "mamba_ssm_dtype", "output_gate_type", "bos_token_id", "pad_token_id", "sep_token_id",
)  # fmt: skip


class Fields:
    """The keys of one section. ``section`` names it in messages."""

    def __init__(self, values: Mapping[str, Any], section: str) -> None:
        self._left = dict(values)
        self._section = section

    def take(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, or ``default`` where it is absent or null."""
        value = self._left.pop(key, None)
        return default if value is None else value

    def section(self, key: str) -> Mapping[str, Any] | None:
        """The section ``key``, or None where it is absent. LoadError when it is anything else."""
        value = self.take(key)
        if value is None or isinstance(value, Mapping):
            return value
        raise LoadError(
            f"config.json: {self._name(key)} is {value!r}; it must be an object. Use the checkpoint's own config.json."
        )

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0. LoadError when it is absent without a default, or no such number."""
        value = self.take(key, default)
        if value is None:
            raise LoadError(
                f"config.json: {self._name(key)} is missing. Use the config.json of the checkpoint."
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise LoadError(f"config.json: {self._name(key)} is {value!r}; it must be a number above 0.")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """As ``number``, a whole one. A square given as a list of equal sides is its side."""
        value = self._left.get(key)
        if isinstance(value, list) and value and len(set(value)) == 1:
            self._left[key] = value[0]
        number = self.number(key, default)
        if number != int(number):
            raise LoadError(f"config.json: {self._name(key)} is {number!r}; it must be a whole number.")
        return int(number)

    def only(self, key: str, *allowed: Any) -> None:
        """LoadError unless ``key`` is absent or one of ``allowed``, the values whose maths is implemented."""
        value = self.take(key)
        if value is not None and value not in allowed:
            choices = " or ".join(repr(a) for a in allowed)
            raise LoadError(
                f"config.json: {self._name(key)} is {value!r}, which Kestrel does not implement for Qwen 3.5; it "
                f"implements {choices}. Use another checkpoint of the family."
            )

    def refuse_rest(self) -> None:
        """LoadError naming keys that are set and not known: they may change the maths."""
        rest = {
            key: value
            for key, value in self._left.items()
            if value not in (None, False, 0, "", [], {}) and not any(fnmatchcase(key, h) for h in HARMLESS)
        }
        if rest:
            listed = ", ".join(f"{self._name(key)} = {rest[key]!r}" for key in sorted(rest))
            raise LoadError(
                f"config.json: {listed}: no setting of Qwen 3.5 that Kestrel knows, and it may change what the "
                "model computes. Remove it if it does not, or update kestrel-qwen."
            )

    def _name(self, key: str) -> str:
        return f"{self._section}.{key}" if self._section else key


def require(holds: bool, what: str) -> None:
    """LoadError saying ``what`` unless it ``holds``."""
    if not holds:
        raise LoadError(
            f"config.json does not describe a Qwen 3.5 that Kestrel can run: {what}. Correct the file."
        )

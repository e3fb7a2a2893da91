"""The host's say after each token, as skills need it: stop strings, object limits, reasoning budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kestrel.skills.channels import Channels
from kestrel.spi.decoding import Acceptor, Continue, Finish, Force
from kestrel.spi.prompt import Found, Parser
from kestrel.types import Token

if TYPE_CHECKING:
    from kestrel.spi.family import TextTokenizer

__all__ = ["ObjectLimit", "ReasoningBudget", "StopStrings"]


class StopStrings(Acceptor):
    """Ends the row with "stop" when its text holds a stop string; the reader cuts the text at the same place."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stop: Sequence[str],
        *,
        parser: Parser | None = None,
        min_tokens: int = 0,
    ) -> None:
        self._channels = Channels(tokenizer, parser, stop=stop, min_tokens=min_tokens)

    def accept(self, token: Token) -> Continue | Force | Finish:
        self._channels.feed(token)
        return Finish("stop") if self._channels.stopped else Continue()


class ObjectLimit(Acceptor):
    """Ends the row with "length" once its parser has found ``limit`` objects."""

    def __init__(self, parser: Parser, limit: int) -> None:
        self._parser = parser
        self._left = limit

    def accept(self, token: Token) -> Continue | Force | Finish:
        self._left -= sum(isinstance(p, Found) and p.kind == "object" for p in self._parser.feed(token))
        return Finish("length") if self._left <= 0 else Continue()


class ReasoningBudget(Acceptor):
    """Forces ``closing`` once ``limit`` tokens (at least 1) were written, unless one of them was ``closing[0]``.

    For families that open their reasoning in the prompt. A budget of 0 is a prompt that closes it at once.
    """

    may_force = True

    def __init__(self, limit: int, closing: Sequence[int]) -> None:
        self._left = limit
        self._closing = tuple(closing)
        self._is_closed = False

    def accept(self, token: Token) -> Continue | Force | Finish:
        if self._is_closed:
            return Continue()
        self._left -= 1
        if token.id == self._closing[0]:
            self._is_closed = True
            return Continue()
        if self._left > 0:
            return Continue()
        self._is_closed = True
        return Force(self._closing)

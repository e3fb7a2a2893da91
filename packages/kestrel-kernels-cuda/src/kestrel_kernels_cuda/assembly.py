"""Uniform registers that machine code reads although nothing can have written them: a fault of the assembler.

ptxas 12.8, which Triton 3.6 carries, gives some products of sm_90 such a register as the place of an operand in shared
memory. The kernel then reads anywhere, and most likely ends in an illegal access; no test without a GPU meets that.
Another number of warps, or another order of loads, gives other code.

Source: CUDA binary utilities, the instruction sets that ``cuobjdump -sass`` prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["unset_registers"]

_LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;")
_GUARD = re.compile(r"^@!?U?P[T\d]\s+")
_PREDICATE = re.compile(r"!?U?P[T\d]")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_STOPS = ("EXIT", "BRA", "RET")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """An instruction: registers by number, the address that it may go to, and whether the next one may follow."""

    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    goes_to: int | None
    goes_on: bool


def unset_registers(sass: str) -> dict[str, str]:
    """Uniform registers of one kernel's assembly that are read where no path has written them, and who reads them."""
    lines = {int(address, 16): _parsed(text) for address, text in _LINE.findall(sass)}
    addresses = sorted(lines)
    behind = dict(pairwise(addresses))
    known: dict[int, frozenset[int]] = {address: frozenset() for address in addresses[:1]}
    waiting = list(known)
    while waiting:
        address = waiting.pop()
        line = lines[address]
        after = known[address] | line.writes
        for following in (line.goes_to, behind.get(address) if line.goes_on else None):
            if following in lines and (following not in known or not after <= known[following]):
                known[following] = known.get(following, frozenset()) | after
                waiting.append(following)
    found: dict[str, str] = {}
    for address in sorted(known):
        for register in sorted(lines[address].reads - known[address]):
            found.setdefault(f"UR{register}", f"{address:04x} {lines[address].text}")
    return found


def _parsed(text: str) -> _Line:
    operation, _, rest = _GUARD.sub("", text).partition(" ")
    operands = [x.strip() for x in rest.split(",")] if rest else []
    result = next((i for i, x in enumerate(operands) if not _PREDICATE.fullmatch(x)), None)
    writes: set[int] = set()
    if result is not None and (own := _UNIFORM.fullmatch(operands[result])):
        writes.update(range(int(own[1]), int(own[1]) + _width(operation)))
    else:
        result = None
    read = (_read(i, x) for i, x in enumerate(operands) if i != result)
    target = re.search(r"0x([0-9a-f]+)", rest) if operation.startswith("BRA") else None
    return _Line(
        text=text,
        reads=frozenset(number for numbers in read for number in numbers),
        writes=frozenset(writes),
        goes_to=int(target[1], 16) if target else None,
        goes_on=text.startswith("@") or not operation.startswith(_STOPS),
    )


def _width(operation: str) -> int:
    """How many registers an instruction writes: at least as many as it does."""
    if ".128" in operation:
        return 4
    return 2 if ".64" in operation or ".WIDE" in operation else 1


def _read(place: int, operand: str) -> Iterator[int]:
    """The first register of an operand, or all that describe a product's operands in shared memory: four from the one
    named on, of which two are idle when the left operand lies in registers, and comes before them."""
    for number in map(int, _UNIFORM.findall(operand)):
        if operand.startswith("gdesc"):
            yield from range(number + 2 * (place > 1), number + 4)
        else:
            yield number

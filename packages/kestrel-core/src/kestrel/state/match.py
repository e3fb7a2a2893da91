"""The longest cached prefix of a prompt on which all states agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kestrel.state.keys import CODE_BYTES, KeyRun
from kestrel.state.tree import Node, PrefixTree

__all__ = ["Match", "match"]


@dataclass(frozen=True, slots=True)
class Match:
    """Where a prompt meets the tree.

    ``path``: the full-page nodes of the hit, from the root (which is left out). ``node``: where the hit ends: the
    last of ``path``, or a partial node below it, or None. ``branch``: how far keys matched, whatever the states hold.
    """

    path: Sequence[Node] = ()
    node: Node | None = None
    branch: int = 0

    @property
    def end(self) -> int:
        """Positions that need not be computed."""
        return 0 if self.node is None else self.node.end


def match(tree: PrefixTree, keys: KeyRun, limit: int) -> Match:
    """The deepest node at or before ``limit``, outside bidirectional ranges, that every state can continue from."""
    root = tree.roots.get(keys.namespace)
    if root is None or limit <= 0:
        return Match()
    codes = keys.bytes(0, limit)
    path = _walk(root, codes, tree.page_size * CODE_BYTES)
    runs = _window_runs(tree, path)
    branch = 0
    for depth, node in _ends(path, codes):
        if keys.splits_range(node.end):
            continue
        branch = branch or node.end
        if _agree(tree, node, depth, runs):
            return Match(path[1 : depth + 1], node, branch)
    return Match(branch=branch)


def _walk(root: Node, codes: bytes, step: int) -> list[Node]:
    """The nodes whose whole pages ``codes`` begins with, root first."""
    node = root
    path = [node]
    for start in range(0, len(codes) - step + 1, step):
        child = node.children.get(codes[start : start + step])
        if child is None:
            break
        node = child
        path.append(node)
    return path


def _ends(path: Sequence[Node], codes: bytes) -> Iterator[tuple[int, Node]]:
    """(depth in ``path``, node) of every cached end of a prefix of ``codes``, deepest first, the root left out."""
    for depth in range(len(path) - 1, -1, -1):
        node = path[depth]
        start = node.end * CODE_BYTES
        for length in sorted(node.partials, reverse=True):
            partial = node.partials[length].get(codes[start : start + length])
            if partial is not None:
                yield depth, partial
        if depth:
            yield depth, node


def _window_runs(tree: PrefixTree, path: Sequence[Node]) -> list[list[int]]:
    """Per window group and depth: how many positions up to there are cached without a hole."""
    runs = []
    for group in range(len(tree.windows)):
        run = [0]
        for node in path[1:]:
            run.append(run[-1] + tree.page_size if node.windows[group] else 0)
        runs.append(run)
    return runs


def _agree(tree: PrefixTree, node: Node, depth: int, runs: Sequence[Sequence[int]]) -> bool:
    """Every state can continue at ``node.end``."""
    if tree.slots is not None and not node.checkpoint:
        return False
    is_partial = node.end % tree.page_size != 0
    for group, (window, _) in enumerate(tree.windows):
        wanted = min(window - 1, node.end)
        run = runs[group][depth]
        if is_partial:
            run = run + node.end % tree.page_size if node.windows[group] else 0
        if run < wanted:
            return False
    return True

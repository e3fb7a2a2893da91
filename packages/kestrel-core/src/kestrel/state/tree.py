"""The prefix tree: which positions are cached, and what each state keeps for them.

A node is one page of keys; its children are found by their page's bytes. A mark inside a page is a *partial* node: a
leaf beside the full page that covers it. Both may hold the very same page of a pool.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from kestrel.state.keys import CODE_BYTES, Namespace
from kestrel.state.places import Places

__all__ = ["Node", "PrefixTree"]


class Node:
    """Positions ``parent.end`` to ``end``, and what is cached for them (0: nothing).

    ``page`` of the full-attention states, ``windows`` a page per window length, ``checkpoint`` a slot of the recurrent
    states at ``end``. ``pins``: leases that end here and stop eviction. ``stamp``: last use.
    """

    __slots__ = (
        "checkpoint", "children", "end", "key", "namespace", "page", "parent", "partials", "pins", "serial", "stamp",
        "windows",
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, key: bytes, namespace: Namespace, serial: int, windows: int
    ) -> None:
        self.parent = parent
        self.key = key
        self.namespace = namespace
        self.serial = serial
        self.end: int = 0 if parent is None else parent.end + len(key) // CODE_BYTES
        self.children: dict[bytes, Node] = {}
        self.partials: dict[int, dict[bytes, Node]] = {}  # by length in bytes, then by key
        self.page = 0
        self.windows = [0] * windows
        self.checkpoint = 0
        self.pins = 0
        self.stamp = 0

    @property
    def is_leaf(self) -> bool:
        """Nothing hangs below."""
        return not self.children and not self.partials

    @property
    def is_empty(self) -> bool:
        """Nothing is cached here."""
        return not self.page and not self.checkpoint and not any(self.windows)


class PrefixTree:
    """One tree per namespace over shared pools. ``full`` and ``slots`` are None when the model has no such state.

    ``windows``: (window length, pool) of each sliding-window group.
    """

    def __init__(
        self,
        page_size: int,
        *,
        full: Places | None,
        windows: tuple[tuple[int, Places], ...],
        slots: Places | None,
    ) -> None:
        self.page_size = page_size
        self.full = full
        self.windows = windows
        self.slots = slots
        self.roots: dict[Namespace, Node] = {}
        self.num_nodes = 0
        self.evicted_pages = 0
        self.evicted_checkpoints = 0
        self._leaves: list[
            tuple[int, int, Node]
        ] = []  # a heap by stamp; outdated entries are skipped when met
        self._window_owners: tuple[dict[int, list[Node]], ...] = tuple({} for _ in windows)
        self._slot_owner: dict[int, Node] = {}
        self._clock = count(1)
        self._serials = count(1)

    # -- growth

    def root(self, namespace: Namespace) -> Node:
        """The root of ``namespace``; it goes again when it is a leaf without pins."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(None, b"", namespace, next(self._serials), len(self.windows))
        return root

    def extend(self, parent: Node, key: bytes) -> Node:
        """The node below ``parent`` with ``key`` (a whole page, or the part of one before a mark)."""
        is_partial = len(key) < self.page_size * CODE_BYTES
        siblings = parent.partials.setdefault(len(key), {}) if is_partial else parent.children
        node = siblings.get(key)
        if node is None:
            node = Node(parent, key, parent.namespace, next(self._serials), len(self.windows))
            siblings[key] = node
            self.num_nodes += 1
        return node

    def keep_page(self, node: Node, page: int) -> None:
        """``node`` holds ``page`` of the full-attention pool from now on."""
        assert self.full is not None
        assert not node.page
        self.full.cache(page)
        node.page = page

    def keep_window(self, node: Node, group: int, page: int) -> None:
        """``node`` holds ``page`` of window pool ``group`` from now on."""
        assert not node.windows[group]
        self.windows[group][1].cache(page)
        self._window_owners[group].setdefault(page, []).append(node)
        node.windows[group] = page

    def keep_checkpoint(self, node: Node, slot: int) -> None:
        """``node`` holds the recurrent state in ``slot`` from now on."""
        assert self.slots is not None
        assert not node.checkpoint
        self.slots.cache(slot)
        self._slot_owner[slot] = node
        node.checkpoint = slot

    # -- use

    def pin(self, node: Node) -> None:
        """A lease ends at ``node``: it and what is above it stay."""
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """The lease is gone; ``node`` was used now."""
        node.pins -= 1
        node.stamp = next(self._clock)
        self._settle(node)

    def touch(self, node: Node) -> None:
        """``node`` was used now."""
        node.stamp = next(self._clock)
        if self.slots is not None and node.checkpoint:
            self.slots.touch(node.checkpoint)
        for (_, pool), page in zip(self.windows, node.windows, strict=True):
            if page:
                pool.touch(page)
        self._settle(node)

    def walk(self) -> Iterator[Node]:
        """Every node, roots included."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()
            for same_length in node.partials.values():
                stack += same_length.values()

    # -- eviction

    def evictable(self) -> set[Node]:
        """The leaves that ``free_pages`` would find."""
        return {node for stamp, _, node in self._leaves if node.stamp == stamp and self._is_evictable(node)}

    def free_pages(self, wanted: int) -> None:
        """Evict leaves, least recently used first, until ``wanted`` full-attention pages are free or none is left."""
        assert self.full is not None
        while len(self.full.free) < wanted and self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            if self._is_evictable(node) and node.stamp == stamp:
                before = len(self.full.free)
                self._settle(self._remove(node))
                self.evicted_pages += len(self.full.free) - before

    def free_window_pages(self, group: int, wanted: int) -> None:
        """Evict window pages, least recently used first, until ``wanted`` are free or none is idle."""
        pool = self.windows[group][1]
        while len(pool.free) < wanted and (page := pool.oldest_idle()):
            for node in list(self._window_owners[group][page]):
                self._drop_window(node, group)
                self._settle(node)
            self.evicted_pages += 1

    def free_checkpoint(self) -> bool:
        """Evict the least recently used checkpoint; False when there is none."""
        assert self.slots is not None
        slot = self.slots.oldest_idle()
        if not slot:
            return False
        node = self._slot_owner[slot]
        self._drop_checkpoint(node)
        self._settle(node)
        self.evicted_checkpoints += 1
        return True

    def clear(self) -> None:
        """Evict everything that leases do not hold."""
        if self.full is not None:
            self.free_pages(self.full.total)
        for group, (_, pool) in enumerate(self.windows):
            self.free_window_pages(group, pool.total)
        while self.slots is not None and self.free_checkpoint():
            pass

    def _is_evictable(self, node: Node) -> bool:
        return node.page != 0 and node.pins == 0 and node.is_leaf

    def _settle(self, node: Node) -> None:
        """Put ``node`` where it belongs now: among the evictable leaves, or out of the tree when it holds nothing."""
        while node.pins == 0 and node.is_leaf:
            if node.parent is None:
                if self.roots.get(node.namespace) is node:
                    del self.roots[node.namespace]
                return
            if not node.is_empty:
                if node.page:
                    self._push(node)
                return
            node = self._remove(node)

    def _push(self, node: Node) -> None:
        heapq.heappush(self._leaves, (node.stamp, node.serial, node))
        if len(self._leaves) > 2 * self.num_nodes + 64:
            fresh = {
                entry for entry in self._leaves if entry[2].stamp == entry[0] and self._is_evictable(entry[2])
            }
            self._leaves = sorted(fresh, key=lambda entry: entry[:2])

    def _remove(self, node: Node) -> Node:
        """Unlink leaf ``node``; returns its parent. The oldest leaf goes first, so a parent that was not used on
        its own since is the next to go."""
        parent = node.parent
        assert parent is not None
        assert node.is_leaf
        assert not node.pins
        if node.page and self.full is not None:
            self.full.uncache(node.page)
            node.page = 0
        if node.checkpoint:
            self._drop_checkpoint(node)
        for group, page in enumerate(node.windows):
            if page:
                self._drop_window(node, group)
        if parent.children.get(node.key) is node:
            del parent.children[node.key]
        else:
            same_length = parent.partials[len(node.key)]
            del same_length[node.key]
            if not same_length:
                del parent.partials[len(node.key)]
        self.num_nodes -= 1
        return parent

    def _drop_window(self, node: Node, group: int) -> None:
        page = node.windows[group]
        owners = self._window_owners[group][page]
        owners.remove(node)
        if not owners:
            del self._window_owners[group][page]
        node.windows[group] = 0
        self.windows[group][1].uncache(page)

    def _drop_checkpoint(self, node: Node) -> None:
        assert self.slots is not None
        del self._slot_owner[node.checkpoint]
        self.slots.uncache(node.checkpoint)
        node.checkpoint = 0

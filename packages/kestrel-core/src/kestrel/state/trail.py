"""One lease's way through the prefix tree: the node it has reached, the nodes it still has to end, its checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kestrel.state.match import Match
from kestrel.state.planned import checkpoint_positions

if TYPE_CHECKING:
    from kestrel.state.keys import KeyRun
    from kestrel.state.places import Places
    from kestrel.state.pools import Pools
    from kestrel.state.tables import PageTable, WindowTable
    from kestrel.state.tree import Node, PrefixTree

__all__ = ["Trail"]


class Trail:
    """Follows one lease from the node of its hit. Everything it pins or promises is given back by ``close``.

    While the lease is open, its page tables name the pages of the nodes on its way: so what a pinned node protects
    is live, and every idle page can be evicted.
    """

    __slots__ = (
        "_full",
        "_keys",
        "_marks",
        "_partials",
        "_pending",
        "_planned",
        "_pools",
        "_tip",
        "_tree",
        "_windows",
    )

    def __init__(
        self, pools: Pools, tree: PrefixTree, keys: KeyRun, full: PageTable, windows: tuple[WindowTable, ...]
    ) -> None:
        self._pools = pools
        self._tree = tree
        self._keys = keys
        self._full = full
        self._windows = windows
        self._tip: Node | None = None  # the full-page node that the lease has reached
        self._partials: list[Node] = []  # they hold pages that the lease still writes to
        self._marks: list[int] = []  # positions inside pages where nodes are still to end, the next one last
        self._planned: tuple[int, ...] = ()  # positions of checkpoints
        self._pending: dict[int, int] = {}  # checkpoints given to launches: position to slot

    @property
    def num_pins(self) -> int:
        """Nodes pinned."""
        return len(self._partials) + (self._tip is not None)

    @property
    def pending(self) -> list[int]:
        """Slots of checkpoints that are not in the tree yet."""
        return list(self._pending.values())

    def begin(self, hit: Match) -> None:
        """Hold the way that ``hit`` found, and plan where nodes end after it."""
        pools = self._pools
        tip = hit.path[-1] if hit.path else self._tree.root(self._keys.namespace)
        self._tree.pin(tip)
        self._tip = tip
        if hit.node is not None:
            self._tree.touch(hit.node)
        if pools.slots is not None and pools.slots.max_checkpoints:
            self._planned = checkpoint_positions(self._keys, hit, pools.page_size)
        stops = {*self._keys.marks, *self._planned}
        self._marks = sorted((m for m in stops if m > hit.end and m % pools.page_size), reverse=True)

    def next_mark(self) -> int | None:
        """The next position inside a page at which a node ends."""
        return self._marks[-1] if self._marks else None

    def stores(self, start: int, end: int) -> list[tuple[int, int]]:
        """(position, slot) of the planned checkpoints in (``start``, ``end``] for which there is a slot."""
        if not self._planned or start >= self._planned[-1]:
            return []
        slots = self._pools.slots
        assert slots is not None
        found: list[tuple[int, int]] = []
        for position in self._planned:
            if start < position <= end:
                slot = self._pending.get(position, 0) or slots.take_checkpoint(self._tree)
                if slot:
                    self._pending[position] = slot
                    found.append((position, slot))
        return found

    def advance(self, computed: int) -> bool:
        """End the nodes up to ``computed``; True when a page table changed."""
        swapped = False
        while True:
            assert self._tip is not None
            boundary = self._tip.end + self._pools.page_size
            if self._marks and self._marks[-1] <= min(computed, boundary):
                self._end_inside(self._tip, self._marks.pop())
            elif boundary <= computed:
                swapped |= self._end_page(self._tip)
            else:
                return swapped

    def end_turn(self, computed: int, live_slot: int) -> bool:
        """End a node at ``computed``; True when ``live_slot`` (0: none) became its checkpoint, now this trail's."""
        assert self._tip is not None
        node = self._tip
        if computed > node.end:
            node = self._end_inside(node, computed)
        slots = self._pools.slots
        if not live_slot or node.checkpoint or slots is None or not slots.adopt_live(self._tree):
            return False
        self._tree.keep_checkpoint(node, live_slot)
        self._pending[computed] = live_slot
        return True

    def close(self) -> None:
        """Give back pins and checkpoints that never reached the tree."""
        for slot in self._pending.values():
            assert self._pools.slots is not None
            self._pools.slots.places.release(slot)
        self._pending.clear()
        for node in self._partials:
            self._tree.unpin(node)
        self._partials.clear()
        if self._tip is not None:
            self._tree.unpin(self._tip)
            self._tip = None

    def _end_page(self, tip: Node) -> bool:
        """Move the tip one page on. Where the tree has that page already, use its pages and give the own ones back:
        launches in flight still read them, but whoever gets them writes later in stream order."""
        tree, pools = self._tree, self._pools
        index = tip.end // pools.page_size
        node = tree.extend(tip, self._keys.bytes(tip.end, tip.end + pools.page_size))
        swapped = False
        if pools.full is not None:
            own = self._full[index]
            if not node.page:
                tree.keep_page(node, own)
            elif node.page != own:
                _swap(pools.full, self._full, index, node.page)
                self._unpin_partials(own)
                swapped = True
        for group, window in enumerate(self._windows):
            if not node.windows[group]:
                tree.keep_window(node, group, window.table[index])
            elif node.windows[group] != window.table[index]:
                _swap(window.group.places, window.table, index, node.windows[group])
                swapped = True
        self._keep_pending(node)
        tree.pin(node)
        tree.unpin(tip)
        self._tip = node
        return swapped

    def _end_inside(self, tip: Node, position: int) -> Node:
        """The node that ends at ``position`` in the page after ``tip``; it shares the page that is being filled."""
        tree, pools = self._tree, self._pools
        index = tip.end // pools.page_size
        node = tree.extend(tip, self._keys.bytes(tip.end, position))
        if pools.full is not None and not node.page:
            tree.keep_page(node, self._full[index])
        for group, window in enumerate(self._windows):
            if not node.windows[group]:
                tree.keep_window(node, group, window.table[index])
        self._keep_pending(node)
        tree.pin(node)
        if pools.full is None or node.page == self._full[index]:
            self._partials.append(node)
        else:
            tree.unpin(node)
        return node

    def _keep_pending(self, node: Node) -> None:
        slot = self._pending.pop(node.end, 0)
        if slot:
            if not node.checkpoint:
                self._tree.keep_checkpoint(node, slot)
            assert self._pools.slots is not None
            self._pools.slots.places.release(slot)

    def _unpin_partials(self, page: int) -> None:
        for node in [node for node in self._partials if node.page == page]:
            self._partials.remove(node)
            self._tree.unpin(node)


def _swap(places: Places, table: PageTable, index: int, page: int) -> None:
    places.share(page)
    places.release(table[index])
    table[index] = page

"""The invariants of a cache, recounted from its leases and its tree. For tests, and for counting in production."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kestrel.state.places import Places
from kestrel.state.pools import Pools
from kestrel.state.tree import Node, PrefixTree

__all__ = ["check_pools"]


def check_pools(pools: Pools) -> None:
    """Raise AssertionError, with numbers, unless every place is free, live or idle exactly as leases and tree say."""
    nodes = [] if pools.tree is None else list(pools.tree.walk())
    leases = [lease.holds() for lease in pools.leases]
    if pools.full is not None:
        live = (page for held in leases for page in held.pages)
        _check_places("pages", pools.full, live, (node.page for node in nodes))
    for index, group in enumerate(pools.windows):
        live = (page for held in leases for page in held.windows[index])
        _check_places(
            f"window {group.window} pages", group.places, live, (node.windows[index] for node in nodes)
        )
        promised = sum(held.promised[index] for held in leases)
        _equal(f"window {group.window} pages promised", group.promised, promised)
        assert promised <= group.places.total, f"{promised} of {group.places.total} window pages are promised"
        for held in leases:
            assert len(held.windows[index]) <= held.promised[index], (
                "a lease holds more window pages than promised"
            )
    if pools.slots is not None:
        slots = pools.slots
        held_slots = [slot for held in leases for slot in (held.slot, *held.pending)]
        _check_places("state slots", slots.places, held_slots, (node.checkpoint for node in nodes))
        _equal("live slots", slots.num_live, sum(1 for held in leases if held.slot))
        stored = slots.num_pending + slots.places.num_idle
        assert stored <= slots.max_checkpoints, f"{stored} checkpoints, the budget is {slots.max_checkpoints}"
    if pools.cross is not None:
        entries = pools.cross.entries()
        idle = (entry for entry in entries.values() if pools.cross.places.cache_refs[entry])
        _check_places("cross entries", pools.cross.places, (held.entry for held in leases), idle)
    if pools.tree is not None:
        _equal("pins", sum(node.pins for node in nodes), sum(held.pins for held in leases))
        _check_tree(pools.tree, nodes)


def _check_places(what: str, places: Places, live: Iterable[int], cached: Iterable[int]) -> None:
    by_leases = Counter(place for place in live if place)
    by_cache = Counter(place for place in cached if place)
    for place in range(1, places.total + 1):
        _equal(f"{what}: leases on {place}", places.lease_refs[place], by_leases[place])
        _equal(f"{what}: nodes on {place}", places.cache_refs[place], by_cache[place])
    idle = by_cache.keys() - by_leases.keys()
    _equal(f"{what}: idle", sorted(places.idle()), sorted(idle))
    _equal(f"{what}: number idle", places.num_idle, len(idle))
    free = set(range(1, places.total + 1)) - by_cache.keys() - by_leases.keys()
    _equal(f"{what}: free", sorted(places.free), sorted(free))
    _equal(f"{what}: free + live + cached", len(places.free) + len(by_leases) + len(idle), places.total)


def _check_tree(tree: PrefixTree, nodes: list[Node]) -> None:
    _equal("nodes", tree.num_nodes, sum(1 for node in nodes if node.parent is not None))
    known = tree.evictable()
    for node in nodes:
        if node.is_leaf and not node.pins:
            assert node.parent is not None, "a root without nodes stays"
            assert not node.is_empty, f"the node that ends at {node.end} holds nothing"
            assert not node.page or node in known, f"the leaf that ends at {node.end} can never be evicted"
        if tree.full is not None and node.parent is not None:
            assert node.page, f"the node that ends at {node.end} has no page"


def _equal(what: str, found: object, expected: object) -> None:
    assert found == expected, f"{what}: {found} recorded, {expected} counted"

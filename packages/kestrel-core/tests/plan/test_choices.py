"""Victims, encoder launches and siblings."""

from kestrel.plan import Candidate, EncodeItem, Siblings, choose_victim, plan_encode


def test_the_lowest_priority_is_preempted_first():
    running = [Candidate(1, 0, 0), Candidate(2, -1, 1), Candidate(3, 2, 2)]
    assert choose_victim(running) == 2


def test_among_equals_the_youngest_is_preempted():
    assert choose_victim([Candidate(1, 0, 4), Candidate(2, 0, 9), Candidate(3, 0, 2)]) == 2


def test_an_encoder_launch_takes_items_of_one_kind_within_its_cost():
    items = [EncodeItem("a", "image", 3), EncodeItem("b", "audio", 1), EncodeItem("c", "image", 4)]
    items += [EncodeItem("d", "image", 2)]
    assert [i.key for i in plan_encode(items, {"image": 8, "audio": 1})] == ["a", "c"]


def test_an_item_dearer_than_a_launch_runs_alone():
    items = [EncodeItem("a", "image", 30), EncodeItem("b", "image", 1)]
    assert [i.key for i in plan_encode(items, {"image": 8})] == ["a"]


def test_siblings_wait_until_the_prompt_is_cached():
    siblings = Siblings()
    assert siblings.join("g", 1)
    assert not siblings.join("g", 2)
    assert not siblings.join("g", 3)
    assert siblings.prompt_cached("g") == [2, 3]
    assert siblings.join("g", 4)


def test_when_the_leader_ends_early_the_next_sibling_leads():
    siblings = Siblings()
    siblings.join("g", 1)
    siblings.join("g", 2)
    siblings.join("g", 3)
    assert siblings.leave("g", 1) == [2]
    assert siblings.leave("g", 3) == []
    assert siblings.prompt_cached("g") == []


def test_a_group_is_forgotten_with_its_last_member():
    siblings = Siblings()
    siblings.join("g", 1)
    siblings.join("g", 2)
    siblings.prompt_cached("g")
    siblings.leave("g", 1)
    siblings.leave("g", 2)
    assert len(siblings) == 0

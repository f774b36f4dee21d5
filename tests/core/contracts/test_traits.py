from __future__ import annotations

import pytest

from modicum.core.contracts.traits import RULES, TRAITS, TraitHolder, clashes


def part(name: str, *traits: str) -> TraitHolder:
    return TraitHolder(name, frozenset(traits))


def test_rules_speak_of_known_traits_and_have_a_sentence():
    for rule in RULES:
        assert {rule.one, rule.other} <= TRAITS.keys()
        assert len(rule.why) > 20


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_forbids_its_pair_in_either_order(rule):
    one, other = part("one", rule.one), part("other", rule.other)
    for pair in ([one, other], [other, one]):
        found = clashes(pair)
        assert rule.why in [clash.why for clash in found]
        assert {(clash.one, clash.other) for clash in found} == {tuple(pair)}


def test_a_part_does_not_clash_with_itself():
    assert clashes([part("both", "frees_gradient_in_backward", "needs_global_norm_first")]) == []


def test_parts_without_a_rule_combine():
    assert clashes([part("a", "mergeable"), part("b", "compiles"), part("c")]) == []


def test_every_clash_is_found_in_the_order_of_the_parts():
    parts = [part(name, "rewrites_base") for name in "abc"]
    found = [(clash.one.name, clash.other.name) for clash in clashes(parts)]
    assert found == [("a", "b"), ("a", "c"), ("b", "c")]

from __future__ import annotations

from pathlib import Path

import pytest

import modicum
from modicum.core.contracts.method import Info
from modicum.core.contracts.trait_rules import RULES
from modicum.core.contracts.traits import TRAITS, TraitHolder, clashes
from modicum.core.errors import InputError


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


def test_a_method_may_have_a_rule_of_its_own():
    own = TraitHolder("own", frozenset(), (("run_hybrid", "it cannot, for a reason of its own"),))
    for pair in ([own, part("run", "run_hybrid")], [part("run", "run_hybrid"), own]):
        assert [clash.why for clash in clashes(pair)] == ["it cannot, for a reason of its own"]
    assert clashes([own, part("run", "run_cuts_weights")]) == []


def test_every_word_is_read():
    """By a rule, or by a battery, the trainer or a room's base, which ask for it by name."""
    root = Path(modicum.__file__).parent
    read = {word for rule in RULES for word in (rule.one, rule.other)}
    asking = [*root.glob("proofs/contracts/**/*.py"), *root.glob("trainer/*.py")]
    asking += [*root.glob("planner/*.py"), *root.glob("recipe/*.py")]
    asking += [*root.glob("adapters/*.py"), root / "linears/base.py"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in asking)
    assert {word for word in TRAITS.keys() - read if f'"{word}"' not in text} == set()


def test_a_trait_may_hang_on_a_field_not_having_a_value() -> None:
    unless = (("penalty", 0.0, 0.1, "follows_steps"),)
    info = Info("a", "a", "adapters", "", "", traits=("compiles",), traits_unless=unless)
    assert info.traits_of({"penalty": 0.0}) == info.traits_of({}) == {"compiles"}
    assert info.traits_of({"penalty": 1e-3}) == {"compiles", "follows_steps"}
    assert info.traits_of(dict(info.with_other_traits)) == {"compiles", "follows_steps"}
    with pytest.raises(InputError, match="unknown trait"):
        Info("a", "a", "adapters", "", "", traits_unless=(("penalty", 0.0, 0.1, "follow_steps"),))

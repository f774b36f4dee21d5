"""What making an update spends: a transform and then the optimizer."""

from __future__ import annotations

from modicum.planner import plan

STEP = ("workspace", ("step",))


def stepping(recipe, ranks=1):
    """Bytes of scratch that an update takes, and the exchange before and after it."""
    ledger = plan(recipe, ranks=ranks).prediction.ledger
    return sum(entry.bytes for entry in ledger.entries if (entry.kind, entry.phases) == STEP)


def test_of_a_transform_and_an_optimizer_one_works_after_the_other(new):
    transform = {"method": "mkor", "every": 1}
    least = stepping(new(optimizer={"method": "adamw"}, transform=transform))
    for optimizer in ({"method": "adamw8bit"}, {"method": "sgd", "momentum": 0.0}):
        alone = stepping(new(optimizer=optimizer))
        both = stepping(new(optimizer=optimizer, transform=transform))
        assert both == max(alone, least) > 0


def test_what_zero_sends_is_gone_while_an_update_works(new):
    """A tiny model's two buckets of weights, and what receives them, are as much as factors are."""
    transform = {"method": "mkor", "every": 1}
    zero = {"strategy": "zero"}
    weights = stepping(new(optimizer={"method": "adamw"}, parallel=zero), ranks=2)
    both = stepping(new(optimizer={"method": "adamw"}, transform=transform, parallel=zero), ranks=2)
    factors = stepping(new(optimizer={"method": "adamw"}, transform=transform))
    assert max(weights, factors) <= both < weights + factors

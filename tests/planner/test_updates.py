"""What making an update spends: a transform and then the optimizer."""

from __future__ import annotations

from modicum.planner import plan


def test_of_a_transform_and_an_optimizer_one_works_after_the_other(new):
    def step(**sections):
        ledger = plan(new(**sections)).prediction.ledger
        found = [e for e in ledger.entries if (e.kind, e.phases) == ("workspace", ("step",))]
        return sum(entry.bytes for entry in found)

    transform = {"method": "mkor", "every": 1}
    for optimizer in ({"method": "adamw8bit"}, {"method": "sgd", "momentum": 0.0}):
        alone, both = step(optimizer=optimizer), step(optimizer=optimizer, transform=transform)
        least = step(optimizer={"method": "adamw"}, transform=transform)
        assert both == max(alone, least) > 0

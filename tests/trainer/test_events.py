from __future__ import annotations

from modicum.trainer.events import Events


def test_handlers_are_called_in_order_with_the_payload():
    events, seen = Events(), []
    events.on("gradients_ready", lambda step: seen.append(("first", step)))
    events.on("gradients_ready", lambda step: seen.append(("second", step)))
    events.on("after_optimizer", lambda step: seen.append(("other", step)))
    events.publish("gradients_ready", step=1)
    assert seen == [("first", 1), ("second", 1)]


def test_a_handler_may_end_its_own_subscription():
    events, seen = Events(), []

    def once(step: int) -> None:
        seen.append(step)
        stop()

    stop = events.on("before_update", once)
    events.on("before_update", lambda step: seen.append(-step))
    events.publish("before_update", step=1)
    events.publish("before_update", step=2)
    assert seen == [1, -1, -2]

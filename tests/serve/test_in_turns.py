"""The simple engine: every request as if it were alone, adapters one after the other."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from modicum.models.generate import generate
from modicum.serve.in_turns import InTurns
from modicum.serve.served_models import ServedModels
from modicum.serve.tokens import Ended, EngineEvent, Failed, MadeToken, TokenRequest

PROMPTS = ((3, 7, 1), (9,), (4, 4, 4, 2, 8), (250, 11))


def drained(engine: InTurns) -> dict[str, list[EngineEvent]]:
    """Everything that is still to come, by request."""
    found: dict[str, list[EngineEvent]] = defaultdict(list)
    while engine.requests:
        for name, event in engine.step():
            found[name].append(event)
    return found


def tokens(events: list[EngineEvent]) -> list[int]:
    return [event.token for event in events if isinstance(event, MadeToken)]


def many() -> list[TokenRequest]:
    adapters = ("default", None, "added-1", "added-2")
    return [
        TokenRequest(
            f"{name}/{number}", prompt, 5 + number, adapter=name, temperature=number % 2 * 1.5,
            top_p=0.9, seed=number,
        )
        for number, prompt in enumerate(PROMPTS)
        for name in adapters
    ]  # fmt: skip


def test_requests_get_what_they_get_alone(served: ServedModels) -> None:
    engine = InTurns(served.model, served.adapters, at_once=3)
    alone = {}
    for request in many():
        engine.submit(request)
        alone |= drained(engine)
    for request in many():
        engine.submit(request)
    together = drained(engine)
    assert together == alone
    assert all(events[-1] == Ended("length") for events in together.values())
    greedy = [tokens(together[f"{name}/0"]) for name in ("default", None, "added-1", "added-2")]
    assert len(set(map(tuple, greedy))) == 4  # the adapters differ, and from the base
    assert [len(each) for each in greedy] == [5] * 4


def test_another_engine_may_have_changed_the_adapter(served: ServedModels) -> None:
    first, second = (InTurns(served.model, served.adapters) for _ in range(2))
    found = []
    for engine, name in (
        (first, "default"),
        (second, "added-1"),
        (second, None),
        (first, "default"),
    ):
        engine.submit(TokenRequest("one", PROMPTS[0], 8, adapter=name, temperature=0.0, seed=0))
        found.append(tokens(drained(engine)["one"]))
    assert found[0] == found[3]
    assert found[0] not in found[1:3]


def test_greedy_tokens_are_those_of_full_passes(served: ServedModels) -> None:
    """What is cached of the adapter's keys and values is not another adapter's."""
    engine = InTurns(served.model, served.adapters)
    for request in many():
        engine.submit(replace(request, temperature=0.0))
    found = drained(engine)
    for request in many():
        engine._use(request.adapter)
        ids = torch.tensor([request.prompt])
        with torch.no_grad():
            for _ in range(request.max_tokens):
                ids = torch.cat((ids, served.model(ids)[:, -1:].argmax(-1)), dim=1)
        assert tokens(found[request.id]) == ids[0, len(request.prompt) :].tolist()


def test_running_requests_take_turns_and_others_wait(served: ServedModels) -> None:
    engine = InTurns(served.model, served.adapters, at_once=2)
    for name in "abc":
        engine.submit(TokenRequest(name, (3, 7), 2 if name == "a" else 3))
    order = []
    while engine.requests:
        order.append("".join(name for name, _ in engine.step()))
    assert order == ["ab", "ab", "ab", "bc", "c", "c", "c"]
    with pytest.raises(ValueError, match="at least one"):
        InTurns(served.model, at_once=0)


def test_a_cancelled_request_is_heard_of_no_more(served: ServedModels) -> None:
    engine = InTurns(served.model, served.adapters, at_once=2)
    for name in "abc":
        engine.submit(TokenRequest(name, (3, 7), 4))
    step = engine.step()
    assert next(step)[0] == "a"
    engine.cancel("b")
    engine.cancel("c")
    engine.cancel("unknown")
    assert list(step) == []
    assert engine.requests == 1
    assert drained(engine).keys() == {"a"}


def test_a_request_that_fails_is_alone_with_it(served: ServedModels) -> None:
    engine = InTurns(served.model, served.adapters)
    engine.submit(TokenRequest("fine", (3, 7), 3))
    engine.submit(TokenRequest("nobody's", (3, 7), 3, adapter="unknown"))
    engine.submit(TokenRequest("outside", (10**6,), 3, adapter="default"))
    found = drained(engine)
    assert len(tokens(found["fine"])) == 3
    assert found["fine"][-1] == Ended("length")
    for name in ("nobody's", "outside"):
        assert [type(event) for event in found[name]] == [Failed]


def test_a_text_ends_by_its_end_its_limit_or_the_context(served: ServedModels) -> None:
    engine = InTurns(served.model, served.adapters)
    engine.submit(TokenRequest("free", (3, 7), 6))
    free = tokens(drained(engine)["free"])
    end = free[4]
    engine.submit(TokenRequest("ended", (3, 7), 6, ends=frozenset({end})))
    engine.submit(TokenRequest("full", (3,) * (served.context - 2), 6))
    found = drained(engine)
    assert tokens(found["ended"]) == free[: free.index(end)]
    assert found["ended"][-1] == Ended("stop")
    assert len(tokens(found["full"])) == 2
    assert found["full"][-1] == Ended("length")


def test_log_probabilities_are_the_model_s(served: ServedModels) -> None:
    engine = InTurns(served.model, served.adapters)
    engine.submit(TokenRequest("a", (3, 7), 3, temperature=1.5, top_p=0.5, seed=1, likeliest=4))
    events = drained(engine)["a"]
    made = tokens(events)
    with torch.no_grad():
        logits = served.model(torch.tensor([[3, 7, *made]]))[0, 1:]
    expected = torch.log_softmax(logits, -1)
    for place, event in enumerate(events[:-1]):
        assert isinstance(event, MadeToken)
        assert event.log_probability == pytest.approx(float(expected[place, event.token]), abs=1e-5)
        assert [token for token, _ in event.likeliest] == expected[place].topk(4).indices.tolist()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_numbers_that_are_none_are_no_log_probabilities(
    served: ServedModels, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    def damaged(*given: Any, drawn: Any, **named: Any) -> Any:
        for token in generate(*given, **named):
            logits = torch.zeros(9)
            logits[3] = value
            drawn(logits, token % 9)
            yield token

    monkeypatch.setattr("modicum.serve.in_turns.generate", damaged)
    engine = InTurns(served.model, served.adapters)
    engine.submit(TokenRequest("a", (3, 7), 1, likeliest=9))
    first = drained(engine)["a"][0]
    if math.isnan(value):
        assert isinstance(first, Failed)
    else:
        assert isinstance(first, MadeToken)
        assert first.likeliest[-1] == (3, -9999.0)

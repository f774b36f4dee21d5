"""The endpoint as OpenAI's client meets it, over a port."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.serve.conftest import CONTEXT, MESSAGES, Folders, eventually, running
from tests.serve.test_in_turns import drained, tokens

from modicum.data.tokenizer import Tokenizer
from modicum.serve import load_run
from modicum.serve.in_turns import InTurns
from modicum.serve.served_models import ServedModels
from modicum.serve.tokens import EngineEvent, Failed, TokenRequest

openai = pytest.importorskip("openai")


def answer(client: Any, model: str = "adapter", **more: Any) -> Any:
    values = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24} | more
    return client.chat.completions.create(model=model, **values)


def text(client: Any, model: str = "adapter", **more: Any) -> Any:
    values = {"prompt": "to be", "temperature": 0, "max_tokens": 24} | more
    return client.completions.create(model=model, **values)


# What is written


def test_greedy_answers_are_those_of_modicum_chat(client: Any, folders: Folders) -> None:
    conversation = load_run(folders.run)
    written = "".join(conversation.write("to be 🙂", max_tokens=24, temperature=0))
    found = answer(client)
    assert found.choices[0].message.content == written
    assert found.choices[0].message.role == "assistant"
    assert conversation.adapter is not None
    conversation.adapter.deactivate()
    conversation.forget()
    base = "".join(conversation.write("to be 🙂", max_tokens=24, temperature=0))
    assert answer(client, "base").choices[0].message.content == base
    other = load_run(folders.other).write("to be 🙂", max_tokens=24, temperature=0)
    assert answer(client, "other").choices[0].message.content == "".join(other)
    assert base != written


def test_drawn_answers_are_those_of_modicum_chat(client: Any, folders: Folders) -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
    written = "".join(load_run(folders.run).write("to be 🙂", max_tokens=24, **options))
    assert answer(client, **options).choices[0].message.content == written


@pytest.mark.expensive
@torch.no_grad()
def test_greedy_text_is_that_of_transformers_and_peft(client: Any, folders: Folders) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(folders.model, dtype=torch.float32)
    given = tokenizer("to be", return_tensors="pt", add_special_tokens=False)
    asked = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )

    def written(by: Any, inputs: Any) -> str:
        ids = by.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)
        kept = ids[0, inputs["input_ids"].shape[1] :]
        return str(tokenizer.decode(kept, skip_special_tokens=True))

    assert text(client, "base").choices[0].text == written(model, given)
    assert answer(client, "base").choices[0].message.content == written(model, asked)
    adapted = peft.PeftModel.from_pretrained(model, folders.run / "adapter")
    assert answer(client, "adapter").choices[0].message.content == written(adapted, asked)


@pytest.mark.parametrize(
    "more", [{}, {"temperature": 1.5, "seed": 3, "n": 3, "stop": ["e", "🙂 "]}]
)
def test_a_stream_is_the_answer_in_pieces(client: Any, more: dict[str, Any]) -> None:
    for ask, shows in ((answer, {"logprobs": True, "top_logprobs": 2}), (text, {"logprobs": 2})):
        full = ask(client, **more, **shows)
        usage = {"include_usage": True}
        chunks = list(ask(client, stream=True, stream_options=usage, **more, **shows))
        assert chunks[-1].usage == full.usage
        for choice in full.choices:
            own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
            if ask is answer:
                assert own[0].delta.role == "assistant"
                pieces = [each.delta.content or "" for each in own]
                assert "".join(pieces) == choice.message.content
                shown = [t for each in own if each.logprobs for t in each.logprobs.content]
                assert shown == choice.logprobs.content
            else:
                assert "".join(each.text for each in own) == choice.text
                shown = [t for each in own if each.logprobs for t in each.logprobs.tokens]
                assert shown == choice.logprobs.tokens
            reasons = [each.finish_reason for each in own]
            assert reasons == [None] * (len(own) - 1) + [choice.finish_reason]


def test_a_seed_gives_its_text_again_and_its_choices_differ(client: Any) -> None:
    def texts(**more: Any) -> list[str]:
        found = text(client, temperature=2.0, **more)
        assert [choice.index for choice in found.choices] == list(range(len(found.choices)))
        return [choice.text for choice in found.choices]

    first = texts(seed=7, n=3)
    assert texts(seed=7, n=3) == first
    assert len(set(first)) == 3
    assert texts(seed=7) == first[:1]
    assert texts(seed=-7) != first[:1]
    assert texts(seed=7, n=2, prompt=["to be", "or"])[:2] == first[:2]
    assert texts() != texts()


def test_tokens_are_counted(client: Any, tokenizer: Tokenizer) -> None:
    found = text(client, n=2, temperature=1, prompt=["to be", "or not"], max_tokens=4)
    prompts = len(tokenizer.encode("to be")) + len(tokenizer.encode("or not"))
    assert len(found.choices) == 4
    assert found.usage.prompt_tokens == prompts
    assert found.usage.completion_tokens <= 16
    assert found.usage.total_tokens == prompts + found.usage.completion_tokens
    assert text(client, prompt=tokenizer.encode("to be")).choices == text(client).choices
    assert len(tokenizer.encode(text(client, max_tokens=None).choices[0].text)) <= 16


def test_an_answer_ends_by_a_stop_a_limit_or_the_context(client: Any) -> None:
    free = text(client, max_tokens=30).choices[0]
    assert free.finish_reason == "length"
    stop = free.text[8:10]
    ended = text(client, max_tokens=30, stop=stop, logprobs=0).choices[0]
    assert (ended.text, ended.finish_reason) == (free.text[: free.text.index(stop)], "stop")
    assert all(offset < max(len(ended.text), 1) for offset in ended.logprobs.text_offset)
    full = text(client, max_tokens=10**6)
    assert full.usage.total_tokens <= CONTEXT
    assert full.choices[0].finish_reason in ("length", "stop")


def test_an_answer_ends_at_the_model_s_end(served: ServedModels) -> None:
    engine = InTurns(served.model, served.adapters)
    prompt = (3, 7, 1)
    engine.submit(TokenRequest("free", prompt, 8))
    free = tokens(drained(engine)["free"])
    with running(replace(served, ends=frozenset({free[5]}))) as url:
        found = text(ask_at(url), "base", prompt=list(prompt), max_tokens=8)
    assert found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens == free.index(free[5])


def test_log_probabilities_are_of_the_tokens_of_the_text(client: Any) -> None:
    choice = answer(client, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert all(each.logprob == each.top_logprobs[0].logprob for each in content)  # greedy
    assert all(each.logprob <= 0 for each in content)
    assert all(sum(math.exp(t.logprob) for t in each.top_logprobs) <= 1.001 for each in content)
    spelled = b"".join(bytes(each.bytes) for each in content if each.bytes is not None)
    assert spelled
    found = text(client, logprobs=3).choices[0]
    for token, offset in zip(found.logprobs.tokens, found.logprobs.text_offset, strict=True):
        if "�" not in token and not token.startswith("<|"):
            assert found.text[offset:].startswith(token)
    assert text(client).choices[0].logprobs is None


def test_the_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["adapter", "base", "other", "peft"]
    assert client.models.retrieve("base").owned_by == "modicum"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")


# Several requests


def test_requests_at_the_same_time_get_what_they_get_alone(client: Any) -> None:
    names = ("adapter", "base", "other", "peft")
    asked = [(names[n % 4], f"to be {n}", n) for n in range(8)]

    def one(each: tuple[str, str, int]) -> str:
        model, prompt, seed = each
        found = text(client, model, prompt=prompt, seed=seed, temperature=seed % 2 * 1.3)
        return str(found.choices[0].text)

    alone = [one(each) for each in asked]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, asked)) == alone


class Planted(InTurns):
    """An engine that waits, or fails requests of one seed."""

    def __init__(self, served: ServedModels, let: threading.Event) -> None:
        super().__init__(served.model, served.adapters)
        self.let, self.made = let, 0

    def step(self) -> Iterator[tuple[str, EngineEvent]]:
        failing = {name: r for name, r in self._running.items() if r.request.seed == 13}
        for name, event in super().step():
            self.let.wait(60)
            if name in failing:
                self.cancel(name)
                event = Failed(RuntimeError("planted"))
            self.made += 1
            yield name, event


@pytest.fixture
def let() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def ask_at(url: str, **more: Any) -> Any:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, **more)


def test_one_request_s_failure_is_not_another_s(
    served: ServedModels, let: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    let.set()
    with running(served, Planted(served, let)) as url, ThreadPoolExecutor(4) as pool:
        client = ask_at(url)
        fine = [pool.submit(text, client, seed=n, max_tokens=40) for n in range(3)]
        with pytest.raises(openai.InternalServerError) as caught:
            text(client, seed=13)
        name = caught.value.body["message"].split()[-1]  # type: ignore[index]
        assert f"request {name} failed" in caplog.text
        assert "RuntimeError: planted" in caplog.text
        assert "planted" not in str(caught.value)
        with pytest.raises(openai.APIError, match="the answer failed"):
            list(text(client, seed=13, stream=True))
        assert {each.result().choices[0].finish_reason for each in fine} <= {"length", "stop"}


def test_what_does_not_fit_the_queue_is_asked_to_come_again(
    served: ServedModels, let: threading.Event
) -> None:
    engine = Planted(served, let)
    with running(served, engine, room=2) as url, ThreadPoolExecutor(2) as pool:
        client = ask_at(url)
        waiting = pool.submit(text, client, n=2)
        assert eventually(lambda: engine.requests == 2)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                text(client, stream=stream)
            assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError, match="3 choices, and 2"):
            text(client, n=3)
        let.set()
        assert len(waiting.result().choices) == 2
        assert text(client).choices


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_ends_its_generation(
    served: ServedModels, let: threading.Event, stream: bool
) -> None:
    engine = Planted(served, let)
    with running(served, engine, room=2) as url:
        if stream:
            let.set()
            chunks = text(ask_at(url), max_tokens=90, stream=True, n=2)
            next(iter(chunks))
            let.clear()
            chunks.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                text(ask_at(url, timeout=1.0), max_tokens=90, n=2)
        made = engine.made
        let.set()
        assert eventually(lambda: engine.requests == 0)
        assert engine.made < made + 90  # of the 180 that were asked for
        assert text(ask_at(url), max_tokens=2, n=2).choices

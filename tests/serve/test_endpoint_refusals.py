"""What the endpoint refuses, and that it answers the next request all the same."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serve.conftest import CONTEXT, MESSAGES, running
from tests.serve.test_asked import JSON, PARAMETERS

from modicum.core.errors import InputError
from modicum.serve.served_models import ServedModel, ServedModels
from modicum.serve.server import check_host

pytest.importorskip("starlette")
TEXT = {"model": "base", "prompt": "to be", "max_tokens": 2}


def ask(
    url: str,
    path: str = "/completions",
    body: Any = None,
    method: str = "POST",
    raw: bytes | None = None,
    **headers: str,
) -> tuple[int, Any]:
    """The status and what the body holds."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    data = raw if raw is not None else json.dumps(body if body is not None else TEXT).encode()
    known = {"content-type": "application/json"}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, f"{where.path}{path}", data, known | given)
    response = connection.getresponse()
    found = response.read().decode()
    connection.close()
    is_json = (response.getheader("content-type") or "").startswith("application/json")
    return response.status, json.loads(found) if is_json else found


def refused(url: str, *args: Any, **more: Any) -> tuple[int, str]:
    """The status and the message of an error, in OpenAI's shape."""
    status, found = ask(url, *args, **more)
    assert found["error"].keys() == {"message", "type", "param", "code"}
    assert found["error"]["message"]
    return status, found["error"]["message"]


@given(
    body=st.binary(max_size=30)
    | st.builds(
        lambda name, value, chat: json.dumps(
            ({"model": "base", "messages": MESSAGES} if chat else TEXT)
            | {"max_tokens": 1, name: value}
        ).encode(),
        st.sampled_from(PARAMETERS),
        JSON,
        st.booleans(),
    ),
    path=st.sampled_from(["/completions", "/chat/completions"]),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_sent_is_answered(url: str, body: bytes, path: str) -> None:
    status, found = ask(url, path, raw=body)
    assert status in (200, 400, 404)
    if status != 200:
        assert found["error"]["message"]
    assert ask(url)[0] == 200


def test_addresses_methods_and_types_are_said(url: str) -> None:
    addresses = (
        "; those that there are: GET /v1/models; GET /v1/models/NAME; POST /v1/chat/completions; "
        "POST /v1/completions"
    )
    # The address that `modicum serve` prints is the beginning of those that can be asked.
    for path in ("", "/nothing"):
        assert refused(url, path, method="GET") == (404, f"there is no such address{addresses}")
    assert refused(url, "/models") == (405, f"this address is not asked by that method{addresses}")
    assert refused(url, method="GET")[0] == 405
    assert refused(url, content_type="text/plain")[0] == 415
    assert ask(url, content_type="application/json; charset=utf-8")[0] == 200
    assert refused(url, raw=b" " * (4 << 20) + b"{}")[0] == 413


def test_only_this_machine_s_names_and_pages_are_answered(url: str) -> None:
    assert ask(url, host="evil.example")[0] == 421
    port = urlsplit(url).port
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port}1", "http://6.6.6.6"):
        assert refused(url, origin=origin)[0] == 403
        assert refused(url, "/models", method="GET", origin=origin)[0] == 403
    assert ask(url, origin=f"http://127.0.0.1:{port}")[0] == 200
    status, _ = ask(url, method="OPTIONS", origin="http://evil.example")
    assert status in (403, 405)  # so a page of a stranger is not let by its browser


def test_models_and_prompts_that_cannot_be_are_said(url: str, served: ServedModels) -> None:
    assert refused(url, body=TEXT | {"model": "adaptor"}) == (
        404,
        "model: there is no such model (found: 'adaptor'); allowed: adapter, base, other, peft. "
        "Did you mean 'adapter'?",
    )
    long = TEXT | {"prompt": "t" * CONTEXT * 2}
    status, said = refused(url, body=long)
    assert status == 400
    assert f"context of {CONTEXT}" in said
    assert refused(url, body=TEXT | {"prompt": ""})[0] == 400
    for token in (-1, served.vocabulary_size):
        assert "token ids are 0 to" in refused(url, body=TEXT | {"prompt": [1, token]})[1]
    turns = [{"role": "user", "content": "t" * CONTEXT * 2}]
    status, said = refused(url, "/chat/completions", {"model": "base", "messages": turns})
    assert (status, "shorten it" in said) == (400, True)


def test_too_many_choices_are_refused_before_they_are_made(
    served: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: Any) -> Any:
        raise AssertionError("requests were made")

    monkeypatch.setattr("modicum.serve.endpoint.token_requests", make)
    with running(served, room=4) as url:
        for more, count in (({"prompt": ["a"] * 3, "n": 2}, 6), ({"n": 5}, 5)):
            said = f"these are {count} choices, and 4 are allowed"
            assert refused(url, body=TEXT | more) == (400, said)
        body = {"model": "base", "messages": MESSAGES, "n": 5}
        assert refused(url, "/chat/completions", body)[0] == 400


def test_a_conversation_needs_a_template_that_takes_it(served: ServedModels) -> None:
    body = {"model": "plain", "messages": MESSAGES}
    names = {"plain": ServedModel(), "base": served.names["base"]}
    without = ServedModels(served.model, served.tokenizer, names, served.adapters, served.ends)
    with running(without) as url:
        status, said = refused(url, "/chat/completions", body)
        assert (status, "no chat template" in said) == (400, True)
        assert ask(url, body=TEXT | {"model": "plain"})[0] == 200


def test_a_key_is_asked_for(served: ServedModels) -> None:
    with running(served, api_key="secret") as url:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer ßecret"}):
            assert refused(url, **headers)[0] == 401
            assert refused(url, "/models", method="GET", **headers)[0] == 401
        assert ask(url, authorization="Bearer secret")[0] == 200


def test_a_body_that_never_comes_holds_nobody_up(url: str) -> None:
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port)) as slow:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
        slow.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
        assert ask(url)[0] == 200
    assert ask(url)[0] == 200


def test_a_network_is_served_only_where_that_was_said() -> None:
    check_host("127.0.0.1", public=False, api_key=None)
    check_host("0.0.0.0", public=True, api_key="secret")
    with pytest.raises(InputError, match="--public"):
        check_host("0.0.0.0", public=False, api_key="secret")
    with pytest.raises(InputError, match="needs a key"):
        check_host("0.0.0.0", public=True, api_key=None)
    for key in ("", "ß", "a\n"):
        with pytest.raises(InputError, match="printable ASCII"):
            check_host("127.0.0.1", public=False, api_key=key)

"""Where servers listen, and whom they answer."""

from __future__ import annotations

import socket

import pytest

from modicum.core.errors import InputError
from modicum.core.local_server import address, is_loopback, known_host, listening


def test_a_host_is_known_by_number_or_name() -> None:
    known = (
        "127.0.0.1",
        "127.0.0.1:8321",
        "[::1]:1",
        "localhost",
        socket.gethostname(),
        "10.1.2.3",
    )
    assert all(known_host(name) for name in known)
    unknown = ("", "evil.example", "localhost.evil.example", "127.0.0.1.nip.io:8321", "[::1", "a b")
    assert not any(known_host(name) for name in unknown)


def test_only_this_machine_s_own_addresses_are_loopback() -> None:
    assert all(is_loopback(name) for name in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    assert not any(is_loopback(name) for name in ("0.0.0.0", "::", "10.1.2.3", "example.org", ""))


def test_it_listens_where_it_says_or_says_why_not() -> None:
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert address("127.0.0.1", listener) == f"http://127.0.0.1:{port}"
        assert address("::1", listener) == f"http://[::1]:{port}"
        with pytest.raises(InputError) as taken:
            listening("127.0.0.1", port)
    assert str(taken.value) == (
        f"port {port} of 127.0.0.1 is taken; give another with --port (0: any that is free)"
    )
    for host in ("no such host", "a" * 64 + ".example", "300.1.1.1"):
        with pytest.raises(InputError, match="cannot listen at port 0"):
            listening(host, 0)

"""Links that cannot be made are no failure of what runs on them."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.proofs.comm import links
from modicum.proofs.comm.links import NoLinks, shaped


@pytest.mark.parametrize(
    ("code", "said", "cannot"),
    [
        (1, "unshare: unshare failed: Operation not permitted", True),
        (links._FAILED, "rank 1: ValueError", False),
        (-9, "", False),
    ],
)
def test_what_failed_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, code: int, said: str, cannot: bool
) -> None:
    def run(command: Any, **how: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, stderr=said)

    monkeypatch.setattr(links.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(links.subprocess, "run", run)
    with pytest.raises(InputError, match=said or None) as raised:
        shaped(2, ["1mbit"], "a:function", [{}])
    assert isinstance(raised.value, NoLinks) is cannot


def test_without_tools_there_are_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.shutil, "which", lambda name: None)
    with pytest.raises(NoLinks, match="unshare, ip, tc"):
        shaped(2, ["1mbit"], "a:function", [{}])

"""Full proofs of these tests measure nothing of record, so they run on a busy machine, too."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from modicum.proofs import base


@pytest.fixture(autouse=True)
def _machine_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "alone", nullcontext)
    monkeypatch.setattr(base, "quiet", lambda: 0.125)

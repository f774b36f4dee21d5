"""What training ended with is kept under all that it depends on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from modicum.core.known_outcomes import known_outcome


@dataclass(frozen=True)
class Ended:
    loss: float


def test_what_is_kept_is_read_only_if_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    where: dict[str, Any] = {"folder": "outcomes", "sources": "these"}
    recipe = {"a": 1}
    kept = known_outcome(Ended, recipe, lambda: Ended(0.5), **where)
    assert kept == (Ended(0.5), False)
    assert known_outcome(Ended, recipe, lambda: Ended(0.7), **where) == (Ended(0.5), True)
    (file,) = tmp_path.rglob("*.json")
    for text in ("", "{}", '{"outcome": {"loss": "much"}}', '{"outcome": [1]}'):
        file.write_text(text)
        assert known_outcome(Ended, recipe, lambda: Ended(0.7), **where) == (Ended(0.7), False)
    file.unlink()
    file.parent.chmod(0o500)
    assert known_outcome(Ended, recipe, lambda: Ended(0.9), **where)[0] == Ended(0.9)
    file.parent.chmod(0o700)
    assert not known_outcome(Ended, recipe, lambda: Ended(0.8), fresh=True, **where)[1]
    other: dict[str, Any] = {"folder": "outcomes", "sources": "others"}
    assert known_outcome(Ended, recipe, lambda: Ended(0.6), **other) == (Ended(0.6), False)

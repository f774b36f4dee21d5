"""The tutorial on conversations: its script and its commands, in their order, with few steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_troubleshooting import matches

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "chat.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```console\n\$ (.+?)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
# A model that speaks needs minutes; that all commands work does not.
FEW = {"--set training.epochs=20": "--set training.epochs=0.2 --set model.width=64"}


@pytest.mark.expensive
def test_the_tutorial_works_word_by_word(
    modicum: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [script] = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    exec(compile(script, "talks.py", "exec"), {})
    [first] = re.findall(r"^```json\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    [answer] = re.findall(r'"content": "(Insert [^"]+)"', first)
    assert answer in (tmp_path / "talks" / "bisect.jsonl").read_text()
    for command, shown in BLOCKS:
        for given, instead in FEW.items():
            command = command.replace(given, instead)
        ended = modicum(*shlex.split(command)[1:])
        assert ended.code == 0, ended.err
        if shown:
            assert matches(shown.strip(), (ended.err + ended.out).strip()), command
    assert "epochs: 3" in (tmp_path / "chat.yaml").read_text()
    for named in ("verify data chat.yaml", "report runs/chat", "verify export runs/chat"):
        assert f"modicum {named}" in TEXT
        assert modicum(*named.split()).code == 0
    assert (tmp_path / "runs" / "chat" / "report.html").exists()
    assert "chat_template" in "".join(p.name for p in (tmp_path / "runs/chat/model").iterdir())

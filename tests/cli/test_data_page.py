"""The commands of the page on data, in its section on streams, end as the page says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_troubleshooting import matches

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "your-own-data.md"
[SECTION] = re.findall(
    r"^## Stream data.*?(?=^## )", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
BLOCKS = re.findall(r"^```console\n\$ (.+?)\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands of the page name."""
    made = tmp_path_factory.mktemp("stream")
    shutil.copytree(runs.new / "model", made / "my-model")
    rows = ({"text": f"{n} is one more than {n - 1}"} for n in range(1200))
    (made / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    [recipe] = re.findall(r"^```yaml\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
    (made / "stream.yaml").write_text(recipe)
    return made


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_a_command_of_the_page_ends_as_it_says(
    modicum: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, shown: str
) -> None:
    monkeypatch.chdir(folder)
    ended = modicum(*shlex.split(command)[1:])
    *message, code = shown.strip().split("\n")
    assert code == f"exit code {ended.code}", ended.err
    # Where lines of a table wrap is no matter.
    said = " ".join((ended.out + ended.err).split())
    assert matches(" ".join(" ".join(message).split()), said), ended.out
    assert not list(folder.rglob("tokens.bin"))

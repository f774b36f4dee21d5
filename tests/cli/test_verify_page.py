"""The page on `modicum verify` shows what its commands say."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_troubleshooting import matches
from tests.verify.conftest import here as here
from tests.verify.conftest import run, talks, values

from modicum.recipe import Recipe
from modicum.recipe_yaml import dump
from modicum.verify import DataLimits

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "verify.md"
PLUGIN = Path(__file__).resolve().parents[1] / "contracts" / "plugins" / "forgetful.py"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```console\n\$ (.+?)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands of the page name: data with faults, a model, an adapter's run."""
    made = tmp_path_factory.mktemp("verify")
    (made / "train.jsonl").write_text(talks(30) + talks(10))
    (made / "held.jsonl").write_text(talks(7, first=100) + talks(1))
    (made / "recipe.yaml").write_text(dump(Recipe(**values(made))))
    run(values(made), made / "base")
    adapter = {"method": "lora", "rank": 2}
    based: dict[str, Any] = {"model": {"path": str(made / "base")}, "training": {"steps": 12}}
    run(values(made, **based, adapter=adapter), made / "runs" / "mine")
    forgetful = {"method": "forgetful", "forgets": "moment"}
    plugins = {"plugins": [str(PLUGIN)]}
    run(values(made, **based, transform=forgetful) | plugins, made / "runs" / "forgetful")
    return made


@pytest.mark.expensive
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_a_command_of_the_page_ends_as_it_says(
    modicum: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, shown: str
) -> None:
    monkeypatch.chdir(folder)
    ended = modicum(*shlex.split(command)[1:])
    *message, code = shown.strip().split("\n")
    assert code == f"exit code {ended.code}", ended.err
    assert matches("\n".join(message), (ended.err + ended.out).strip())


def test_the_limits_of_the_page_are_the_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+)(?: %)? \|", TEXT, re.MULTILINE)
    limits = {name: getattr(DataLimits(), name) for name in DataLimits.names()}
    assert {name: int(share) / 100 for name, share in rows} == limits


def test_findings_are_json_and_a_wrong_limit_is_one_message(
    modicum: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    ended = modicum("verify", "data", "recipe.yaml", "--json")
    assert ended.code == 5
    told = json.loads(ended.out)
    assert told["passed"] is False
    assert [finding["what"] for finding in told["findings"]] == ["duplicates", "overlap"]
    assert set(told["findings"][0]) == {"what", "where", "expected", "found"}
    ended = modicum("verify", "export", "runs/mine", "--json")
    assert ended.code == 0
    assert json.loads(ended.out)["findings"] == []
    for limit, said in (("overlaps=0.1", "Did you mean 'overlap'?"), ("overlap=9", "0 to 1")):
        ended = modicum("verify", "data", "recipe.yaml", "--limit", limit)
        assert ended.code == 2
        assert said in ended.err
        assert ended.err.count("\n") == 1
        assert ended.out == ""

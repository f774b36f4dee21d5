"""The page on `modicum init` shows what its commands say and write."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from classifiers import base_folder
from classifiers import rows as labelled
from tests.cli.test_troubleshooting import matches

from modicum.planner.starting import rules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "start-a-recipe.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```console\n\$ (.+?)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands of the page name."""
    made = tmp_path_factory.mktemp("start")
    shutil.copytree(runs.new / "model", made / "my-model")
    (made / "my-adapter").mkdir()
    config = made / "my-adapter" / "adapter_config.json"
    config.write_text('{"base_model_name_or_path": "org/base"}')
    rows = ({"question": "to be", "answer": f"or not {n}"} for n in range(200))
    (made / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (made / "odd.csv").write_text("Frage,Antwort\n" + "sein,oder nicht sein\n" * 30)
    base_folder(made / "my-encoder", "bert")
    reviews = ((row["text"], row["label"]) for row in labelled(200))
    (made / "reviews.csv").write_text("review,label\n" + "".join(f"{t},{c}\n" for t, c in reviews))
    (made / "numbers.csv").write_text("a,b\n" + "1,2\n" * 30)
    return made


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        # Encoders, and what would make it fit, are planned by traces that other processes make.
        pytest.param(
            *block,
            id=block[0],
            marks=[pytest.mark.expensive] if re.search("--memory|encoder", block[0]) else [],
        )
        for block in BLOCKS
    ],
)
def test_a_command_of_the_page_ends_as_it_says(
    modicum: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, shown: str
) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(command)[1:]
    written = folder / words[-1]
    ended = modicum(*words)
    *message, code = shown.strip().split("\n")
    assert code == f"exit code {ended.code}", ended.err
    # What is measured and traced is said once, by whoever comes first.
    said = ended.out + (ended.err if ended.code else "")
    assert matches("\n".join(message), said.strip())
    assert written.exists() is (ended.code != 2)
    if words[-1] == "answers.yaml":
        [excerpt] = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
        assert matches(f"...{excerpt}", written.read_text())


def test_the_page_says_how_often_a_recipe_evaluates() -> None:
    updates = (1000, 2500, 2501, 9000)
    assert [rules.evaluate_every(each)[0] for each in updates] == [200, 500, 500, 500]
    said = "about five evaluations, and one each 500 updates of a run of more than 2,500;"
    assert said in TEXT

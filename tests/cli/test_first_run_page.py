"""The tutorial of the first run: its commands in their order, on a smaller demo."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_troubleshooting import matches

from modicum import recipe_yaml
from modicum.cli.demo import PARTS, show_results

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "tutorials" / "first-run.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
# The demo takes minutes; that all commands work does not.
SMALL = {
    "model.layers": 1, "model.width": 32, "model.heads": 2, "model.vocabulary_size": 300,
    "data.include": "[json/**]", "data.exclude": "[]",
}  # fmt: skip
FEW = {
    "training.steps": 2, "training.warmup_steps": 0, "evaluation.every": 1, "evaluation.rows": 2,
    "samples.count": 0, "data.sequence_length": 32,
}  # fmt: skip
SAMPLES = {"samples.count": 1, "samples.tokens": 2}


def changes(values: dict[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


@pytest.mark.expensive
def test_the_tutorial_works_word_by_word(
    modicum: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")  # the page is read in a checkout
    said: dict[str, str] = {}
    for command in COMMANDS:
        if command == "make demo":
            said[command] = small_demo(modicum)
            continue
        words = shlex.split(command)
        assert words.pop(0) == ".venv/bin/modicum", command
        if words[0] == "train":
            words += changes(FEW)
        monkeypatch.setattr(sys, "stdin", io.StringIO("def main(\n"))
        ended = modicum(*words)
        assert ended.code == 0, (command, ended.err)
        said[" ".join(words)] = ended.out
    [example] = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    written = (tmp_path / "my-recipe.yaml").read_text()
    assert matches(example, written), written
    check_demo(said["make demo"], tmp_path / "runs/demo-adapt")
    chats = [text for words, text in said.items() if words.startswith("chat ")]
    assert len(chats) == 3
    assert all("def main(" in text for text in chats[1:])
    assert (tmp_path / "runs/first/report.html").exists()
    for folder, file in (
        ("runs/first/adapter", "adapter_config.json"),
        ("my-model", "config.json"),
    ):
        assert json.loads((tmp_path / folder / file).read_text())


def small_demo(modicum: Any) -> str:
    """What `make demo` does, with less of everything; what it says at its end."""
    for name, _ in PARTS:
        asked = changes(FEW | SAMPLES if name == "demo-adapt" else SMALL | FEW)
        ended = modicum("train", name, "--quiet", *asked)
        assert ended.code == 0, ended.err
    shown = io.StringIO()
    with redirect_stdout(shown):
        show_results(Path("runs"))
    return shown.getvalue()


def check_demo(shown: str, run: Path) -> None:
    """That it says what to make of its samples, with the run's own figures."""
    table, _, samples = shown.partition("\n--- ")
    assert "validation loss, after" in table
    evaluations = (run / "evaluations.jsonl").read_text().splitlines()
    first, last = (json.loads(evaluations[place])["loss"] for place in (0, -1))
    text, _, said = samples.partition("writes nonsense")
    assert "after:\n" in text
    assert f"{first:.4f} before adapting and {last:.4f} after" in said
    [size] = re.findall(r"^tensor bytes, measured +.*  (\S+ \S+)$", table, re.MULTILINE)
    assert f"and {size} were measured" in said


def test_the_page_names_what_there_is() -> None:
    assert COMMANDS[0] == "make demo"
    for named in re.findall(r"`recipes/([\w-]+)\.yaml`", TEXT):
        assert named in recipe_yaml.shipped()
        assert named in dict(PARTS)

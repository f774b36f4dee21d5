"""The page on QLoRA says what the commands say and what the planner computes."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_troubleshooting import matches

from modicum.core.machine.record import MachineRecord
from modicum.planner.predict import predict
from modicum.planner.prediction import Choice
from modicum.recipe import Recipe
from modicum.tasks import task_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "qlora-under-8gb.md"
TEXT = PAGE.read_text(encoding="utf-8")
SIZES = {
    "Llama 2 7B": {},
    "Llama 2 70B": {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672,
    },
}  # fmt: skip
LORA = {"adapter": {"method": "lora", "rank": 16}}
WAYS: list[dict[str, Any]] = [{"linear": {"method": "nf4"}, **LORA}, LORA, {}]
FIGURES = re.findall(r"^\| (Llama.+?) \| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", TEXT, re.MULTILINE)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the commands name, on a machine whose allocator keeps little."""
    config = json.loads(re.findall(r"^```json\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[0])
    (tmp_path / "llama-2-7b").mkdir()
    (tmp_path / "llama-2-7b" / "config.json").write_text(json.dumps(config))
    row = json.dumps({"question": "to be?", "answer": "or not to be " * 20})
    (tmp_path / "answers.jsonl").write_text(f"{row}\n" * 40)
    record = MachineRecord(loaded_bytes=30_000_000, kept=(0.02, 0.1), efficiency=0.5)
    for name in ("planning", "starting.method"):
        module = importlib.import_module(f"modicum.planner.{name}")
        monkeypatch.setattr(module, "machine_record", lambda device: record)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.expensive
def test_the_commands_say_what_the_page_shows(modicum: Any, there: Path) -> None:
    blocks = re.findall(r"^```console\n\$ (.+?)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for command, shown in blocks:
        ended = modicum(*shlex.split(command)[1:])
        *message, code = shown.strip().split("\n")
        assert code == f"exit code {ended.code}", ended.err
        assert matches("\n".join(message), (ended.err + ended.out).strip())
    [excerpt] = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert matches(f"...{excerpt}...", (there / "qlora.yaml").read_text())
    assert not (there / "runs").exists()


@pytest.mark.expensive
@pytest.mark.parametrize("figures", FIGURES, ids=lambda row: f"{row[0]}, {row[1]}")
def test_the_table_is_the_planner_s(there: Path, figures: tuple[str, ...]) -> None:
    model, length, *shown = figures
    file = there / "llama-2-7b" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SIZES[model]))
    found = []
    for way in WAYS:
        recipe = Recipe(
            model={"path": "llama-2-7b"},
            data={"path": "answers.jsonl", "column": "answer", "sequence_length": int(length)},
            training={"precision": "bf16"},
            **way,
        )
        task = task_of(recipe)
        config = task.reconfigured(task.look(recipe), recipe)
        peak = predict(recipe, config, Choice(1, 16, recompute=True), "cuda").peak_bytes
        found.append(f"{peak / 1e9:.2f}")
    assert found == shown


def test_the_table_has_both_sizes() -> None:
    assert {row[0] for row in FIGURES} == set(SIZES)

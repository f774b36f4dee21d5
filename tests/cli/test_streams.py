"""Standard output that is closed, full, without a reader or of few letters; words that are none."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modicum.cli import streams
from modicum.cli.tables import print_json

ASCII = {
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "ascii",
}


def shell(command: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of the shell, in which `$M` is modicum's and `$1` and so on are words."""
    return subprocess.run(
        ["sh", "-c", command, "sh", *words],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        env=os.environ | {"M": f"{sys.executable} -m modicum"} | environment,
        check=False,
    )


@pytest.mark.parametrize("command", ["methods", "--help"])
def test_output_that_is_full_or_closed_is_told_in_one_line(command: str) -> None:
    for where, told in ((">/dev/full", "is full"), (">&-", "is closed")):
        ended = shell(f"$M {command} {where}")
        assert ended.returncode == 2
        assert ended.stderr == f"modicum: standard output {told}; send it somewhere else\n"


def test_a_run_does_not_begin_when_nothing_can_be_printed(runs: Any, tmp_path: Path) -> None:
    ended = shell("$M train $1 --out $2 >&-", str(runs.recipe), str(tmp_path / "run"))
    assert ended.returncode == 2
    assert not (tmp_path / "run").exists()


def test_a_reader_that_goes_away_is_no_error_and_an_exit_code_needs_no_stderr() -> None:
    assert shell("($M --help; echo ended with $? >&2) | true").stderr == "ended with 0\n"
    assert shell("$M methods --room none 2>/dev/full").returncode == 2
    assert shell("$M methods --room none 2>&-").returncode == 2


def test_a_word_that_is_no_text_is_told(runs: Any, tmp_path: Path) -> None:
    out = os.fsdecode(bytes(tmp_path) + b"/run\xff")
    for words in (("train", str(runs.recipe), "--out", out), ("chat", str(runs.new), out)):
        ended = shell('$M "$@"', *words)
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1
        assert f"word {len(words)} of the command is not UTF-8 text" in ended.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.expensive
def test_letters_that_a_terminal_lacks_are_spelled(tmp_path: Path) -> None:
    recipe = tmp_path / "new.yaml"
    recipe.write_text("training: {steps: ×}\n", encoding="utf-8")
    ended = shell("$M plan $1; $M methods --json", str(recipe), **ASCII)
    assert ended.stderr.isascii()
    assert "(found: 'x')" in ended.stderr
    assert "lora" in {method["name"] for method in json.loads(ended.stdout)}


def test_json_stays_json_where_letters_are_few() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    value = {"said": "naïve 🜨 ×"}
    print_json(value, stream)
    stream.flush()
    assert json.loads(raw.getvalue().decode("ascii")) == value


def test_a_lost_line_is_told_at_the_end_even_if_somebody_bore_it() -> None:
    code = (
        "import sys; from contextlib import suppress; from modicum.cli import streams\n"
        "streams.settle()\n"
        "with suppress(OSError):\n    print('x'); sys.stdout.flush()\n"
        "print('y')\n"
        "try:\n    streams.finish()\n"
        "except streams.OutputLost as lost:\n    print(lost.gone, lost, file=sys.stderr)"
    )
    ended = shell(f'{sys.executable} -c "$1" >/dev/full', code)
    assert (ended.returncode, ended.stderr) == (0, "False full\n")


def test_streams_of_others_are_left_alone() -> None:
    before = sys.stdout, sys.stderr
    streams.settle()
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize(
    "words",
    [("chat", "run", "--seed", "1" * 26), ("drill", "--seed", "1" * 26), ("drill", "--seed", "-1")],
)
def test_a_seed_is_a_number_that_generators_take(modicum: Any, words: tuple[str, ...]) -> None:
    ended = modicum(*words)
    assert ended.code == 2
    assert ended.err.startswith("modicum: --seed: too ")

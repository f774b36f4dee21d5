"""Which tests a change reaches."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from reach import FEW, Checkout, changed_since, git, last_green, note_green

FILES = {
    "src/modicum/__init__.py": "",
    "src/modicum/core/__init__.py": "",
    "src/modicum/core/errors.py": "class InputError(Exception): ...\n",
    "src/modicum/optim/__init__.py": "",
    "src/modicum/optim/base.py": "from modicum.core.errors import InputError\n",
    "src/modicum/optim/sgd.py": "def f():\n    from modicum.optim import base\n",
    "src/modicum/optim/typed.py": "if TYPE_CHECKING:\n    from modicum.optim.sgd import SGD\n",
    "src/modicum/cli/__init__.py": "",
    "src/modicum/cli/app.py": "",
    "src/modicum/optim/eva.py": "from modicum.optim.base import x\nclass Eva: ...\n",
    "tests/optim/test_base.py": "from modicum.optim.base import x\n",
    "tests/optim/test_sgd.py": "from modicum.optim.sgd import SGD\n",
    "tests/optim/test_lazy.py": "from modicum.optim import Eva\n",
    "tests/cli/test_app.py": "command = ['modicum', 'train']\n",
    "tests/cli/conftest.py": "from modicum.optim.sgd import SGD\n",
    "tests/test_words.py": "",
}
METHODS = {"modicum.optim.sgd": "sgd", "modicum.optim.eva": "eva"}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Checkout(tmp_path)


def test_a_method_reaches_its_tests_and_those_that_import_it(checkout: Checkout) -> None:
    reached = checkout.reached(["src/modicum/optim/sgd.py"], METHODS)
    assert reached.methods == {"sgd"}
    assert not reached.batteries
    assert not reached.everything
    held = {name for name in FILES if name.startswith("tests/") and reached.holds(name)}
    assert held == {"tests/optim/test_sgd.py", "tests/cli/conftest.py", "tests/cli/test_app.py"}


def test_imports_in_functions_by_lazy_names_and_by_commands_count(checkout: Checkout) -> None:
    assert "modicum.optim.sgd" in checkout.dependents("modicum.optim.base")
    assert "tests.optim.test_lazy" in checkout.dependents("modicum.optim.eva")
    assert "tests.cli.test_app" in checkout.dependents("modicum.cli.app")
    assert "modicum.optim.typed" not in checkout.dependents("modicum.optim.sgd")


def test_what_few_methods_stand_on_reaches_these(checkout: Checkout) -> None:
    reached = checkout.reached(["src/modicum/core/errors.py"], METHODS)
    assert reached.methods == {"sgd", "eva"}
    assert reached.holds("tests/optim/test_lazy.py")


def test_what_many_methods_stand_on_reaches_their_batteries(checkout: Checkout) -> None:
    for number in range(FEW):
        file = checkout.root / f"src/modicum/optim/more{number}.py"
        file.write_text("from modicum.optim.base import x\n")
    more = METHODS | {f"modicum.optim.more{number}": f"more{number}" for number in range(FEW)}
    reached = checkout.reached(["src/modicum/optim/base.py"], more)
    assert reached.batteries
    assert reached.methods == set()
    assert reached.holds("tests/optim/test_base.py")
    assert not reached.holds("tests/optim/test_sgd.py")  # it stands on it, by a method


def test_what_cannot_be_told_apart_reaches_everything(checkout: Checkout) -> None:
    for name in ("tests/conftest.py", "pyproject.toml", "unheard.of", "src/modicum/py.typed"):
        assert checkout.reached([name], METHODS).everything, name
    assert checkout.reached(["src/modicum/optim/gone.py"], METHODS).everything
    words = checkout.reached(["README.md"], METHODS)
    assert words.holds("tests/test_words.py")
    assert not words.everything


def test_what_is_committed_is_in_every_sample() -> None:
    file = "tests/proofs/test_base.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-q",
        "--collect-only",
        "-m",
        "committed",
        file,
    ]
    listed = [
        subprocess.run(command + sample, capture_output=True, text=True, check=True).stdout
        for sample in ([], ["--sample=seed"])
    ]
    everything, sample = (
        set(re.findall(rf"^{file}::.*$", found, re.MULTILINE)) for found in listed
    )
    assert sample == everything
    assert len(everything) > 2


def test_only_a_clean_checkout_is_noted_as_green(tmp_path: Path) -> None:
    def run(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    run("init")
    run("config", "user.email", "a@example.org")
    run("config", "user.name", "A")
    (tmp_path / "one").write_text("1")
    assert last_green(tmp_path) is None
    run("add", "one")
    run("commit", "-m", "one")
    (tmp_path / "two").write_text("2")
    note_green(tmp_path)
    assert last_green(tmp_path) is None
    (tmp_path / "two").unlink()
    note_green(tmp_path)
    assert last_green(tmp_path) == git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "one").write_text("2")
    (tmp_path / "new").write_text("3")
    assert changed_since(tmp_path, last_green(tmp_path) or "") == ["new", "one"]
    run("commit", "--amend", "-am", "another")  # what was noted is no ancestor any more
    assert last_green(tmp_path) is None
    assert git(tmp_path / "nowhere", "status") is None

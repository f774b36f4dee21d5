"""What the pages show can be typed: commands and options exist, recipes name fields that are there.

Python on the pages runs in tests/test_package.py; what commands of a page answer is held by the
page's own test.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from modicum import recipe_yaml
from modicum.cli.app import app
from modicum.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FENCES = re.compile(r"^ *```(\w+)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """Page and text of each block in one of the languages."""
    for page in PAGES:
        for language, text in FENCES.findall(page.read_text(encoding="utf-8")):
            if language in languages:
                yield page.stem, text


def commands() -> Iterator[tuple[str, list[str]]]:
    """Page and words of each call of modicum."""
    for page, text in blocks("bash", "console"):
        for line in text.replace("\\\n", " ").splitlines():
            called = re.match(r"(?:\$ )?(?:.*-m modicum|(?:\.venv/bin/)?modicum) (.*)", line)
            if called:
                yield page, shlex.split(called[1].partition(" > ")[0], comments=True)


CALLS = [(page, words) for page, words in commands() if "$" not in "".join(words)]
RECIPES = [(page, text) for page, text in blocks("yaml") if "..." not in text]


@pytest.mark.parametrize(("page", "words"), CALLS, ids=[f"{p}: {' '.join(w)}" for p, w in CALLS])
def test_a_command_on_a_page_can_be_typed(page: str, words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    context = click.Context(command, info_name="modicum")
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context("modicum", list(words), parent=context, resilient_parsing=False)
    sets = context.params.get("overrides") or context.params.get("set") or ()
    checked(recipe_yaml.overridden(sets))


@pytest.mark.parametrize(("page", "text"), RECIPES, ids=[page for page, _ in RECIPES])
def test_a_recipe_on_a_page_names_fields_that_are_there(
    monkeypatch: pytest.MonkeyPatch, page: str, text: str
) -> None:
    monkeypatch.chdir(ROOT)  # plugins of the examples
    checked(recipe_yaml.parse(text, page)[0])


def checked(values: dict[str, Any]) -> None:
    """Refuse fields that a recipe does not have."""
    Recipe.model_validate(values)


def test_what_else_a_page_runs_is_there() -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = "\n".join(text for _, text in blocks("bash", "console"))
    scripts = re.findall(r"((?:benchmarks|scripts|recipes)/[\w.-]+)", named)
    assert scripts
    assert [script for script in scripts if not (ROOT / script).exists()] == []
    made = re.findall(r"^(?:\w+=\S+ )*make ([\w-]+)", named, re.MULTILINE)
    assert set(made) <= set(targets)
    assert {"demo", "test"} <= set(made)

"""What the pages show can be typed: commands and options exist, recipes name fields that are there.

The files, extras and settings that they name are there, too. Python on the pages runs in
tests/test_package.py; what commands of a page answer is held by the page's own test.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from packaging.requirements import Requirement

from modicum import recipe_yaml
from modicum.cli.app import app
from modicum.cli.machine_facts import EXTRAS
from modicum.core.local_server import known_host
from modicum.models.hub_models import HubModel
from modicum.recipe import Recipe
from modicum.trainer.folder import _OF_A_START

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FENCES = re.compile(r"^ *```(\w+)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL: dict[str, list[str]] = PROJECT["optional-dependencies"]
CODE = ("python", "py")  # languages of blocks


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


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def brought_by(extra: str) -> set[str]:
    """What an extra brings, as it is imported, with the extras that it names."""
    found = set(EXTRAS[extra][0]) if extra in EXTRAS else set()
    for requirement in map(Requirement, OPTIONAL[extra]):
        if requirement.name == "modicum":
            found = found.union(*map(brought_by, requirement.extras))
    return found


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_names_an_extra_for_what_its_code_imports(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = "\n".join(block for language, block in FENCES.findall(text) if language in CODE)
    known = {name for names, _ in EXTRAS.values() for name in names}
    needed = known & set(re.findall(r"^ *(?:import|from) (\w+)", code, re.MULTILINE))
    named = re.findall(r"(?:modicum\[|extra `)([\w,]+)", text)
    extras = {extra for each in named for extra in each.split(",")} & set(OPTIONAL)
    assert needed <= set().union(*map(brought_by, extras))


def test_the_extra_that_brings_pillow_is_the_one_that_is_named() -> None:
    images = text_of("docs/how-to/your-own-data.md").split("\n## Images\n")[1].split("\n## ")[0]
    named = re.findall(r"modicum\[(\w+)\]", images)
    assert named
    assert all("PIL" in brought_by(extra) for extra in named)


def test_what_commands_need_is_said_before_them() -> None:
    before = text_of("docs/how-to/is-it-really-better.md").partition("```")[0]
    assert "modicum[tuning]" in before
    assert "modicum train demo-pretrain" in before  # which demo-adapt adapts
    [extras] = re.findall(r"'\.\[([\w,]+)\]'", text_of("README.md"))
    assert {"cli", "hf", "serve", "tuning"} <= set(extras.split(","))


def test_the_table_of_extras_has_those_of_the_doctor() -> None:
    table = text_of("docs/how-to/install.md").split("\n## Extras\n")[1]
    (first, _), *rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE)
    assert first == "cli"
    assert rows == [(extra, purpose) for extra, (_, purpose) in EXTRAS.items()]


def test_all_pages_name_the_same_versions_of_python() -> None:
    said = {str(page): " ".join(page.read_text(encoding="utf-8").split()) for page in PAGES}
    ranges = re.findall(r"3\.11 to 3\.\d+", "\n".join(said.values()))
    assert len(set(ranges)) == 1
    assert [name for name, text in said.items() if "Python 3.11 or newer" in text] == []


def test_files_that_the_architecture_names_are_there() -> None:
    named = set(re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.py)`", text_of("docs/architecture.md")))
    assert "core/clock.py" in named
    places = (ROOT, ROOT / "src" / "modicum")
    assert [name for name in named if not any((place / name).is_file() for place in places)] == []


def test_events_that_the_architecture_names_are_those_of_the_trainer() -> None:
    text = text_of("docs/architecture.md")
    [paragraph] = re.findall(r"^\*\*Events.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    files = (ROOT / "src" / "modicum" / "trainer").rglob("*.py")
    code = "".join(file.read_text(encoding="utf-8") for file in files)
    named = re.findall(r"`([a-z_]+)`", paragraph)
    assert named
    assert [name for name in named if f'"{name}"' not in code] == []


def test_what_may_change_at_a_start_is_what_the_page_on_resuming_names() -> None:
    [said] = re.findall(
        r"The sections ([^:]+?) may change\s+at any start", text_of("docs/how-to/resume.md")
    )
    assert {field.rstrip(".:") for field in _OF_A_START} == set(re.findall(r"`([\w.]+)`", said))


def test_code_that_uses_dcp_imports_it() -> None:
    shown = [text for _, text in blocks(*CODE) if re.search(r"^dcp\.", text, re.MULTILINE)]
    assert len(shown) >= 2
    assert all("import torch.distributed.checkpoint as dcp\n" in text for text in shown)


@pytest.mark.parametrize("page", ["serve", "follow-and-stop"])
def test_a_proxy_is_given_a_name_that_is_answered(page: str) -> None:
    text = text_of(f"docs/how-to/{page}.md")
    [host] = re.findall(r"proxy_set_header Host (\S+);", text)
    assert known_host(host)
    assert not known_host("models.example.org")
    assert "with status 421" in " ".join(text.split())


def test_the_page_on_slurm_shows_the_script_as_it_is() -> None:
    script = text_of("recipes/slurm.sbatch")
    [shown] = [text for page, text in blocks("bash") if page == "slurm" and "#SBATCH" in text]
    lines = [line for line in shown.splitlines() if line]
    assert [line for line in script.splitlines() if line in lines] == lines
    assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in lines
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    said = f"{asked['cpus-per-task']} cores of each, and {int(asked['time'][:2])} hours"
    assert said in " ".join(text_of("docs/how-to/slurm.md").split())


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/start-a-recipe.md"])
def test_a_model_of_the_hub_is_named_as_it_is_read(page: str) -> None:
    text = text_of(page)
    named = re.findall(r"--model (hub:[\w/.,=-]+)", text)
    assert [HubModel.parsed(each).name for each in named] == ["OWNER/NAME"] * max(1, len(named))
    assert "modicum[hf]" in text


def test_the_index_leads_to_every_guide() -> None:
    linked = set(re.findall(r"\]\(([\w-]+/[\w-]+\.md)", text_of("docs/index.md")))
    guides = {
        f"{folder}/{page.name}"
        for folder in ("how-to", "tutorials")
        for page in (ROOT / "docs" / folder).glob("*.md")
    }
    assert guides - linked == set()

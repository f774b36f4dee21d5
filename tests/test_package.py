from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import modicum
from modicum.core.contracts.catalog import ROOMS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules_after(statement: str) -> set[str]:
    """What a fresh interpreter has imported once it has run `statement`."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in found}


def test_import_brings_neither_torch_nor_pydantic_nor_any_part_of_modicum() -> None:
    loaded = modules_after("import modicum")
    assert not loaded & {"torch", "pydantic", "numpy", "typer", "yaml"}
    assert {name for name in loaded if name.startswith("modicum")} == {"modicum"}


def test_recipe_and_catalog_do_not_import_torch() -> None:
    loaded = modules_after(
        "from modicum.core.contracts.catalog import catalog; catalog();"
        "import modicum; modicum.Recipe"
    )
    assert "modicum.recipe" in loaded
    assert not loaded & {"torch", "numpy", "transformers"}


def test_every_public_name_is_there_and_listed() -> None:
    assert set(modicum.__all__) <= set(dir(modicum))
    for name in modicum.__all__:
        assert getattr(modicum, name) is not None
    from modicum.notebook import train
    from modicum.planner import plan

    assert modicum.plan is plan
    assert modicum.train is train


def test_every_room_is_a_lazy_attribute() -> None:
    folders = {path.parent.name for path in (ROOT / "src/modicum").glob("*/__init__.py")}
    assert folders.intersection(ROOMS) <= set(modicum.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'modicum' has no attribute 'trian'"):
        _ = modicum.trian


def test_the_installed_version_is_the_one_in_the_source() -> None:
    assert metadata.version("modicum") == modicum.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", modicum.__version__)


def test_a_thin_install_is_torch_safetensors_and_pydantic() -> None:
    requirements = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    assert {r.name for r in requirements} == {"torch", "safetensors", "pydantic"}


def test_every_requirement_is_pinned_within_its_range() -> None:
    project, pinned = PROJECT["project"], pins()
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    lists.append(PROJECT["build-system"]["requires"])
    for requirement in (Requirement(text) for requirements in lists for text in requirements):
        if requirement.name != "modicum":
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement
    assert pinned["torch"] == "2.13.0"


def test_the_lowest_versions_are_those_of_every_requirement() -> None:
    project = PROJECT["project"]
    extras = [texts for name, texts in project["optional-dependencies"].items() if name != "docs"]
    lowest = {}
    for requirement in map(Requirement, chain(project["dependencies"], *extras)):
        bounds = [part.version for part in requirement.specifier if part.operator == ">="]
        if bounds:  # stubs and modicum itself have none
            lowest.setdefault(canonicalize_name(requirement.name), set()).update(bounds)
    assert {name: {version} for name, version in pins("constraints-lowest.txt").items()} == lowest


def test_the_page_on_installing_names_the_oldest_torch() -> None:
    torch = next(
        one
        for each in PROJECT["project"]["dependencies"]
        if (one := Requirement(each)).name == "torch"
    )
    oldest = next(each.version for each in torch.specifier if each.operator == ">=")
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    assert f"if that is {oldest} or newer" in " ".join(page.split())


def test_the_tests_run_on_the_pinned_versions() -> None:
    """The usual ones, or the lowest."""
    names = ("torch", "pydantic", "safetensors")
    installed = [Version(metadata.version(name).split("+")[0]) for name in names]
    files = ("constraints.txt", "constraints-lowest.txt")
    assert installed in [[Version(pins(file)[name]) for name in names] for file in files]


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-lowest.txt"])
def test_constraints_hold_exact_versions_and_no_index(file: str) -> None:
    lines = (ROOT / file).read_text().splitlines()
    entries = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!]+", line) for line in entries)


# They ask a server, or read what the page's commands made: these files run their code.
ELSEWHERE = {
    "serve": "tests/cli/test_serve.py",
    "classify-texts": "tests/cli/test_classify_page.py",
}
PAGES = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.expensive] if "m.train(" in text else [])
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if "```python" in (text := page.read_text(encoding="utf-8")) and page.stem not in ELSEWHERE
]


@pytest.mark.parametrize("page", PAGES)
def test_python_in_the_documentation_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # pages may write files
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile("\n".join(blocks), page.name, "exec"), {})


def test_what_runs_elsewhere_is_there() -> None:
    assert all((ROOT / file).is_file() for file in ELSEWHERE.values())


def test_dear_tests_are_sampled_by_their_names_and_the_seed(pytestconfig: pytest.Config) -> None:
    plugins = pytestconfig.pluginmanager.get_plugins()
    here = str(ROOT / "tests/conftest.py")
    [conftest] = [plugin for plugin in plugins if getattr(plugin, "__file__", None) == here]
    names = [f"tests/test_a.py::test_{number}" for number in range(600)]
    first, second = ({name for name in names if conftest.sampled(name, seed)} for seed in "12")
    assert 65 < len(first) < 135
    assert 4 < len(first & second) < 35
    assert "tests/test_a.py::test_0" in first
    halves = [{name for name in names if conftest.sampled(name, seed, 2)} for seed in "12"]
    assert all(250 < len(half) < 350 for half in halves)
    assert all(conftest.sampled(name, "1", 1) for name in names)

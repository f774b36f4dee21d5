"""The guide to a method of one's own, held to its example; and the signatures of rooms to come."""

from __future__ import annotations

import ast
import doctest
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.core.contracts.catalog import ROOMS, MethodRecord, catalog, read_file
from modicum.core.contracts.method import Method
from modicum.proofs import run_battery
from modicum.recipe_yaml import load

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDE = (DOCS / "contributing/new-method.md").read_text(encoding="utf-8")
EXAMPLE = DOCS / "contributing/examples/signed_sums.py"
PAGES = sorted((DOCS / "rooms").glob("*.md"))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    """The part of the guide under a heading of the second level."""
    return GUIDE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def code(text: str) -> list[str]:
    """Lines that are not blank."""
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture
def record() -> MethodRecord:
    [found] = read_file(EXAMPLE)
    return found


# The guide


def test_the_file_of_the_guide_is_the_example() -> None:
    pieces = blocks(section("The file"), "python")
    assert len(pieces) == 4
    assert code("\n".join(pieces)) == code(EXAMPLE.read_text(encoding="utf-8"))


def test_what_the_guide_says_to_subclass_and_to_read_is_there() -> None:
    rows = [row.split("|")[2:7] for row in section("Which room").splitlines() if "`" in row][1:]
    rows = [row for row in rows if len(row) == 5]
    assert {cells[0].strip(" `") for cells in rows} == {
        "adapters", "optim", "memory", "comm", "compress", "linears", "tasks",
    }  # fmt: skip
    sources = ROOT / "src/modicum"
    for cells in rows:
        room = cells[0].strip(" `")
        for file in re.findall(r"`(\w+\.py)`", cells[4]):
            assert (sources / room / file).is_file(), file
        for module in re.findall(r"\(`([\w.]+)`\)", cells[2]):
            text = (sources / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
            named = cells[2].split(f"(`{module}`)")[0].split(")")[-1]
            for name in re.findall(r"`([A-Z]\w+)`", named):
                assert re.search(rf"^class {name}\b", text, re.MULTILINE) or name == "Method", name


def test_the_recipe_of_the_guide_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [text] = blocks(section("Check it, prove it, use it"), "yaml")
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(ROOT)
    value = load(tmp_path / "recipe.yaml").method("adapter")
    assert value is not None
    assert value.model_dump()["rank"] == 8


@pytest.mark.expensive
def test_the_optimizer_of_the_guide_passes_its_battery(tmp_path: Path) -> None:
    [text] = blocks(section("An optimizer"), "python")
    (tmp_path / "sign_descent.py").write_text(text, encoding="utf-8")
    [optimizer] = read_file(tmp_path / "sign_descent.py")
    results = run_battery(optimizer, cheap_only=True)
    assert len(results) > 15
    assert [(result.name, result.message) for result in results if not result.passed] == []


@pytest.mark.slow
def test_the_commands_of_the_guide_say_what_it_says() -> None:
    [text] = blocks(section("Check it, prove it, use it"), "bash")
    ended = []
    for line in text.splitlines():
        command = [sys.executable, "-m", *shlex.split(line), "--json"]
        ended.append(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False))
    assert [one.returncode for one in ended] == [0, 0, 0, 0]
    checks, proof, null, methods = (json.loads(one.stdout) for one in ended)
    assert len(checks) >= 28
    assert all(row["passed"] for row in checks)
    assert (proof["verdict"], null["verdict"]) == ("holds", "does not hold")
    assert (proof["claim_verdict"], null["defects"]) == ("holds", [])
    assert [row["part"] for row in null["criteria"]] == ["check", "claim", "against"]
    assert [row["passed"] for row in null["criteria"][:2]] == [False, False]
    [listed] = [method for method in methods if method["name"] == "signed_sums"]
    assert proof["against"]["rival"] == listed["against"]["rival"]
    assert "signed_sums" in {method["name"] for method in methods}


# Its example


@pytest.mark.expensive
def test_the_example_passes_its_battery(record: MethodRecord) -> None:
    results = run_battery(record)
    assert [(result.name, result.message) for result in results if not result.passed] == []
    # What starts elsewhere, does not merge, is generated, writes, convolves or follows steps is
    # tested otherwise.
    others = {
        *("starts_elsewhere", "without_a_dense_form_merging_is_refused", "on_convolutions"),
        "generated_tensors_are_a_function_of_seed_and_site",
        "generated_tensors_are_kept_by_their_seed",
        *("patches_leave_no_trace", "changes_its_entries_alone"),
        *("gradients_are_the_dense_ones", "patches_that_cannot_be_are_refused"),
        *("steps_count_once", "steps_add_their_term_once", "steps_resume", "steps_compile"),
        *("steps_under_transformers", "steps_leave_idle_factors"),
    }
    assert {result.name for result in results if result.skipped} == others


def test_the_lines_in_the_docstring_of_the_example_run(record: MethodRecord) -> None:
    found = doctest.testmod(sys.modules[record.load().__module__])
    assert found.attempted == 5
    assert found.failed == 0


def test_the_example_is_in_no_library_here(record: MethodRecord) -> None:
    assert record.name not in catalog()
    import peft

    known = {kind.value.lower().replace("_", "") for kind in peft.PeftType}
    assert "miss" in known
    assert "signedsums" not in known


def adapted(method: type[Method], width: int, *, seed: int = 0, **fields: object) -> nn.Module:
    model = nn.Sequential(nn.Linear(width, 3))
    method(**fields).attach(model, seed=seed)  # type: ignore[attr-defined]
    return model[0].layers_by_adapter["default"]


@pytest.mark.parametrize(("width", "rank"), [(7, 3), (8, 4), (5, 9), (1, 1)])
def test_each_input_is_in_one_sum_with_its_sign(
    record: MethodRecord, width: int, rank: int
) -> None:
    layer = adapted(record.load(), width, rank=rank)
    x = torch.arange(1.0, width + 1)
    expected = [0.0] * rank
    for index in range(width):
        expected[index % rank] += float(x[index] * layer.signs[index])
    assert layer.summed(x).tolist() == expected
    assert set(layer.signs.tolist()) <= {-1, 1}


def test_sums_are_as_large_as_inputs_on_average(record: MethodRecord) -> None:
    x = torch.linspace(-1, 3, 40)
    norms = [
        adapted(record.load(), 40, seed=s, rank=8).summed(x).square().sum() for s in range(400)
    ]
    # A mean of 400 draws, whose deviation is below sqrt(2 / rank) of the mean.
    assert float(torch.stack(norms).mean() / x.square().sum()) == pytest.approx(1, abs=0.1)
    unsigned = adapted(record.load(), 40, rank=8, signed=False).summed(x)
    assert float(unsigned.square().sum() / x.square().sum()) > 2


def test_without_signs_it_is_the_miss_of_peft(record: MethodRecord) -> None:
    import peft

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    config = peft.MissConfig(r=4, target_modules=["layer"])
    theirs, ours = peft.get_peft_model(One(), config), One()
    adapter = record.load()(rank=4, signed=False).attach(ours)  # type: ignore[attr-defined]
    [(_, layer)] = adapter.layers()
    factor = theirs.base_model.model.layer.miss_block["default"]
    with torch.no_grad():
        layer.B.copy_(factor.normal_().T)
    x = torch.randn(6, 12)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


# Rooms without methods

PAIRS = {
    "solvers": ("MASHA", "TMECor"),
    "graphs": ("FastRP", "DyGRASS"),
    "simulate": ("InTAR", "HGCN"),
    "federated": ("Parrot", "FusionAI"),
    "serve": ("SLoRA", "DEIS"),
    "parallel": ("Megatron", "Hecate"),
    "data": ("Solar", "Multigrid"),
    "checkpoint": ("REFT", "DataStates"),
}


def signatures(page: Path) -> str:
    return "\n\n".join(blocks(page.read_text(encoding="utf-8"), "python"))


def test_every_room_without_methods_has_a_page() -> None:
    with_methods = {record.room for record in catalog().values()}
    assert {page.stem for page in PAGES} == set(PAIRS)
    assert set(PAIRS) == set(ROOMS) - with_methods - {"linears", "models"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_signatures_holds_signatures_of_two_methods(page: Path) -> None:
    text, tree = page.read_text(encoding="utf-8"), ast.parse(signatures(page))
    for title in ("Signatures", "Who does what", "Where they pull apart"):
        assert f"\n## {title}\n" in text
    for word in ("Resume", "Ledger", "Battery"):
        assert f"\n**{word}.**" in text
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert set(PAIRS[page.stem]) <= classes.keys()
    assert [name for name, node in classes.items() if not ast.get_docstring(node)] == []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    bodies = [node for function in functions for node in function.body]
    # The code arrives with the methods.
    assert all(isinstance(node, ast.Expr) for node in bodies)
    assert [f.name for f in functions if f.returns is None] == []


@pytest.mark.slow
def test_the_signatures_fit_each_other_and_what_is_there(tmp_path: Path) -> None:
    for page in PAGES:
        (tmp_path / f"{page.stem}_room.pyi").write_text(signatures(page), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    stubs = map(str, sorted(tmp_path.glob("*.pyi")))
    ended = subprocess.run([*command, *stubs], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout

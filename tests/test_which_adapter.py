"""The page "Which adapter should I use?" says what committed results still carry."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from modicum.planner.advice import ANSWERS

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.committed


@pytest.fixture(name="written", scope="module")
def _written() -> ModuleType:
    spec = importlib.util.spec_from_file_location("which_adapter", ROOT / "docs/which_adapter.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["which_adapter"] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        spec.loader.exec_module(module)
    return module


def test_the_figure_of_each_answer_carries_it(written: ModuleType) -> None:
    carried = written.carried()
    assert set(carried) == {answer.name for answer in ANSWERS}
    fallen = {name: each.words for name, each in carried.items() if not each.holds}
    assert not fallen, fallen


def test_a_figure_that_no_longer_carries_its_answer_is_noticed(
    written: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads((ROOT / "benchmarks/results/switching.json").read_text(encoding="utf-8"))
    found["places"]["one layer of 4096"]["shira, sized"]["lora_over"]["median"] = 2.0
    (tmp_path / "switching.json").write_text(json.dumps(found), encoding="utf-8")
    monkeypatch.setattr(written, "RESULTS", tmp_path)
    assert not written._switching().holds


def test_every_adapter_has_a_row(written: ModuleType) -> None:
    from modicum.recipe import methods_for

    page = written.page()
    assert all(f"| [`{name}`]" in page for name in methods_for("adapter"))
    assert all(answer.need in page for answer in ANSWERS)


def test_the_pictures_of_the_page_are_made_with_it(written: ModuleType) -> None:
    made = written.files()
    page = "how-to/which-adapter.md"
    shown = re.findall(r"\]\(\.\./(assets/[\w-]+\.svg)\)", made[page])
    assert sorted({page, *shown}) == sorted(made)
    quality, costs = (made[f"assets/{name}.svg"] for name in ("which-adapter", "adapters"))
    for name in written.result("adapter_quality")["methods"]:
        assert f"<!-- {name} -->" in quality
    found = written.result("adapters")
    widths = {f"width {row['width']}" for row in found["curve"]}
    for words in (*found["steps"], *widths, "positions (dotted: the bound; x: measured)"):
        assert f"<!-- {words} -->" in costs

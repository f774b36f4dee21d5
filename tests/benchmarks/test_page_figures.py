"""Figures on pages are those of the committed results, or are said to have been seen once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.benchmarks.conftest import ROOT

pytestmark = pytest.mark.committed
GUIDES = ROOT / "docs" / "how-to"


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")
    )
    return found


def page(name: str) -> str:
    """A page's text, as one line."""
    return " ".join((GUIDES / f"{name}.md").read_text(encoding="utf-8").split())


def short(value: float, digits: int = 0) -> str:
    """A figure as pages write it: 6e-7."""
    return f"{value:.{digits}e}".replace("e-0", "e-")


def equal(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """How many texts are equal, and of how many."""
    same, every = (sum(row[key] for row in rows.values()) for key in ("same_text", "prompts"))
    return f"{same} of {every}"


def test_the_table_of_what_llama_cpp_read_back_is_the_committed_one() -> None:
    """If this fails: the lines that it expects are those of the result."""
    models, text = result("gguf")["models"], (GUIDES / "gguf.md").read_text(encoding="utf-8")
    parted: dict[str, set[str]] = {}
    for dtype in models["llama"]:
        every = {name: row[dtype] for name, row in models.items() if dtype in row}
        runs = {name: row for name, row in every.items() if name.startswith("run")}
        error = short(max(row["logits_error"] for row in runs.values()))
        of = " of the largest logit" if dtype == "f32" else ""
        assert f"| `{dtype}` | {equal(every)} | {equal(runs)} | {error}{of} |\n" in text
        parted[dtype] = {
            name for name, row in every.items() if row["same_text"] + row["ties"] < row["prompts"]
        }
    parted = {dtype: names for dtype, names in parted.items() if names}
    assert parted == {"f16": {"llama, llama3 scaling"}}
    exact = {name: row["f32"] for name, row in models.items()}
    assert {name for name, row in exact.items() if row["ties"]} == {"gemma"}
    gemma = exact.pop("gemma")["logits_error"]
    others = short(max(row["logits_error"] for row in exact.values()), digits=1)
    said = f"of all but `gemma` was {others}, and of `gemma` {short(gemma)},"
    assert said in page("gguf")


def test_the_times_of_a_page_with_a_million_steps_are_the_committed_ones() -> None:
    found, text = result("browser")["million"], page("follow-and-stop")
    drawn, stretch = found["seconds_until_drawn"], found["zoom"]["median_until_every_step"]
    assert f"drawn after {drawn:.1f} s on two cores, a stretch is there in {stretch:.2f} s" in text
    busy, new = found["longest"], found["follow"]["median_until_shown"]
    assert f"longer than {busy:.2f} s, and a new step is shown after {new:.1f} s" in text


def test_figures_of_several_machines_are_the_committed_ones() -> None:
    text, ratios = page("several-machines"), result("comm_auto")["ratios"].values()
    first, second, third = (f"{each['megabits']:.0f}" for each in ratios)
    assert f"on links of {first}, {second} and {third} Mb/s" in text
    above = max(each["loss_off"] for each in ratios)
    settings = result("comm_auto")["settings"]
    assert f"ACP-SGD and PowerSGD had rank {settings['run']['rank']}, it took ACP-SGD" in text
    said = f"its loss after {settings['steps']} steps was {above:.1%}"
    assert said.replace("%", " %") in text
    cost = result("diagnosis")["parts"]["ports"]["step watched over step not watched, in a ring"]
    longer = f"{cost['median'] - 1:.1%}".replace("%", " %")
    assert f"took {longer} longer in the median of {cost['count']} pairs" in text


def test_the_readme_names_the_pytorch_that_ran_on_a_gpu() -> None:
    version = result("gpu")["versions"]["torch"].rpartition(".")[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"with PyTorch {version}, " in readme


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("budget", "by 366 MB instead of 415"),
        ("budget", "by 519 MB"),
        ("compile", "medians of 12 interleaved pairs"),
        ("several-machines", "11.8 s in place of 13.2"),
        ("under-other-trainers", "PowerSGD to 1.93"),
    ],
)
def test_figures_without_a_result_are_said_to_be_seen_once(name: str, figure: str) -> None:
    paragraphs = (GUIDES / f"{name}.md").read_text(encoding="utf-8").split("\n\n")
    [said] = [text for each in paragraphs if figure in (text := " ".join(each.split()))]
    assert "seen once" in said.lower()

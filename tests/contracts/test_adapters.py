"""The battery of adapters lets a plugin pass, and finds the mistakes of a broken one."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.core.contracts.catalog import read_file
from modicum.proofs import run_battery
from modicum.proofs.contracts.adapters.trace import check_trace

PLUGINS = Path(__file__).parent / "plugins"
pytestmark = pytest.mark.expensive  # each runs a battery


def test_a_plugin_in_one_file_passes_the_battery() -> None:
    (record,) = read_file(PLUGINS / "outer.py")
    told = []
    results = run_battery(record, cheap_only=True, listener=told.append)
    assert [(result.name, result.message) for result in results if not result.passed] == []
    assert told == results
    # What starts elsewhere, does not merge, draws, writes or convolves is tested otherwise.
    others = {
        "starts_elsewhere",
        "without_a_dense_form_merging_is_refused",
        "generated_tensors_are_kept_by_their_seed",
        "generated_tensors_are_a_function_of_seed_and_site",
        "on_convolutions",
        "steps_count_once",
        "steps_add_their_term_once",
        "steps_resume",
        "steps_leave_idle_factors",
        "patches_leave_no_trace",
        "changes_its_entries_alone",
        "gradients_are_the_dense_ones",
        "patches_that_cannot_be_are_refused",
    }
    assert {result.name for result in results if result.skipped} == others


def test_a_change_of_weight_and_bias_passes_the_battery() -> None:
    (record,) = read_file(PLUGINS / "mixed.py")
    results = run_battery(record, cheap_only=True)
    assert [(result.name, result.message) for result in results if not result.passed] == []


def test_a_change_of_what_blocks_give_passes_the_battery() -> None:
    (record,) = read_file(PLUGINS / "behind.py")
    results = run_battery(record, cheap_only=True)
    assert [(result.name, result.message) for result in results if not result.passed] == []


@pytest.mark.parametrize("name", ["tallying", "penalised", "consistent"])
def test_adapters_that_follow_steps_pass_the_battery(name: str) -> None:
    (record,) = read_file(PLUGINS / f"{name}.py")
    results = run_battery(record)
    assert [(result.name, result.message) for result in results if not result.passed] == []
    ran = {result.name for result in results if not result.skipped}
    assert ("steps_count_once" in ran) == (name != "consistent")
    assert ("steps_add_their_term_once" in ran) == (name == "penalised")


def test_a_broken_plugin_is_found_wanting_and_told_why() -> None:
    (record,) = read_file(PLUGINS / "broken.py")
    results = {result.name: result for result in run_battery(record, cheap_only=True)}
    wanting = {name for name, result in results.items() if not result.passed}
    assert wanting >= {"merged_equals_unmerged", "parameters_and_bytes", "work", "dropout"}
    assert "merged model computes something else" in results["merged_equals_unmerged"].message
    assert "PyTorch counts" in results["work"].message
    assert results["starts_as_the_base"].passed
    assert results["file_round_trip"].skipped
    with pytest.raises(AssertionError, match="the ledger says"):
        check_trace(record.load())


def test_a_value_can_be_checked_too() -> None:
    from modicum.adapters import LoRA

    results = run_battery(LoRA(rank=3, alpha=6.0), cheap_only=True)
    assert all(result.passed for result in results)

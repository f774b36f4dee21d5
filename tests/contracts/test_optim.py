"""Values that the battery's own choice leaves out, and methods that are no optimizer of torch's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modicum.core.contracts.catalog import read_file
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.optim import FRUGAL, DCTAdamW, GaLore, Trion
from modicum.proofs import run_battery

PLUGINS = Path(__file__).parent / "plugins"
# What the values of the battery's own choice leave out.
VALUES = [
    GaLore.value(rank=3, update_gap=2, side="full", svd="randomized", on_refresh="rotate"),
    GaLore.value(rank=18, update_gap=3, side="reverse_std", projector_bits=16, stagger=True),
    GaLore.value(rank=2, update_gap=2, on_refresh="reset", side="left"),
    DCTAdamW.value(rank=5, feedback_bits=4, transform="product", norm=2, state_bits=8),
    DCTAdamW.value(rank=18, update_gap=2, on_refresh="keep", feedback_bits=32, state_bits=16),
    Trion.value(rank=18, transform="product", state_bits=16, shape_factor="match_rms_adamw"),
    # As many bytes in each round in which the ledger is compared.
    FRUGAL.value(density=0.5, part="tensors", update_gap=4),
    FRUGAL.value(density=0.3, part="entries", update_gap=2, outside="plain", state_bits=8),
    FRUGAL.value(density=0.3, part="rows", update_gap=2, outside_scale=0.1, state_bits=16),
    FRUGAL.value(density=0.2, part="svd", update_gap=2),
    FRUGAL.value(density=0.5, part="orthogonal", update_gap=3, outside="nothing"),
    FRUGAL.value(density=0.0),
    FRUGAL.value(density=1.0, part="columns", update_gap=2),
]


def named(value: OptimizerMethod) -> str:
    fields = value.fields()
    said = ("side", "on_refresh", "feedback_bits", "shape_factor", "part", "density")
    return "-".join(str(fields[name]) for name in said if name in fields)


@pytest.mark.parametrize("value", VALUES, ids=named)
def test_values_of_optimizers(value: OptimizerMethod) -> None:
    results = run_battery(value, cheap_only=True)
    assert [(result.name, result.message) for result in results if not result.passed] == []


@pytest.mark.parametrize("name", ["forward_only", "keep_better", "student", "pull"])
def test_a_method_without_an_optimizer_is_looked_at_by_its_updates(name: str) -> None:
    (record,) = read_file(PLUGINS / f"{name}.py")
    results = run_battery(record, cheap_only=True)
    assert [(result.name, result.message) for result in results if not result.passed] == []
    assert sum(not result.skipped for result in results) >= 6


def test_a_program_with_mistakes_is_found_wanting() -> None:
    (record,) = read_file(PLUGINS / "forward_only.py")
    kind = record.load()

    class Careless(kind):
        def bind_step(self, context):
            program = kind.bind_step(self, context)
            loss = type(program).loss
            program.rehearse = lambda batch, tokens: program.move(0, 0.1)
            program.loss = lambda *given: torch.nan_to_num(loss(program, *given))
            program.context = replace(program.context, seed=torch.initial_seed())
            return program

    results = {result.name: result for result in run_battery(Careless, cheap_only=True)}
    wanting = {name for name, result in results.items() if not result.passed}
    assert wanting >= {
        "rehearsing_changes_nothing", "what_is_no_number_is_skipped", "program_is_deterministic",
    }  # fmt: skip

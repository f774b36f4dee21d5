"""The bench of saved activations counts what adapters keep, above what frozen blocks keep."""

from __future__ import annotations

import pytest
import torch

from modicum.adapters import LoRA, LoRAFA, RandLoRA
from modicum.core.contracts.catalog import find
from modicum.models import ModelConfig
from modicum.proofs.adapters.activation_bench import ActivationBench
from modicum.proofs.adapters.randlora import best_low_rank, captured, targets
from modicum.proofs.base import ProofRun

SMALL = ModelConfig(vocabulary_size=8, width=16, layers=2, heads=2, mlp_width=24, context=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thin_values_and_inputs_are_counted_once(dtype: torch.dtype) -> None:
    bench = ActivationBench(SMALL, rows=2, tokens=8, dtype=dtype)
    thin = bench.sites(LoRA()) * bench.positions * 4  # bytes a rank, in the factors' precision
    assert bench.sites(LoRA()) == 2 * 7
    kept = {value: bench.kept(value) for value in (LoRAFA(rank=2), LoRAFA(rank=6), LoRA(rank=2))}
    frozen, higher, lora = kept.values()
    assert frozen - bench.floor == 2 * thin
    assert higher - frozen == 4 * thin
    # LoRA keeps what q, k and v read once, as it does what gate and up read.
    inputs = 2 * (16 + 16 + 16 + 24) * bench.positions * dtype.itemsize
    assert lora - frozen <= inputs
    assert lora > frozen
    assert bench.trained_in_full > lora


def test_the_best_of_any_lora_is_that_of_the_singular_values() -> None:
    changes = targets()
    assert best_low_rank(changes["a flat spectrum"], 8.5) == pytest.approx(8.5 / 64, rel=1e-4)
    assert best_low_rank(changes["a matrix of rank 8"], 8) == pytest.approx(1.0, rel=1e-4)
    assert all(change.norm() == pytest.approx(8.0, rel=1e-4) for change in changes.values())


def test_what_an_adapter_captures_is_found_by_fitting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modicum.proofs.adapters.randlora.FITTING_STEPS", 40)
    change = targets()["a flat spectrum"]
    run = ProofRun(find("randlora"), null=False, full=False)
    few, more = (captured(run, "fit", RandLoRA(rank=rank), change) for rank in (32, 4))
    assert 0 < few < more < 1

"""Plans of runs that make their model smaller first: the dense model must fit too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from modicum.core.errors import DoesNotFit
from modicum.core.layers.factorize import svd_bytes
from modicum.core.machine.record import placeholder
from modicum.planner import plan
from modicum.planner.profiles import profile
from modicum.recipe import Recipe

WIDE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
DENSE = 2 * 1.07e9  # bytes of its parameters in bf16


def asked(folder: Path, memory: str) -> Recipe:
    (folder / "config.json").write_text(json.dumps(WIDE))
    (folder / "rows.jsonl").write_text(json.dumps({"text": "to be or not to be"}) + "\n")
    return Recipe(
        model={"path": str(folder)},
        data={"path": str(folder / "rows.jsonl"), "sequence_length": 128},
        adapter={"method": "lora"},
        compress={"method": "fwsvd", "share": 0.3},
        training={"precision": "bf16", "steps": 10, "batch_size": 1},
        budget={"memory": memory},
    )


def test_updates_that_fit_do_not_make_the_dense_model_fit(tmp_path: Path) -> None:
    machine = profile("rtx4090")
    made = plan(asked(tmp_path, "6GB"), machine=machine).prediction
    # A layer is decomposed in float64, which outweighs a pass over so short a row.
    assert made.peak_before == pytest.approx(DENSE + svd_bytes(4096, 11008), rel=0.02)
    assert made.peak_bytes < 1.9e9
    with pytest.raises(DoesNotFit) as refused:
        plan(asked(tmp_path, "2GB"), machine=machine)
    changes = refused.value.changes
    assert not any("compress.method=" in change for change in changes)
    assert any("compress=null" in change and "linear.method=" in change for change in changes)


def test_what_looks_at_no_data_holds_the_model_and_one_layer(tmp_path: Path) -> None:
    machine = profile("rtx4090")
    recipe = asked(tmp_path, "6GB")
    watched = plan(recipe, machine=machine).prediction.peak_before
    pruned = recipe.changed(compress={"method": "structured_pruning", "score": "magnitude"})
    assert DENSE < plan(pruned, machine=machine).prediction.peak_before < watched


def test_before_the_first_update_nothing_has_loaded_the_compiler(tmp_path: Path) -> None:
    made = plan(asked(tmp_path, "6GB"), machine=profile("rtx4090"))
    assert made.loaded_last == 0  # a profile says nothing of it
    on_cpu = replace(made, device="cpu", process_base=10**9, record=placeholder())
    before, less = on_cpu.process_bytes, replace(on_cpu, loaded_last=3 * 10**8).process_bytes
    assert before is not None
    assert less is not None
    assert before >= 10**9 + made.prediction.peak_before
    assert less == before - 3 * 10**8
    # Of an update all of it counts.
    least = {replace(on_cpu, loaded_last=each * 10**9).process_bytes for each in (8, 9)}
    assert len(least) == 1
    assert 10**9 + made.prediction.peak_bytes <= least.pop() < less

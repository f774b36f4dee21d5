"""Runs that take neurons and heads out of their base first: full tuning, an adapter, and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, trains

from modicum import adapters
from modicum.core.errors import InputError
from modicum.core.layers.full_model import COMPRESSION
from modicum.core.layers.map import Reduction, map_of
from modicum.core.ranks.ranks import Ranks
from modicum.core.weight_digests import weight_digests
from modicum.models import huggingface
from modicum.planner import plan
from modicum.recipe import Recipe

pytestmark = pytest.mark.expensive
PRUNED = {"method": "structured_pruning", "neurons": 0.3, "groups": 0.5, "examples": 8}
LORA = {"method": "lora", "rank": 3}


@pytest.fixture(scope="module")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    made = recipe_of(questions, model={"heads": 2, "kv_heads": 2}, training={"steps": 4})
    assert trains(Ranks(), made, folder) == "done"
    return folder / "model"


def pruned(base: Path, data: Path, **sections: Any) -> dict[str, Any]:
    made = recipe_of(data, **sections)
    return made | {"model": {"path": str(base)}, "compress": PRUNED | made.get("compress", {})}


@pytest.fixture(scope="module")
def alone(base: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pruned") / "run"
    assert trains(Ranks(), pruned(base, questions, compress={"first_blocks": 1}), folder) == "done"
    return folder


def test_the_model_that_it_gives_is_small_and_says_what_it_kept(
    base: Path, questions: Path, alone: Path
) -> None:
    full, small = huggingface.load(base), huggingface.load(alone / "model")
    widths = small.config.forms.blocks
    assert {name: own.widths for name, own in widths.items()} == {
        "model.layers.1": {"heads": 1, "kv_heads": 1, "mlp_width": 68}
    }
    assert column(alone, "loss")[-1] < column(alone, "loss")[0]
    said = json.loads((alone / "base" / COMPRESSION).read_text())
    assert said["method"]["name"] == "structured_pruning"
    assert said["full_weights"] == weight_digests(base)
    kept = Reduction.from_json(said["kept"], map_of(full))
    begun = huggingface.load(alone / "base").state_dict()
    for name, tensor in full.state_dict().items():
        assert torch.equal(begun[name], kept.reduced(name, tensor)), name
    made = pruned(base, questions, compress={"first_blocks": 1})
    before = plan(Recipe(**(made | {"compress": None}))).prediction
    assert plan(Recipe(**made)).prediction.peak_bytes < before.peak_bytes


def test_killed_it_resumes_to_the_bit(
    base: Path, questions: Path, alone: Path, tmp_path: Path
) -> None:
    made = pruned(base, questions, compress={"first_blocks": 1})
    assert trains(Ranks(), made, tmp_path / "run", (0, 6)).startswith("4: stopped")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(alone)


@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_two_ranks_do_what_one_does(
    pool: Pool, base: Path, questions: Path, alone: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    made = pruned(base, questions, compress={"first_blocks": 1}, parallel=parallel)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    both = [json.loads((run / "base" / COMPRESSION).read_text())["kept"]
            for run in (tmp_path / "run", alone)]  # fmt: skip
    assert both[0] == both[1]
    losses = column(tmp_path / "run", "loss")
    assert losses == pytest.approx(column(alone, "loss"), rel=1e-3)


def test_an_adapter_learns_on_what_is_left_and_loads_there(
    base: Path, questions: Path, tmp_path: Path
) -> None:
    made = pruned(base, questions, compress={"score": "magnitude"}) | {"adapter": LORA}
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    losses = column(tmp_path / "run", "loss", "evaluations")
    assert losses[-1] < losses[0]
    model, ids = huggingface.load(tmp_path / "run" / "base"), torch.arange(24).view(2, 12)
    before = model(ids)
    adapters.load(model, tmp_path / "run" / "adapter")
    assert not torch.equal(model(ids), before)


def test_neurons_alone_from_all_blocks_leave_a_model_that_transformers_reads(
    base: Path, questions: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    made = pruned(base, questions, compress={"score": "random", "groups": 0.0})
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    ours, ids = huggingface.load(tmp_path / "run" / "model"), torch.arange(24).view(2, 12)
    assert (ours.config.mlp_width, ours.config.forms.plain) == (68, True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_pruned_in_a_run_is_refused_with_the_field(
    base: Path, questions: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2Config(
        vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(theirs).save_pretrained(tmp_path / "gpt2")
    for file in base.glob("*token*"):
        (tmp_path / "gpt2" / file.name).write_bytes(file.read_bytes())
    made = pruned(base, questions)
    for wrong, problem in (
        ({"model": {"path": str(tmp_path / "gpt2")}}, r"compress\.method: .*as transformers has"),
        ({"compress": {**PRUNED, "groups": 0.2}}, r"compress\.groups: .*no block loses groups"),
        ({"linear": {"method": "nf4"}}, "full-precision weights"),
    ):
        with pytest.raises(InputError, match=problem):
            plan(Recipe(**(made | wrong)))

"""The plan says which experts stay as they are, of adapters and of forms of layers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from decoders import decoder_folder

from modicum.core.layers.loose_matrices import EXPERTS, MATRIX
from modicum.core.layers.meta import on_meta
from modicum.planner import plan
from modicum.planner.left_out import left_out_by, left_out_by_adapter, rows_of_left_out
from modicum.recipe import Recipe
from modicum.tasks import task_of

STAYS = "experts of 2 layers stay as they are, as no form here can hold stacked matrices: "
KINDS = "model.layers.*.mlp.experts.gate_up_proj, model.layers.*.mlp.experts.down_proj"


@pytest.fixture
def recipe(text: Path, tmp_path: Path, tokenizer_folder: Path) -> Recipe:
    """LoRA on a tiny Mixtral in four bits."""
    folder = decoder_folder(tmp_path / "model", "mixtral")
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return Recipe(
        model={"path": str(folder)},
        data={"path": str(text), "sequence_length": 32},
        training={"batch_size": 4},
        linear={"method": "nf4"},
        adapter={"method": "lora", "rank": 2},
    )


def test_forms_and_compressors_leave_experts_dense(recipe: Recipe) -> None:
    task = task_of(recipe)
    config = task.look(recipe).config
    with on_meta():
        model = task.model(config)
    found = left_out_by(recipe, model)
    assert found.keys() == {"linear"}
    assert sorted(set(found["linear"].values())) == [MATRIX, EXPERTS]
    assert len(found["linear"]) == 6
    [row] = rows_of_left_out(recipe, found)
    assert (row["field"], row["value"]) == ("linear.targets", "all-linear")
    assert row["why"].startswith(f"{STAYS}{KINDS}; left out: ")
    other = recipe.changed(linear=None, adapter=None, compress={"method": "fwsvd", "rank": 2})
    assert left_out_by(other, model) == {"compress": found["linear"]}
    excluding = recipe.changed(linear__exclude=["experts", "gate"])
    assert rows_of_left_out(excluding, left_out_by(excluding, model)) == []


@pytest.mark.expensive
@pytest.mark.filterwarnings("ignore:all-linear leaves out")
def test_a_plan_has_a_row_for_each_section_that_leaves_experts(
    recipe: Recipe, traced_here: list[str]
) -> None:
    row = json.loads(json.dumps(plan(recipe).row()))
    said = {each["field"]: each for each in row["choices"]}
    for field in ("linear.targets", "adapter.targets"):
        assert said[field]["value"] == "all-linear"
        assert said[field]["why"].startswith(f"{STAYS}{KINDS}")
    assert traced_here


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "encoder_attn.v_proj"]])
def test_a_plan_names_what_gets_no_gradient(
    targets: list[str], text: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = {
        "model_type": "bart", "is_decoder": True, "is_encoder_decoder": False, "vocab_size": 320,
        "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
        "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    adapter = {"method": "lora", "rank": 2, "targets": targets}
    recipe = Recipe(
        model={"path": str(tmp_path)},
        data={"path": str(text), "sequence_length": 32},
        adapter=adapter,
    )
    task = task_of(recipe)
    config = task.look(recipe).config
    with on_meta(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = task.model(config)
        attached = recipe.method("adapter").attach(model)
    [row] = rows_of_left_out(recipe, left_out_by_adapter(attached))
    assert (row["field"], row["value"]) == ("adapter.targets", ", ".join(targets))
    of, named = "model.decoder.layers.*.encoder_attn.", targets[-1] != "all-linear"
    if named:
        assert row["why"] == (
            f"no gradient reaches {of}v_proj, {of}q_proj, so the adapter changes nothing there; "
            "name these layers in adapter.exclude"
        )
        excluding = recipe.changed(adapter__exclude=["encoder_attn.*", "*.encoder_attn.*"])
        with on_meta():
            other = excluding.method("adapter").attach(task.model(config))
        assert rows_of_left_out(excluding, left_out_by_adapter(other)) == []
    else:
        assert row["why"].startswith(f"left out: {of}k_proj (no gradient reaches it), ")

"""Planted faults in what a run exported are found, in the step that has them; clean runs pass."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.verify.conftest import run, values

from modicum.adapters.merging import RoundingWarning
from modicum.core.errors import InputError
from modicum.models import saving
from modicum.serve import load_run
from modicum.verify import Verification, verify_export


def found(done: Verification) -> set[tuple[str, str]]:
    """What was found, and in which step."""
    assert not done.passed
    return {(finding.what, finding.where.split(":")[0]) for finding in done.findings}


def merged(run: Path, folder: Path, *, scale: float = 1.0, dtype: Any = torch.float32) -> Path:
    """A run's adapter in its base, as `modicum merge` writes it, but scaled or rounded."""
    conversation = load_run(run)
    assert conversation.adapter is not None
    with torch.no_grad():
        for name, parameter in conversation.adapter.state_dict().items():
            if name.endswith(".B"):
                parameter.mul_(scale)
    conversation.model.to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundingWarning)
        conversation.adapter.merge()
    conversation.adapter.detach()
    files = sorted((run / "tokenizer").glob("*"))
    return saving.save(conversation.model, folder, files=files)


@pytest.fixture
def spoilt(adapted: Path, tmp_path: Path) -> Path:
    """A copy of the adapter's run that a test may spoil."""
    return Path(shutil.copytree(adapted, tmp_path / "run"))


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_clean_runs_pass_and_nothing_is_written(base: Path, adapted: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in adapted.rglob("*")}
    done = verify_export(adapted)
    assert done.passed
    prompts, exported, joined = done.checks
    assert prompts == {"check": "prompts", "of": "validation", "count": 3}
    assert exported["error"] < 1e-5
    assert exported["adapter_changes"] > 1e-2
    assert exported["same_text"]
    assert joined["check"] == "merged"
    assert joined["error"] < 1e-5
    assert {path: path.stat().st_mtime_ns for path in adapted.rglob("*")} == before
    done = verify_export(base)
    assert done.passed
    assert [check["check"] for check in done.checks] == ["prompts", "exported"]
    assert done.checks[1]["error"] == 0.0


def test_a_merged_folder_passes_and_one_of_a_wrong_scale_is_found(
    adapted: Path, tmp_path: Path
) -> None:
    assert verify_export(adapted, against=merged(adapted, tmp_path / "good")).passed
    bad = merged(adapted, tmp_path / "bad", scale=0.5)
    assert found(verify_export(adapted, against=bad)) == {("logits", "against")}


def test_a_tokenizer_that_transformers_wrote_again_is_the_same(
    adapted: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = merged(adapted, tmp_path / "merged")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    written = json.loads((folder / "tokenizer.json").read_text())
    assert verify_export(adapted, against=folder).passed
    written["post_processor"] = {  # of every text its end: other ids
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "E", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"E": {"id": "E", "ids": [0], "tokens": ["E"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(written))
    assert found(verify_export(adapted, against=folder)) == {("tokenizer", "against")}


def test_an_adapter_that_is_not_applied_is_found(base: Path, adapted: Path) -> None:
    done = verify_export(adapted, against=base / "model")
    assert found(done) == {("logits", "against")}
    assert done.checks[-1]["error"] == pytest.approx(done.checks[-1]["adapter_changes"], rel=1e-3)


def test_a_merge_into_bf16_passes_where_the_change_survives(adapted: Path, tmp_path: Path) -> None:
    rounded = merged(adapted, tmp_path / "rounded", dtype=torch.bfloat16)
    done = verify_export(adapted, against=rounded)
    assert done.passed
    assert done.checks[-1]["dtype"] == "bfloat16"
    assert 1e-4 < done.checks[-1]["error"] < done.checks[-1]["allowed"]


@pytest.mark.expensive
def test_a_merge_into_bf16_is_found_where_it_loses_the_change(
    clean: Path, base: Path, tmp_path: Path
) -> None:
    training = {"learning_rate": 1e-5}
    little = values(
        clean, model={"path": str(base)}, adapter={"method": "lora", "rank": 2}, training=training
    )
    small = run(little, tmp_path / "run")
    assert verify_export(small).passed
    rounded = merged(small, tmp_path / "rounded", dtype=torch.bfloat16)
    done = verify_export(small, against=rounded)
    assert found(done) == {("logits", "against")}
    assert done.checks[-1]["error"] < 3e-2  # what bf16 alone would be allowed


def test_a_wrong_scale_in_the_adapters_file_is_found_in_both_steps(spoilt: Path) -> None:
    config = spoilt / "adapter" / "adapter_config.json"
    alpha = json.loads(config.read_text())["lora_alpha"]
    edit(config, lora_alpha=alpha * 2)
    assert found(verify_export(spoilt)) == {("logits", "exported"), ("logits", "merged")}


def test_weights_of_another_step_are_found(base: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base, tmp_path / "run"))
    file = copy / "model" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    save_file(tensors | {name: tensors[name] * 1.01}, file, metadata={"format": "pt"})
    assert found(verify_export(copy)) == {("logits", "exported")}


def test_a_base_that_has_changed_is_found(clean: Path, base: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(base, tmp_path / "base"))
    made = values(clean, model={"path": str(own)}, adapter={"method": "lora", "rank": 2})
    adapted = run(made, tmp_path / "run")
    file = own / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    [finding] = verify_export(adapted).findings
    assert finding.what == "base"
    assert finding.found == "others in model.safetensors"


def test_another_template_and_a_missing_end_are_found(adapted: Path, tmp_path: Path) -> None:
    folder = merged(adapted, tmp_path / "merged")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert found(verify_export(adapted, against=folder)) == {("chat_template", "against")}
    folder = merged(adapted, tmp_path / "endless")
    edit(folder / "generation_config.json", eos_token_id=None)
    assert found(verify_export(adapted, against=folder)) == {("eos", "against")}


def test_what_cannot_be_verified_is_refused(adapted: Path, spoilt: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        verify_export(tmp_path)
    with pytest.raises(InputError, match="--against: no such folder"):
        verify_export(adapted, against=tmp_path / "nowhere")
    edit(spoilt / "run.json", status="interrupted")
    with pytest.raises(InputError, match="has not finished"):
        verify_export(spoilt)
    edit(spoilt / "run.json", status="finished")
    shutil.rmtree(spoilt / "checkpoints" / "step-00000008")
    with pytest.raises(InputError, match=r"the checkpoint of step 8.* is gone"):
        verify_export(spoilt)

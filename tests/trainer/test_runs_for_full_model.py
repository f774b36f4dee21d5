"""Runs that train on what pruning left of a model, and whose adapter is for the one before it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.cli.conftest import modicum
from tests.trainer.test_ranks import FSDP, outcome, recipe_of, trains

from modicum import adapters
from modicum.core.errors import InputError
from modicum.core.layers.full_model import COMPRESSION, FullModel
from modicum.core.ranks.ranks import Ranks
from modicum.core.weight_digests import BASE_WEIGHTS, weight_digests
from modicum.models import huggingface
from modicum.proofs.drill.compared import exported
from modicum.serve import load_run
from modicum.serve.loading import load_served
from modicum.trainer.restoring import FinishedRun

pytestmark = pytest.mark.expensive
PRUNED = {"method": "structured_pruning", "neurons": 0.3, "groups": 0.5, "examples": 8}
LORAM = {"method": "loram", "rank": 3}
IDS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    made = recipe_of(questions, model={"heads": 2, "kv_heads": 2}, training={"steps": 4})
    assert trains(Ranks(), made, folder) == "done"
    return folder / "model"


def recipe(path: Path, data: Path, **sections: Any) -> dict[str, Any]:
    return recipe_of(data) | {"model": {"path": str(path)}} | sections


@pytest.fixture(scope="module")
def alone(base: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One recipe prunes, and trains the adapter."""
    folder = tmp_path_factory.mktemp("pruned") / "run"
    made = recipe(base, questions, compress=PRUNED, adapter=LORAM)
    assert trains(Ranks(), made, folder) == "done"
    return folder


@pytest.fixture(scope="module")
def aligned(base: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that prunes, and trains the small model in full."""
    folder = tmp_path_factory.mktemp("aligned") / "run"
    made = recipe(base, questions, compress=PRUNED | {"groups": 0.0})
    assert trains(Ranks(), made | {"training": made["training"] | {"steps": 4}}, folder) == "done"
    return folder


def is_for(run: Path, base: Path) -> None:
    said = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert Path(said["base_model_name_or_path"]) == base.resolve()
    assert json.loads((run / "adapter" / BASE_WEIGHTS).read_text()) == weight_digests(base)


def test_what_one_recipe_prunes_and_trains_is_used_with_the_full_model(
    base: Path, alone: Path, tmp_path: Path
) -> None:
    is_for(alone, base)
    full = huggingface.load(base)
    before = full(IDS)
    conversation = load_run(alone, device="cpu")
    after = conversation.model(IDS)
    assert not torch.allclose(after, before)
    ended = modicum("merge", alone, "--out", tmp_path / "merged")
    assert ended.code == 0, ended.err
    merged = huggingface.load(tmp_path / "merged")
    assert merged.config == full.config
    torch.testing.assert_close(merged(IDS), after, rtol=0, atol=1e-5)
    for form, name in (("gguf", "model"), ("gguf-adapter", "adapter")):
        file = tmp_path / f"{name}.gguf"
        ended = modicum("export", alone, "--form", form, "--out", file)
        assert ended.code == 0, ended.err
        assert file.stat().st_size > 0
    served = load_served(base, {"learned": alone}, device="cpu")
    assert "learned" in served.names


def test_with_dropped_units_silenced_the_full_model_is_the_one_that_was_trained(
    base: Path, alone: Path
) -> None:
    done = FinishedRun.of(alone)
    full = exported(done.plan, alone)  # as the drill compares it
    part = FullModel.read(alone / "base")
    assert full.config == huggingface.load(base).config
    with done.data(lambda *_: None) as data:
        small, adapter = done.restored(data)
    assert adapter is not None
    assert adapter.for_full_model() == part
    torch.testing.assert_close(full(IDS), small.eval()(IDS), rtol=0, atol=1e-5)


def test_another_original_model_is_refused(base: Path, alone: Path, tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "base"
    shutil.copytree(alone, run)
    shutil.copytree(base, moved)
    file = run / "adapter" / "adapter_config.json"
    said = json.loads(file.read_text()) | {"base_model_name_or_path": str(moved)}
    file.write_text(json.dumps(said))
    load_run(run, device="cpu")
    weights = moved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(InputError, match="base model has changed"):
        load_run(run, device="cpu")


def test_a_small_model_that_was_trained_on_is_still_a_part_of_the_full_one(
    base: Path, questions: Path, aligned: Path, tmp_path: Path
) -> None:
    first, then = FullModel.read(aligned / "base"), FullModel.read(aligned / "model")
    assert first is not None
    assert first == then
    assert first.weights == weight_digests(base)
    run = tmp_path / "run"
    made = recipe(aligned / "model", questions, adapter=LORAM, linear={"method": "nf4"})
    assert trains(Ranks(), made, run) == "done"
    is_for(run, base)
    conversation = load_run(run, device="cpu")  # the full model, and not in four bits
    full = huggingface.load(base)
    before = full(IDS)
    adapters.load(full, run / "adapter")
    assert not torch.allclose(full(IDS), before)
    assert torch.equal(conversation.model(IDS), full(IDS))
    ended = modicum("verify", "export", run)
    assert ended.code == 2
    assert "for the full model" in ended.err


def test_a_plain_adapter_on_a_small_model_is_for_that(
    questions: Path, aligned: Path, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "merged"
    made = recipe(aligned / "model", questions, adapter={"method": "lora", "rank": 3})
    assert trains(Ranks(), made, run) == "done"
    is_for(run, aligned / "model")
    assert modicum("merge", run, "--out", out).code == 0
    assert FullModel.read(out) == FullModel.read(aligned / "model")


def test_a_small_model_with_other_weights_than_it_says_is_refused(
    questions: Path, aligned: Path, tmp_path: Path
) -> None:
    shutil.copytree(aligned / "model", tmp_path / "small")
    said = aligned / "base" / COMPRESSION
    shutil.copyfile(said, tmp_path / "small" / COMPRESSION)
    made = recipe(tmp_path / "small", questions, adapter=LORAM)
    ended = trains(Ranks(), made, tmp_path / "run")
    assert ended.startswith("2: ")
    assert "these are others" in ended


def test_killed_it_resumes_to_the_bit(
    base: Path, questions: Path, alone: Path, tmp_path: Path
) -> None:
    made = recipe(base, questions, compress=PRUNED, adapter=LORAM)
    assert trains(Ranks(), made, tmp_path / "run", (0, 6)).startswith("4: stopped")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(alone)


@pytest.mark.ranks
def test_two_ranks_write_it_for_the_full_model(
    pool: Pool, base: Path, questions: Path, alone: Path, tmp_path: Path
) -> None:
    made = recipe(base, questions, compress=PRUNED, adapter=LORAM, parallel=FSDP)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    is_for(tmp_path / "run", base)
    one, two = (load_run(run, device="cpu").model(IDS) for run in (alone, tmp_path / "run"))
    torch.testing.assert_close(one, two, rtol=0, atol=5e-2)

"""Runs of an adapter that looks at data first, works after blocks and has a loss of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, rows, trains
from torch import Tensor

from modicum import adapters
from modicum.adapters import LoRASB
from modicum.adapters.preparation import Preparation
from modicum.checkpoint import CheckpointStore
from modicum.core.contracts.catalog import read_file
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.models import huggingface
from modicum.trainer.folder import PREPARED

PLUGIN = Path(__file__).parents[2] / "docs" / "contributing" / "examples" / "pulled_directions.py"


@pytest.fixture(scope="module")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    assert trains(Ranks(), recipe_of(questions, training={"steps": 4}), folder) == "done"
    return folder


def values(base: Path, data: Path, **sections: Any) -> dict[str, Any]:
    made = recipe_of(data, **sections)
    adapter = {"method": "pulled_directions", "rank": 6, "share": 0.9, "examples": 32, "pull": 0.1}
    return made | {"model": {"path": str(base)}, "adapter": adapter, "plugins": [str(PLUGIN)]}


@pytest.fixture(scope="module")
def alone(base: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "run"
    assert trains(Ranks(), values(base, questions), folder) == "done"
    return folder


@pytest.mark.expensive
def test_what_data_gave_is_kept_and_loaded_again(base: Path, alone: Path) -> None:
    prepared = Preparation.load(alone / PREPARED)
    assert set(prepared.values) == {"model.layers.0", "model.layers.1"}
    assert all(term > 0 for term in column(alone, "extra_loss"))
    config = json.loads((alone / "adapter" / "modicum_adapter.json").read_text())
    assert config["prepared"] == prepared.values
    model = huggingface.load(base / "model")
    ids = torch.arange(24).view(2, 12)
    before = model(ids)
    adapter = adapters.load(model, alone / "adapter", plugins=[PLUGIN])
    assert not torch.equal(model(ids), before)
    trained = CheckpointStore(alone / "checkpoints").newest(lambda message: None)
    for name, own in prepared.tensors.items():
        assert torch.equal(adapter.state_dict()[f"{name}.V"], own["V"])
        kept = trained.state["model"][f"{name}.layers_by_adapter.default.G"]
        assert torch.equal(adapter.state_dict()[f"{name}.G"], kept)
    with adapter.disabled():
        assert torch.equal(model(ids), before)


@pytest.mark.expensive
@pytest.mark.parametrize("ledger", ["arithmetic", "traced"])
def test_the_plan_counts_the_bound_and_then_what_data_chose(
    base: Path, questions: Path, alone: Path, tmp_path: Path, ledger: str
) -> None:
    made = values(base, questions, training={"steps": 2})
    if ledger == "traced":
        made["budget"] = {"ledger": "traced"}
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    plans = [json.loads(row) for row in (tmp_path / "run" / "plan.jsonl").read_text().splitlines()]
    trained = [row["parameters"]["trainable"] for row in plans]
    found = [own["rank"] for own in Preparation.load(tmp_path / "run" / PREPARED).values.values()]
    assert min(found) < 6
    assert trained[0] == len(found) * 6**2
    assert trained[-1] == sum(rank**2 for rank in found)
    [why] = [row["why"] for row in plans if "looked at data" in row["why"]]
    assert why.endswith(f"{trained[-1]:,} trained parameters of at most {trained[0]:,}")
    assert plans[-1]["prediction"]["ledger"] == ledger
    assert plans[-1]["prediction"]["peak_bytes"] < plans[0]["prediction"]["peak_bytes"]
    made["training"] = {**made["training"], "steps": 3}
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    again = (tmp_path / "run" / "plan.jsonl").read_text()
    assert again.count("looked at data") == 1
    last = json.loads(again.splitlines()[-1])
    assert last["parameters"]["trainable"] == trained[-1]


@pytest.mark.expensive
@pytest.mark.parametrize("stopped", [2, 9])
def test_killed_it_resumes_to_the_bit(
    base: Path, questions: Path, alone: Path, tmp_path: Path, stopped: int
) -> None:
    made = values(base, questions)
    assert trains(Ranks(), made, tmp_path / "run", (0, stopped)).startswith("4: stopped")
    assert len(rows(tmp_path / "run")) == stopped
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(alone)


@pytest.mark.expensive
def test_killed_before_it_was_kept_it_finds_the_same(
    base: Path, questions: Path, alone: Path, tmp_path: Path
) -> None:
    made = values(base, questions)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Preparation, "save", _fails)
        with pytest.raises(KeyboardInterrupt):
            trains(Ranks(), made, tmp_path / "run")
    assert not (tmp_path / "run" / PREPARED).exists()
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(alone)


def _fails(self: Preparation, folder: Path) -> None:
    raise KeyboardInterrupt


@pytest.mark.expensive
@pytest.mark.parametrize("how", [{"recompute": "blocks"}, {"precision": "bf16"}])
def test_it_trains_recomputed_and_in_bf16(
    base: Path, questions: Path, alone: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    assert trains(Ranks(), values(base, questions, training=how), tmp_path / "run") == "done"
    off = 0.05 if "precision" in how else 1e-6
    for key in ("loss", "extra_loss"):
        assert column(tmp_path / "run", key) == pytest.approx(column(alone, key), rel=off, abs=1e-3)


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize("parallel", [DDP, FSDP])
def test_on_two_ranks_it_is_the_same(
    pool: Pool,
    base: Path,
    questions: Path,
    alone: Path,
    tmp_path: Path,
    parallel: dict[str, Any],
) -> None:
    made = values(base, questions, parallel=parallel)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    # The term is of the last micro-batch, of which each rank has another.
    for key, off in (("loss", 1e-3), ("gradient_norm", 1e-2), ("extra_loss", 0.2)):
        assert column(tmp_path / "run", key) == pytest.approx(column(alone, key), rel=off)


@pytest.mark.expensive
def test_a_fork_begins_with_what_the_other_run_found(
    base: Path, questions: Path, alone: Path, tmp_path: Path
) -> None:
    made = values(base, questions, training={"steps": 14})
    made["data"]["limit"] = "3 kB"
    assert trains(Ranks(), made, tmp_path / "run", fork=alone) == "done"
    found, known = (Preparation.load(run / PREPARED) for run in (tmp_path / "run", alone))
    assert found.values == known.values


def test_a_method_that_asks_for_data_says_so(base: Path) -> None:
    [record] = read_file(PLUGIN)
    model = huggingface.load(base / "model")
    with pytest.raises(InputError, match="give `batches` and `loss`"):
        record.load()(rank=2).attach(model)


def first_steps(base: Path, data: Path, **sections: Any) -> dict[str, Any]:
    """A recipe of an adapter whose tensors, and not sizes, come from gradients of the data."""
    adapter = {"method": "lora_sb", "rank": 4, "examples": 32, "first_step": 1e-3}
    return recipe_of(data, **sections) | {"model": {"path": str(base)}, "adapter": adapter}


@pytest.fixture(scope="module")
def stepped(base: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stepped") / "run"
    assert trains(Ranks(), first_steps(base, questions), folder) == "done"
    return folder


@pytest.mark.expensive
def test_tensors_of_the_data_are_in_the_run_and_in_its_state(base: Path, stepped: Path) -> None:
    prepared = Preparation.load(stepped / PREPARED)
    state = CheckpointStore(stepped / "checkpoints").newest(lambda message: None).state["model"]
    assert len(prepared.tensors) == 14
    for name, own in prepared.tensors.items():
        at = f"{name}.layers_by_adapter.default"
        assert all(torch.equal(state[f"{at}.{key}"], own[key]) for key in "AB")
        assert not torch.equal(state[f"{at}.R"], own["R"])
    plans = (stepped / "plan.jsonl").read_text()
    assert "looked at data" not in plans
    assert json.loads(plans.splitlines()[0])["parameters"]["trainable"] == 14 * 4**2
    assert not list(stepped.glob("*.tmp"))
    model, ids = huggingface.load(base / "model"), torch.arange(24).view(2, 12)
    adapters.load(model, stepped / "adapter")
    other = huggingface.load(base / "model")
    run = LoRASB(rank=4).attach(other, prepared=prepared)
    run.load_state_dict({name: state[run.model_name(name)] for name in run.state_dict()})
    torch.testing.assert_close(model(ids), other(ids), rtol=0, atol=1e-5)


@pytest.mark.expensive
@pytest.mark.parametrize("how", ["probing", "keeping", "training"])
def test_killed_anywhere_the_first_step_is_found_again_to_the_bit(
    base: Path, questions: Path, stepped: Path, tmp_path: Path, how: str
) -> None:
    made = first_steps(base, questions)
    if how == "training":
        assert trains(Ranks(), made, tmp_path / "run", (0, 2)).startswith("4: stopped")
    else:
        with pytest.MonkeyPatch.context() as patched:
            where = {"probing": (LoRASB, "start"), "keeping": (Preparation, "save")}[how]
            patched.setattr(*where, _is_killed)
            with pytest.raises(KeyboardInterrupt):
                trains(Ranks(), made, tmp_path / "run")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(stepped)
    found, known = (Preparation.load(run / PREPARED) for run in (tmp_path / "run", stepped))
    for name, own in known.tensors.items():
        assert all(torch.equal(found.tensors[name][key], value) for key, value in own.items())


def _is_killed(self: Any, *given: Any, **named: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize("parallel", [DDP, FSDP])
def test_two_ranks_add_up_their_gradients(
    pool: Pool, base: Path, questions: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    made = first_steps(base, questions, parallel=parallel)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    found = Preparation.load(tmp_path / "run" / PREPARED)
    signs = 0.0
    for name, value in probed(base, questions).items():
        own = found.tensors[name]
        start = own["B"] @ own["R"] @ own["A"]
        # Signs of what is nearly zero hang on the order of sums.
        signs = max(signs, float((start - value).norm() / value.norm()))
    assert signs < 0.2


def probed(base: Path, data: Path) -> dict[str, Tensor]:
    """The first step of one process that looks at the same examples: s B R A by layer."""
    folder = base.parent / "alone"
    assert trains(Ranks(), first_steps(base, data, training={"steps": 1}), folder) == "done"
    tensors = Preparation.load(folder / PREPARED).tensors
    return {name: own["B"] @ own["R"] @ own["A"] for name, own in tensors.items()}


def test_examples_of_one_micro_batch_come_in_as_many_as_a_search_needs(
    base: Path, questions: Path, tmp_path: Path
) -> None:
    adapter = {"method": "diffora", "rank": 2, "examples": 8, "search_steps": 3, "share": False}
    training = {"batch_size": 8, "micro_batch_size": 8, "steps": 2}
    made = recipe_of(questions, training=training)
    recipe = made | {"model": {"path": str(base)}, "adapter": adapter}
    assert trains(Ranks(), recipe, tmp_path / "run") == "done"

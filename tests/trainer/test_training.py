"""What training computes: the same as a plain loop, whatever is evaluated, written or kept."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.trainer.conftest import full, lora, losses, outcome, rows, run

import modicum
from modicum.core.errors import InputError, Interrupted
from modicum.data.packed_examples import PackedExamples
from modicum.data.parts import Draw
from modicum.data.sampler import Sampler
from modicum.data.sources import open_source
from modicum.data.store import prepare
from modicum.data.tokenizer import Tokenizer
from modicum.models.huggingface import load
from modicum.tasks import CausalLM


def plain_loop(model, data: PackedExamples, steps: int, rate: float) -> list[float]:
    """Ten lines of PyTorch that anybody would write."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    sampler, found = Sampler(len(data), 8, seed=0), []
    for step in range(steps):
        batch = data.batch(sampler.indices(step))
        logits = model(batch.input_ids, batch.documents)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def packed(dataset: Path, folder: Path, tmp_path: Path) -> PackedExamples:
    tokenizer = Tokenizer.load(folder / "tokenizer")
    source = open_source(dataset)
    prepared = prepare(source, tokenizer, tmp_path / "d", model_vocabulary=300, draw=Draw(0.1))
    return PackedExamples(prepared.train, 32)


def test_losses_are_those_of_a_plain_loop(dataset, finished, tmp_path):
    # Both start from a trained model, whose weights both can load.
    constant = {"schedule": "constant", "steps": 10}
    values = full(dataset, training=constant) | {"model": {"path": str(finished)}}
    run(values, tmp_path / "run")
    data = packed(dataset, finished, tmp_path)
    expected = plain_loop(load(finished / "model"), data, 10, rate=1e-2)
    got = [loss for _, loss, _ in losses(tmp_path / "run")]
    assert got == pytest.approx(expected, abs=1e-6)
    assert got[0] != got[1]


def test_adaptations_are_those_of_a_plain_loop(dataset, finished, tmp_path):
    constant = {"schedule": "constant", "steps": 10}
    values = lora(finished, dataset, training=constant, adapter={"method": "lora", "rank": 4})
    run(values, tmp_path / "run")
    model = load(finished / "model")
    modicum.adapters.LoRA(rank=4).attach(model)
    expected = plain_loop(model, packed(dataset, finished, tmp_path), 10, rate=1e-2)
    assert [loss for _, loss, _ in losses(tmp_path / "run")] == pytest.approx(expected, abs=1e-6)


def test_looking_and_saving_change_no_loss(dataset, finished, finished_lora, tmp_path):
    quiet = {
        "evaluation": {"every": 1000},
        "checkpoint": {"every": 1000},
        "samples": {"prompts": [], "count": 0},
    }
    run(full(dataset, **quiet), tmp_path / "full")
    assert losses(tmp_path / "full") == losses(finished)
    run(lora(finished, dataset, **quiet), tmp_path / "lora")
    assert losses(tmp_path / "lora") == losses(finished_lora)
    assert outcome(tmp_path / "lora")["weights"] == outcome(finished_lora)["weights"]


def test_micro_batches_do_not_change_the_losses_beyond_rounding(dataset, finished, tmp_path):
    run(
        full(dataset, training={"micro_batch_size": 3, "steps": 5, "schedule": "constant"}),
        tmp_path / "a",
    )
    run(
        full(dataset, training={"micro_batch_size": 8, "steps": 5, "schedule": "constant"}),
        tmp_path / "b",
    )
    one, two = ([loss for _, loss, _ in losses(tmp_path / name)] for name in "ab")
    assert one == pytest.approx(two, abs=2e-5)
    assert one[0] == pytest.approx(two[0], abs=1e-6)


def test_the_seed_reaches_weights_and_order(dataset, finished, tmp_path):
    run(full(dataset, training={"seed": 1, "steps": 1}), tmp_path / "run")
    assert losses(tmp_path / "run")[0][1] != losses(finished)[0][1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_small_data_set_is_learned_by_heart(tmp_path, precision):
    (tmp_path / "poem.txt").write_text("the cat sat on the mat and the dog on the log\n" * 20)
    values = full(
        tmp_path / "poem.txt",
        data={"validation_fraction": 0.0},
        training={"steps": 60, "precision": precision, "schedule": "constant"},
        samples={"prompts": ["the cat sat on the"], "tokens": 4},
    )
    run(values, tmp_path / "run")
    first, last = losses(tmp_path / "run")[0][1], losses(tmp_path / "run")[-1][1]
    assert first > 4
    assert last < 0.3
    before, after = rows(tmp_path / "run", "samples.jsonl")
    assert (before["step"], after["step"]) == (0, 60)
    assert " mat" in after["text"]


def test_adapting_in_bf16_keeps_the_base_in_it_and_learns(dataset, finished, tmp_path):
    values = lora(finished, dataset, training={"precision": "bf16", "steps": 20})
    content = run(values, tmp_path / "run")
    final = content["final"]
    assert final["validation_loss"] < final["initial_validation_loss"]
    total, trained = content["parameters"]["total"], content["parameters"]["trainable"]
    # The base in two bytes an element; factors, and nothing else, in four.
    assert content["measured_by_kind"]["weight"] == 2 * (total - trained) + 4 * trained
    assert 8 * trained <= content["measured_by_kind"]["optimizer"] <= 8 * trained + 4 * 100


def test_the_run_folder_tells_the_run(dataset, finished, tmp_path):
    content = json.loads((finished / "run.json").read_text())
    metrics, evaluations = rows(finished), rows(finished, "evaluations.jsonl")
    assert content["status"] == "finished"
    assert content["steps"] == 20
    assert content["tokens"] == sum(row["tokens"] for row in metrics)
    seconds = sum(row["seconds"] for row in metrics)
    # Speed counts all that is read: 20 updates of 8 rows, as the plan does.
    assert content["tokens_per_second"] == pytest.approx(20 * 8 * 32 / seconds)
    assert metrics[3]["tokens_per_second"] == pytest.approx(8 * 32 / metrics[3]["seconds"])
    waited = [row["data_seconds"] for row in metrics]
    assert all(wait > 0 for wait in waited)
    assert content["data_wait"] == pytest.approx(sum(waited) / seconds)
    assert content["data"]["exact"]
    assert content["data"]["rows"] == len(packed(dataset, finished, tmp_path))
    assert content["seconds"] > seconds
    assert content["final"] == {
        "loss": metrics[-1]["loss"],
        "validation_loss": evaluations[-1]["loss"],
        "initial_validation_loss": evaluations[0]["loss"],
    }
    assert [row["step"] for row in evaluations] == [0, 10, 20]
    assert content["outputs"] == {"model": "model/"}
    assert content["error"] is None
    plan = rows(finished, "plan.jsonl")
    assert [row["revision"] for row in plan] == [1, 2]
    assert content["parameters"] == plan[0]["parameters"]
    assert content["peak_bytes"]["predicted"] == plan[0]["prediction"]["peak_bytes"]
    assert metrics[0]["learning_rate"] == 1e-2
    assert metrics[-1]["learning_rate"] == pytest.approx(1e-3)
    names = {path.name for path in finished.iterdir()}
    assert names >= {"recipe.yaml", "run.json", "plan.jsonl", "metrics.jsonl", "model", "tokenizer"}
    recipe = modicum.Recipe(**full(dataset, training={"precision": "fp32"}))  # what auto was
    from modicum.recipe_yaml import load as load_recipe

    assert load_recipe(finished / "recipe.yaml") == recipe


def test_a_resolved_recipe_of_an_adaptation_is_a_recipe(dataset, finished, finished_lora):
    from modicum.recipe_yaml import load as load_recipe

    recipe = load_recipe(finished_lora / "recipe.yaml")
    assert recipe == modicum.Recipe(**lora(finished, dataset, training={"precision": "fp32"}))


class Diverging(CausalLM):
    """A task whose loss is no number from some step on, for some steps."""

    calls: list[int] = []  # noqa: RUF012
    bad: range = range(0)

    def outputs(self, model, batch):
        outputs = super().outputs(model, batch)
        if not model.training:
            return outputs
        self.calls.append(1)
        # The largest batch is rehearsed twice, and an update takes two calls.
        return outputs * torch.nan if (len(self.calls) - 1) // 2 in self.bad else outputs


def test_single_losses_that_are_no_number_are_skipped(dataset, finished, tmp_path, monkeypatch):
    monkeypatch.setattr("modicum.tasks.CausalLM", Diverging)
    monkeypatch.setattr(Diverging, "calls", [])
    monkeypatch.setattr(Diverging, "bad", range(6, 9))
    told = []
    run(full(dataset), tmp_path / "run", listener=told.append)
    metrics = rows(tmp_path / "run")
    assert [row["step"] for row in metrics if row.get("skipped")] == [6, 7, 8]
    assert [row["loss"] for row in metrics[5:8]] == [None] * 3
    assert losses(tmp_path / "run")[:5] == losses(finished)[:5]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    warnings = [event["message"] for event in told if event["event"] == "warning"]
    assert warnings[0] == "step 6: loss or gradient not finite, skipped"
    assert len(warnings) == 3


def test_a_run_in_which_every_step_is_skipped_has_failed(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("modicum.tasks.CausalLM", Diverging)
    monkeypatch.setattr(Diverging, "calls", [])
    monkeypatch.setattr(Diverging, "bad", range(100))
    values, folder = full(dataset, training={"steps": 3}), tmp_path / "run"
    for _ in range(2):  # nor does the same again come to an end
        with pytest.raises(
            InputError, match=r"nothing was trained: no step of this run, up to step 3"
        ):
            run(values, folder)
        assert json.loads((folder / "run.json").read_text())["status"] == "failed"
        assert not (folder / "model").exists()


def test_a_run_that_diverges_stops_with_its_checkpoints_intact(
    dataset, finished, tmp_path, monkeypatch
):
    monkeypatch.setattr("modicum.tasks.CausalLM", Diverging)
    monkeypatch.setattr(Diverging, "calls", [])
    monkeypatch.setattr(Diverging, "bad", range(13, 100))
    values, folder = full(dataset), tmp_path / "run"
    with pytest.raises(
        InputError, match=r"training diverged: 4 updates in a row.*step 16"
    ) as caught:
        run(values, folder)
    assert caught.value.field == "training.learning_rate"
    content = json.loads((folder / "run.json").read_text())
    assert content["status"] == "failed"
    assert content["error"].startswith("training.learning_rate: training diverged")
    assert content["failed_by"] == "TrainingDiverged"
    # Step 15's checkpoint holds the weights of step 12; the fault mended, the run goes on.
    monkeypatch.undo()
    resumed = run(values, folder)
    assert (resumed["status"], resumed["error"], resumed["failed_by"]) == ("finished", None, None)
    assert losses(folder)[:12] == losses(finished)[:12]


def test_updates_that_were_skipped_before_a_stop_count_in_a_row(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("modicum.tasks.CausalLM", Diverging)
    monkeypatch.setattr(Diverging, "calls", [])
    monkeypatch.setattr(Diverging, "bad", range(13, 100))
    values, folder = full(dataset), tmp_path / "run"

    def stops(told: dict) -> None:
        if told["event"] == "step" and told["step"] == 14:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run(values, folder, listener=stops)
    assert [row["step"] for row in rows(folder) if row.get("skipped")] == [13, 14]
    monkeypatch.setattr(Diverging, "bad", range(100))
    with pytest.raises(InputError, match=r"training diverged: 4 updates in a row.*step 16"):
        run(values, folder)


def test_the_order_of_rows_is_known_by_data_and_seed(dataset, finished, tmp_path):
    def order(**changes: object) -> str:
        values = full(dataset, training={"steps": 1, **changes})
        found: str = run(values, tmp_path / str(changes))["inputs"]["order"]
        return found

    known = json.loads((finished / "run.json").read_text())["inputs"]["order"]
    assert known.startswith("sha256:")
    assert order(learning_rate=1e-4) == known
    assert order(seed=7) != known


def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(dataset, finished, tmp_path, monkeypatch):
    values, folder, saves = full(dataset), tmp_path / "run", []
    from modicum.checkpoint import publishing

    def full_at_the_second(*arguments: object, **options: object) -> str:
        saves.append(arguments)
        if len(saves) == 2:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    real = publishing.write_file
    monkeypatch.setattr(publishing, "write_file", full_at_the_second)
    with pytest.raises(InputError, match=r"the disk is full") as caught:
        run(values, folder)
    assert caught.value.exit_code == 2
    assert modicum.checkpoint.CheckpointStore(folder / "checkpoints").steps() == [5]
    run(values, folder)
    assert outcome(folder) == outcome(finished)


def test_wrong_data_is_found_before_the_first_step(tmp_path):
    texts = [json.dumps({"text": f"a row {number}"}) for number in range(1500)]
    (tmp_path / "data.jsonl").write_text("\n".join([*texts[:1400], "{broken", *texts[1400:]]))
    with pytest.raises(InputError) as caught:
        run(full(tmp_path / "data.jsonl"), tmp_path / "run")
    assert f"{tmp_path}/data.jsonl:1401: data.path:" in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_listeners_hear_of_everything(dataset, tmp_path):
    told = []
    run(full(dataset, training={"steps": 5}), tmp_path / "run", listener=told.append)
    names = [event["event"] for event in told]
    assert names[0] == "plan"
    assert names[-1] == "finished"
    assert told[-1]["folder"] == str(tmp_path / "run")
    assert names.count("step") == 5
    assert names.count("sample") == 2
    assert names.count("evaluation") == 2
    step = next(event for event in told if event["event"] == "step")
    assert step["steps"] == 5
    assert step["seconds_left"] > 0
    phases = {event["name"] for event in told if event["event"] == "phase"}
    assert phases >= {"training tokenizer", "tokenizing", "building", "exporting"}

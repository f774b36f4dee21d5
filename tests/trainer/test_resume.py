"""Killed, stopped or extended, a run ends as if nothing had happened, to the bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.trainer.conftest import full, lora, losses, outcome, rows, run

import modicum
from modicum.checkpoint import CheckpointStore
from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.errors import InputError, Interrupted
from modicum.core.files import remove
from modicum.recipe_yaml import load
from modicum.serve import load_run
from modicum.trainer import continued
from modicum.trainer.folder import RunFolder

# What happens, and the how-maniest time: the kill comes then.
MOMENTS = {
    "while the tokenizer is trained": ("training tokenizer", 1),
    "while data is tokenized": ("tokenizing", 1),
    "before the model is built": ("building", 1),
    "after the samples of the beginning": ("sample", 1),
    "after the first step": ("step", 1),
    "in the middle of an update": ("backward", 15),
    "after a step between checkpoints": ("step", 18),
    "after a checkpoint": ("checkpoint", 3),
    "while the token cache is written": ("sync .data.part/tokens.bin", 1),
    "while the first checkpoint is written": ("sync .step-00000005.", 1),
    "before a checkpoint gets its name": ("sync .step-00000015.", 3),
    "after the last checkpoint": ("exporting", 1),
    "while weights are exported": ("sync .model.part/model", 1),
}


@pytest.mark.expensive
@pytest.mark.parametrize(("event", "number"), MOMENTS.values(), ids=MOMENTS)
def test_killed_at_any_moment_the_same_again_goes_on(
    dataset, finished, child, tmp_path, event, number
):
    values, folder = full(dataset), tmp_path / "run"
    assert child(values, folder, event, number).code == -signal.SIGKILL
    assert not (folder / "model").exists()
    assert run(values, folder)["status"] == "finished"
    assert outcome(folder) == outcome(finished)
    left = [str(path) for path in folder.rglob(".*")]
    assert left == []


@pytest.mark.expensive
@pytest.mark.parametrize(("event", "number"), [("step", 7), ("backward", 33), ("exporting", 1)])
def test_killed_adaptations_go_on(dataset, finished, finished_lora, child, tmp_path, event, number):
    values, folder = lora(finished, dataset), tmp_path / "run"
    assert child(values, folder, event, number).code == -signal.SIGKILL
    run(values, folder)
    assert outcome(folder) == outcome(finished_lora)


@pytest.mark.expensive
def test_killed_again_and_again(dataset, finished, child, tmp_path):
    values, folder = full(dataset), tmp_path / "run"
    for event, number in [("step", 8), ("backward", 3)]:
        assert child(values, folder, event, number).code == -signal.SIGKILL
    ended = run(values, folder)
    assert outcome(folder) == outcome(finished)
    assert ended["interruptions"] == 2


@pytest.mark.expensive
@pytest.mark.parametrize(
    ("event", "number", "signal_number"),
    [
        ("training tokenizer", 1, signal.SIGTERM),
        ("evaluation", 2, signal.SIGTERM),
        ("backward", 25, signal.SIGINT),
        ("exporting", 1, signal.SIGINT),
    ],
)
def test_a_process_that_is_asked_to_stop_saves_and_says_so(
    dataset, finished, child, tmp_path, event, number, signal_number
):
    values, folder = full(dataset), tmp_path / "run"
    ended = child(values, folder, event, number, signal_number)
    if event == "exporting":  # so near the end, it is brought to its end
        assert ended.code == 0
    else:
        assert ended.code == Interrupted.exit_code == 4
        how = "stopped (Ctrl-C)" if signal_number.name == "SIGINT" else "stopped by SIGTERM"
        assert ended.said.strip().splitlines()[-1] == (
            f"{how}; the state is saved, and the same command resumes"
        )
        assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    run(values, folder)
    assert outcome(folder) == outcome(finished)


def interrupting(event: str, number: int, signal_number: int = signal.SIGTERM):
    """A listener that asks this process to stop at the number-th such event."""
    seen = []

    def listener(told: dict) -> None:
        if told["event"] == event:
            seen.append(told)
            if len(seen) == number:
                os.kill(os.getpid(), signal_number)

    return listener


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_between_updates(dataset, finished, tmp_path, signal_number):
    values, folder = full(dataset), tmp_path / "run"
    before = signal.getsignal(signal_number)
    how = "by SIGTERM" if signal_number == signal.SIGTERM else r"\(Ctrl-C\)"
    with pytest.raises(Interrupted, match=f"^stopped {how}; "):
        run(values, folder, listener=interrupting("step", 12, signal_number))
    assert signal.getsignal(signal_number) is before
    assert CheckpointStore(folder / "checkpoints").newest().step == 12
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["steps"], record["interruptions"]) == ("interrupted", 12, 1)
    told = []
    ended = run(values, folder, listener=told.append)
    assert [event["step"] for event in told if event["event"] == "resumed"] == [12]
    assert outcome(folder) == outcome(finished)
    assert (ended["status"], ended["interruptions"]) == ("finished", 1)
    assert (record["resumed_after"], ended["resumed_after"]) == ([], [12])


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_asked_to_stop_in_the_middle_of_an_accumulation(
    dataset, finished, finished_lora, tmp_path, monkeypatch, kind
):
    import torch

    values = full(dataset) if kind == "full" else lora(finished, dataset)
    folder, calls = tmp_path / "run", []
    backward = torch.Tensor.backward

    def counted(tensor: torch.Tensor) -> None:
        backward(tensor)
        calls.append(tensor)
        if len(calls) == 15:  # two of the rehearsal, then the first of two of step 7
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "backward", counted)
        with pytest.raises(Interrupted):
            run(values, folder)
    assert CheckpointStore(folder / "checkpoints").newest().step == 6
    assert len(rows(folder)) == 6
    run(values, folder)
    assert outcome(folder) == outcome(finished if kind == "full" else finished_lora)


def test_memory_that_runs_out_when_weights_are_new_makes_no_update_twice(
    dataset, finished, tmp_path, monkeypatch
):
    values, folder = full(dataset), tmp_path / "run"
    after_optimizer = RunHooks.after_optimizer

    def runs_out(hooks: RunHooks, step: int, optimizer: object) -> None:
        after_optimizer(hooks, step, optimizer)
        if step == 7:
            raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(RunHooks, "after_optimizer", runs_out)
        with pytest.raises(Interrupted, match="memory ran out when an update was half made"):
            run(values, folder)
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    run(values, folder)
    assert outcome(folder) == outcome(finished)


def test_an_evaluation_that_was_not_come_to_is_made_up_for(dataset, finished, tmp_path):
    values, folder = full(dataset), tmp_path / "run"
    with pytest.raises(Interrupted):  # step 10 is done, and its evaluation is next
        run(values, folder, listener=interrupting("step", 10))
    assert [row["step"] for row in rows(folder, "evaluations.jsonl")] == [0]
    run(values, folder)
    assert outcome(folder) == outcome(finished)


def test_a_finished_run_is_left_alone(dataset, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}
    told = []
    content = run(full(dataset), folder, listener=told.append)
    assert content["status"] == "finished"
    assert told == []
    after = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}
    before.pop(folder / "lock")
    after.pop(folder / "lock")
    assert after == before


def test_more_steps_extend_a_run(dataset, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    content = run(full(dataset, training={"steps": 22}), folder)
    assert (content["steps"], content["status"]) == (22, "finished")
    assert losses(folder)[:20] == losses(finished)
    assert [row["step"] for row in rows(folder)] == list(range(1, 23))
    # A constant schedule does not look at its end: extended or in one go is the same.
    constant = {"schedule": "constant"}
    one, two = tmp_path / "one", tmp_path / "two"
    run(full(dataset, training=constant | {"steps": 6}), one)
    run(full(dataset, training=constant | {"steps": 9}), one)
    run(full(dataset, training=constant | {"steps": 9}), two)
    assert losses(one) == losses(two)
    assert outcome(one)["weights"] == outcome(two)["weights"]


def test_a_changed_recipe_is_refused_with_the_difference(dataset, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for training, difference in [
        ({"learning_rate": 0.5}, "training.learning_rate: 0.01 -> 0.5"),
        ({"steps": 10}, "training.steps: 20 -> 10"),
        ({"steps": 40, "seed": 3}, "training.steps: 20 -> 40; training.seed: 0 -> 3"),
    ]:
        with pytest.raises(InputError, match="begun with another recipe") as caught:
            run(full(dataset, training=training), folder)
        assert str(caught.value).endswith(f"Changed: {difference}")
        assert "--fork" in str(caught.value)
    assert outcome(folder) == outcome(finished)


def test_a_fork_starts_a_new_run_from_the_state_of_another(dataset, finished, tmp_path):
    values = full(dataset, training={"steps": 23, "learning_rate": 1e-3})
    folder = tmp_path / "fork"
    told = []
    content = run(values, folder, fork=finished, listener=told.append)
    assert {"event": "resumed", "step": 20} in told
    assert [row["step"] for row in rows(folder)] == [21, 22, 23]
    assert (content["forked_from"], content["resumed_after"]) == (str(finished), [])
    assert losses(folder)[0][1] < losses(finished)[2][1]
    # The same again is a finished run, the origin is as it was, and another fork is refused.
    assert run(values, folder, fork=finished)["steps"] == 23
    with pytest.raises(InputError, match="a fork starts a new run, and here is another"):
        run(values, folder, fork=folder)


def test_a_fork_that_is_interrupted_goes_on_as_a_fork(dataset, finished, tmp_path):
    values = full(dataset, training={"steps": 23})
    straight, folder = tmp_path / "straight", tmp_path / "fork"
    run(values, straight, fork=finished)
    with pytest.raises(Interrupted):
        run(values, folder, fork=finished, listener=interrupting("phase", 1))
    assert not (folder / "checkpoints").exists()
    run(values, folder)
    assert losses(folder) == losses(straight)


@pytest.mark.parametrize(
    ("training", "message"),
    [({"steps": 20}, "has done 20 steps already"), ({"steps": 40}, "holds no checkpoint")],
)
def test_a_fork_that_cannot_be_is_refused_before_anything_is_written(
    dataset, finished, tmp_path, training, message
):
    origin = finished if training["steps"] == 20 else tmp_path / "none"
    with pytest.raises(InputError, match=message):
        run(full(dataset, training=training), tmp_path / "run", fork=origin)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def test_a_fork_of_another_model_is_refused(dataset, finished, tmp_path):
    values = full(dataset, training={"steps": 40}, model={"layers": 1})
    with pytest.raises(InputError, match=r"step-00000020: .*other parameters than the model"):
        run(values, tmp_path / "run", fork=finished)


HOLD = """
import sys, time
from pathlib import Path
from modicum.trainer.folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_in_use_is_refused_by_name(dataset, tmp_path):
    folder = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(InputError, match=f"this run is in use by process {holder.pid}; wait"):
        run(full(dataset), folder)
    holder.kill()
    holder.communicate()
    # The lock of a killed process is nobody's.
    assert run(full(dataset, training={"steps": 1}), folder)["steps"] == 1


def test_a_folder_with_other_files_is_refused(dataset, tmp_path):
    for name in ("notes.txt", "recipe.yaml", "run.json"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(InputError, match=rf"holds other files \({name}\) and no run"):
            run(full(dataset), folder)
        assert (folder / name).read_text() == "{}"
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a run needs a folder, and this is a file"):
        run(full(dataset), tmp_path / "file")


def cut(folder: Path, name: str) -> None:
    """Cut a file in the middle of its last line."""
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: content.rstrip().rfind(b"\n") + 20])


def test_rows_cut_in_the_middle_are_mended(dataset, finished, tmp_path):
    values, folder = full(dataset), tmp_path / "run"
    with pytest.raises(Interrupted):
        run(values, folder, listener=interrupting("step", 18))
    # As a process leaves it that dies after step 18, whose checkpoint is not there yet.
    shutil.rmtree(folder / "checkpoints" / "step-00000018")
    for name in ("metrics.jsonl", "plan.jsonl"):
        cut(folder, name)
    (folder / ".run.json.123.part").write_text("{")
    run(values, folder)
    assert outcome(folder) == outcome(finished)
    assert [row["revision"] for row in rows(folder, "plan.jsonl")] == [1, 2]
    assert not (folder / ".run.json.123.part").exists()


def test_choices_once_made_are_replayed(dataset, finished, tmp_path, monkeypatch):
    values = full(dataset, training={"micro_batch_size": "auto", "steps": 12})
    straight, folder = tmp_path / "straight", tmp_path / "run"
    run(values, straight)
    assert rows(straight, "plan.jsonl")[0]["choices"][0]["value"] == 8
    with pytest.raises(Interrupted):
        run(values, folder, listener=interrupting("step", 7))
    # A machine that now would choose otherwise.
    planner = sys.modules["modicum.planner.choose"]
    monkeypatch.setattr(planner, "USEFUL_TOKENS", {"cpu": 64})
    plan = modicum.plan(modicum.Recipe(**values))
    assert plan.prediction.choice.micro_batch_size == 2
    told = []
    modicum.train(plan, folder, listener=told.append)
    first = next(event for event in told if event["event"] == "plan")
    assert first["choices"][0] == {
        "field": "training.micro_batch_size",
        "value": 8,
        "why": "the full batch fits at once",
    }
    assert losses(folder) == losses(straight)
    assert [row["revision"] for row in rows(folder, "plan.jsonl")] == [1, 2, 3]


def test_a_damaged_checkpoint_is_named_and_written_anew(dataset, finished, tmp_path):
    values, folder = full(dataset), tmp_path / "run"
    with pytest.raises(Interrupted):
        run(values, folder, listener=interrupting("step", 14))
    state = folder / "checkpoints" / "step-00000014" / "rank-00000.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    told = []
    with pytest.raises(Interrupted):
        run(values, folder, listener=lambda e: (told.append(e), interrupt(e))[0])
    warnings = [event["message"] for event in told if event["event"] == "warning"]
    assert len(warnings) == 1
    assert "step-00000014" in warnings[0]
    assert {"event": "resumed", "step": 10} in told
    assert CheckpointStore(folder / "checkpoints").newest().step == 15
    run(values, folder)
    assert outcome(folder) == outcome(finished)


interrupt = interrupting("step", 5)


def files(folder: Path) -> dict[Path, bytes]:
    """What a folder holds, apart from the run's record and report, which tell of each start."""
    own = (folder / "run.json", folder / "lock", folder / "report.html")
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p not in own}


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left(dataset, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    longer = full(dataset, training={"steps": 21})
    states = sorted(folder.glob("checkpoints/*/rank-00000.safetensors"))
    for state in states:
        state.write_bytes(state.read_bytes()[:-1])
    before, told = files(folder), []
    plan = modicum.plan(modicum.Recipe(**longer))
    with pytest.raises(InputError, match="every checkpoint is damaged") as caught:
        modicum.train(plan, folder, listener=told.append)
    assert all(str(state) in str(caught.value) for state in states)
    assert "--restart" in str(caught.value)
    assert not [event for event in told if event["event"] == "warning"]
    after = files(folder)
    assert {**after, folder / "recipe.yaml": b""} == {**before, folder / "recipe.yaml": b""}


def test_an_extended_run_without_checkpoints_is_refused(dataset, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(InputError, match=r"its checkpoints are gone.*--restart"):
        run(full(dataset, training={"steps": 21}), folder)
    assert losses(folder) == losses(finished)


def test_a_restart_begins_anew_and_says_what_it_replaces(dataset, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    with pytest.raises(InputError, match="begun with another recipe"):
        run(full(dataset, training={"seed": 3}), folder, restart=True)
    assert outcome(folder) == outcome(finished)
    told = []
    values = full(dataset)
    with pytest.raises(Interrupted):
        modicum.train(
            continued(modicum.Recipe(**values), folder, restart=True),
            folder,
            restart=True,
            listener=lambda event: (told.append(event), interrupting("step", 1)(event))[0],
        )
    [warning] = [event["message"] for event in told if event["event"] == "warning"]
    assert "metrics.jsonl (20 lines)" in warning
    assert "step-00000015, step-00000020, model/" in warning
    assert [row["step"] for row in rows(folder)] == [1]
    assert not (folder / "model").exists()
    run(values, folder)
    assert outcome(folder) == outcome(finished)


def test_a_restart_that_is_killed_leaves_a_run_that_has_not_finished(
    dataset, finished, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)

    def killed(path: Path) -> None:
        remove(path)
        if path.name == "checkpoints":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("modicum.trainer.folder.remove", killed)
        with pytest.raises(KeyboardInterrupt):
            RunFolder(folder).clear()
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["outputs"]) == ("interrupted", {})
    assert run(full(dataset), folder)["status"] == "finished"
    assert outcome(folder) == outcome(finished)


def test_a_fork_is_begun_anew_as_a_fork(dataset, finished, tmp_path):
    values, folder = full(dataset, training={"steps": 21}), tmp_path / "fork"
    run(values, folder, fork=finished)
    with pytest.raises(InputError, match=f"--fork: .*give --fork as well.*allowed: {finished}"):
        run(values, folder, restart=True)
    assert run(values, folder, fork=finished, restart=True)["forked_from"] == str(finished)
    assert [row["step"] for row in rows(folder)] == [21]


GARBAGE = {
    "a line": (b"garbage\n", ":1: is damaged"),
    "no row": (b'{"a": 1}\n', ":1: is damaged"),
    "no text": (b"\xff\xfe", ":1: is damaged"),
    "a folder": (None, ": must be a file, and is a folder"),
}


@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.jsonl", "evaluations.jsonl"])
@pytest.mark.parametrize(("content", "message"), GARBAGE.values(), ids=GARBAGE)
def test_rows_that_are_none_are_refused_and_left(
    dataset, finished, tmp_path, name, content, message
):
    refused_and_left(dataset, finished, tmp_path / "run", name, content, f"{name}{message}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", None, "must be a file, and is a folder"),
        ("run.json", b"garbage", "is damaged: not the JSON that a run writes"),
        ("run.json", b'{"modicum": "", "peak_bytes": 3}', "is damaged"),
        ("recipe.yaml", None, "must be a file, and is a folder"),
        ("recipe.yaml", b"\xff\xfe", "not UTF-8 text"),
        ("checkpoints", b"x", "must be a folder, and is a file"),
        ("tokenizer", b"x", "must be a folder, and is a file"),
        ("lock", None, "must be a file, and is a folder"),
    ],
)
def test_what_is_no_part_of_a_run_is_refused_and_left(
    dataset, finished, tmp_path, name, content, message
):
    refused_and_left(dataset, finished, tmp_path / "run", name, content, f"{name}: {message}")


def test_a_lock_that_is_a_pipe_is_refused(dataset, tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(InputError, match="lock: must be a file, and is neither"):
        run(full(dataset), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def refused_and_left(dataset, finished, folder, name, content, message):
    """Put something in the place of a part of a run, and extend the run."""
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns(name))
    if content is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(content)
    before = files(folder)
    with pytest.raises(InputError, match=re.escape(message)):
        run(full(dataset, training={"steps": 21}), folder)
    assert files(folder) == before


@pytest.mark.expensive
def test_other_data_than_the_run_began_with_is_refused(dataset, finished, tmp_path):
    copy = tmp_path / "data.jsonl"
    shutil.copy(dataset, copy)
    values, folder = full(copy), tmp_path / "run"
    with pytest.raises(Interrupted):
        run(values, folder, listener=interrupting("step", 7))
    with copy.open("a") as handle:
        handle.write('{"text": "one more"}\n')
    with pytest.raises(InputError, match="the data has changed since this run began"):
        run(values, folder)
    forked = run(values, tmp_path / "fork", fork=folder)  # which is how to go on with other data
    assert forked["steps"] == 20
    shutil.copy(dataset, copy)
    run(values, folder)
    assert losses(folder) == losses(finished)


def scale_a_norm(folder: Path) -> None:
    """Multiply one weight of few elements by 1.5, which no loss curve shows at once."""
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"] *= 1.5
    save_file(weights, file, metadata={"format": "pt"})


def test_another_base_model_than_the_run_began_with_is_refused(
    dataset, finished, finished_lora, tmp_path
):
    base, folder = tmp_path / "base", tmp_path / "run"
    shutil.copytree(finished, base)
    values = lora(base, dataset)
    with pytest.raises(Interrupted):
        run(values, folder, listener=interrupting("step", 7))
    kept = (base / "model" / "model.safetensors").read_bytes()
    scale_a_norm(base / "model")
    with pytest.raises(InputError, match=r"the base model \(model.safetensors\) has changed"):
        run(values, folder)
    (base / "model" / "model.safetensors").write_bytes(kept)
    run(values, folder)
    assert outcome(folder) == outcome(finished_lora)
    assert load_run(folder).adapter is not None
    scale_a_norm(base / "model")
    with pytest.raises(InputError, match="has changed since this adapter was trained on it"):
        load_run(folder)


def test_a_killed_export_keeps_what_was_measured(dataset, finished, tmp_path):
    values, folder = full(dataset), tmp_path / "run"
    shutil.copytree(finished, folder)
    before = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(before | {"status": "running"}))
    after = run(values, folder)
    for key in ("measured_by_kind", "final", "steps", "tokens", "parameters"):
        assert after[key] == before[key], key
    assert after["peak_bytes"]["measured"] == before["peak_bytes"]["measured"]


def test_a_run_goes_on_from_another_directory(
    dataset, finished, finished_lora, tmp_path, monkeypatch
):
    begun, elsewhere, folder = tmp_path / "begun", tmp_path / "elsewhere", tmp_path / "run"
    for place in (begun, elsewhere):
        place.mkdir()
    (begun / "base").symlink_to(finished)
    (begun / "data.jsonl").symlink_to(dataset)
    values = lora(Path("base"), Path("data.jsonl"))
    monkeypatch.chdir(begun)
    with pytest.raises(Interrupted):
        run(values, folder, listener=interrupting("step", 7))
    monkeypatch.chdir(elsewhere)
    recipe = modicum.Recipe(**values)
    for again in (recipe, load(folder / "recipe.yaml")):
        assert continued(again, folder).recipe.model.path == str(begun / "base")
    told = []
    modicum.train(continued(recipe, folder), folder, listener=told.append)
    assert [event["step"] for event in told if event["event"] == "resumed"] == [7]
    assert outcome(folder) == outcome(finished_lora)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(finished / "model")

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

COMMANDS = (
    "train", "plan", "data", "init", "schema", "methods", "prove", "check", "compare", "report",
    "watch", "chat", "serve", "merge", "export", "demo", "doctor", "drill", "promises", "reproduce",
    "completion", "bench", "checkpoint", "verify",
)  # fmt: skip


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def one_message(ended: Any) -> str:
    """The single line on standard error, with nothing on standard output."""
    assert ended.out == ""
    assert ended.err.startswith("modicum: ")
    assert ended.err.count("\n") == 1
    return str(ended.err)


# Help and lists


def test_help_names_every_command_with_a_whole_sentence(modicum: Any) -> None:
    ended = modicum("--help")
    assert ended.code == 0
    lines = [
        line.split(maxsplit=1) for line in ended.out.split("Commands:")[1].splitlines() if line
    ]
    assert tuple(name for name, _ in lines) == COMMANDS
    assert all(words.endswith(".") and not words.endswith("...") for _, words in lines)


def test_an_unknown_command_is_wrong_input(modicum: Any) -> None:
    ended = modicum("tran")
    assert ended.code == 2
    assert "Did you mean 'train'?" in ended.err


def test_version(modicum: Any) -> None:
    from modicum import __version__

    assert modicum("--version").out == f"{__version__}\n"


def test_methods_as_json(modicum: Any) -> None:
    listed = json.loads(modicum("methods", "--json", "--room", "adapters").out)
    assert {"name", "room", "status"} <= set(listed[0])
    assert "lora" in {method["name"] for method in listed}
    ended = modicum("methods", "--room", "adaptors")
    assert ended.code == 2
    assert "Did you mean 'adapters'?" in one_message(ended)


def test_a_method_by_its_name(modicum: Any) -> None:
    shown = modicum("methods", "galore")
    assert shown.code == 0
    for words in ("optimizer: {method: galore}", "modicum prove galore", "update_gap", "200"):
        assert words in shown.out
    listed = json.loads(modicum("methods", "galore", "--json").out)
    assert set(listed["meanings"]) >= set(listed["fields"]) >= {"rank", "update_gap"}
    assert "Did you mean 'galore'?" in modicum("methods", "gallore").err
    assert modicum("methods", "galore", "--room", "optim").code == 2


def test_what_may_be_tuned_of_a_method(modicum: Any) -> None:
    shown = " ".join(modicum("methods", "shira").out.split("To tune")[1].split())
    assert "learning_rate training.learning_rate 0.0001 to 3 log 0.003" in shown
    assert "rank adapter.rank 1 to 128 log, integers 16" in shown
    assert "mask adapter.mask rand, " in shown
    assert shown.endswith("rank sets its size.")
    assert "has no search table of its own" in modicum("methods", "nf4").out
    assert "To tune" not in modicum("methods", "lora_limits").out  # a diagnosis
    [one] = [each for each in json.loads(modicum("methods", "--json").out) if each["name"] == "mos"]
    assert one["search"] == json.loads(modicum("methods", "mos", "--json").out)["search"]
    assert (one["search"]["of"], one["search"]["size"]) == ("method", "equivalent_rank")
    assert one["search"]["fields"]["rank"] == {
        "path": "adapter.rank",
        "kind": "integer",
        "low": 2,
        "high": 64,
        "default": 8,
        "log": True,
        "step": 1,
    }


def test_the_schema_knows_the_methods(modicum: Any) -> None:
    schema = json.loads(modicum("schema").out)
    choices = schema["properties"]["adapter"]["anyOf"]
    assert "lora" in {choice.get("title") for choice in choices}


# Wrong input

MISTAKES = (
    ("training.stepps=5", "'training.stepps': unknown key"),
    ("training.steps=many", "expected an integer"),
    ("training.steps=0", "at least 1"),
    ("budget.memory=8 gigs", "not a size"),
    ("budget.memory=-1", "above zero"),
    ("adapter.method=lorra", "Did you mean 'lora'?"),
    ("training.steps", "expected FIELD=VALUE"),
    ("training.steps=[", "not valid YAML"),
)


@pytest.mark.parametrize(("override", "said"), MISTAKES)
def test_a_mistake_in_an_override_is_named_in_one_line(
    modicum: Any, runs: Any, override: str, said: str
) -> None:
    ended = modicum("plan", runs.recipe, "--set", override)
    assert ended.code == 2
    message = one_message(ended)
    assert said.replace("'training.stepps': ", "") in message
    assert "--set" in message


def test_what_the_plan_finds_wrong_has_the_line_of_the_recipe(modicum: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("training:\n  steps: 5\ndata:\n  path: nowhere\n")
    ended = modicum("plan", recipe)
    assert ended.code == 2
    assert f"{recipe}:4: data.path: " in one_message(ended)


def test_a_folder_is_no_recipe_and_its_recipe_is_named(modicum: Any, runs: Any) -> None:
    ended = modicum("train", runs.new)
    assert ended.code == 2
    assert f"{runs.new / 'recipe.yaml'}" in one_message(ended)


def test_an_out_that_is_a_file_or_holds_other_files(
    modicum: Any, runs: Any, tmp_path: Path
) -> None:
    stranger = tmp_path / "thesis.txt"
    stranger.write_text("mine")
    for out in (stranger, stranger / "below", tmp_path):
        ended = modicum("train", runs.recipe, "--out", out, "--quiet")
        assert ended.code == 2
        one_message(ended)
    assert stranger.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} <= {"thesis.txt", "lock"}


def test_a_budget_too_small_names_changes_that_fit(modicum: Any, runs: Any) -> None:
    # Of tensors: between two commands of a test its process grows, and a user's begins anew.
    ended = modicum("plan", runs.recipe, "--set", "budget.tensors=1MB")
    assert ended.code == 3
    first, *lines = ended.err.splitlines()
    assert "does not fit budget.tensors (1 MB)" in first
    changes = [line.removeprefix("  - ") for line in lines if line.startswith("  - --set ")]
    assert changes
    for change in changes:
        arguments = shlex.split(change.rpartition(" (needs ")[0])
        assert modicum("plan", runs.recipe, *arguments).code == 0


# train


def test_a_dry_run_makes_nothing(modicum: Any, runs: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = modicum("train", runs.recipe, "--out", out, "--dry-run", "--json")
    assert ended.code == 0
    assert json.loads(ended.out)["revision"] == 1
    assert not out.exists()


def test_a_finished_run_is_left_alone(modicum: Any, runs: Any) -> None:
    def stamps() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in runs.new.rglob("*")}

    before = stamps()
    ended = modicum("train", runs.recipe, "--out", runs.new)
    assert ended.code == 0
    assert ended.out == f"report: {runs.new / 'report.html'}\n"
    assert "finished already" in ended.err
    summary = modicum("train", runs.recipe, "--out", runs.new, "--json")
    assert json.loads(summary.out)["status"] == "finished"
    changed = modicum("train", runs.recipe, "--out", runs.new, "--set", "training.seed=7")
    assert changed.code == 2
    assert "training.seed: 0 -> 7" in one_message(changed)
    assert stamps() == before


@pytest.mark.expensive
def test_more_steps_extend_a_run_and_a_fork_starts_another(
    modicum: Any, runs: Any, tmp_path: Path
) -> None:
    out, forked = tmp_path / "run", tmp_path / "forked"
    shutil.copytree(runs.new, out)
    more = ("--set", "training.steps=5", "--quiet")
    assert modicum("train", runs.recipe, "--out", out, *more).code == 0
    assert [row["step"] for row in rows(out / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    changed = ("--set", "training.steps=7", "--set", "training.learning_rate=1e-3")
    ended = modicum(
        "train", runs.recipe, "--out", forked, "--fork", out, *changed, "--progress", "json"
    )
    assert ended.code == 0, ended.err
    events = [json.loads(line) for line in ended.out.splitlines()]
    assert [e["step"] for e in events if e["event"] == "step"] == [6, 7]
    assert events[-1]["event"] == "finished"
    nothing = modicum("train", runs.recipe, "--out", tmp_path / "x", "--fork", tmp_path / "none")
    assert nothing.code == 2
    assert "no checkpoint to start from" in one_message(nothing)


def test_a_run_that_failed_before_its_first_step_gives_way_to_a_mended_recipe(
    modicum: Any, runs: Any, tmp_path: Path
) -> None:
    recipe, data, out = tmp_path / "one.yaml", tmp_path / "one.txt", tmp_path / "run"
    data.write_text("a text that is too short to be held out in part\n" * 9)
    text = runs.recipe.read_text().replace(str(runs.recipe.parent / "texts"), str(data))
    recipe.write_text(text)
    command = ("train", recipe, "--out", out, "--quiet")
    failed = modicum(*command)
    assert failed.code == 2
    assert f"{recipe}:2: data.validation_fraction: " in one_message(failed)
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    recipe.write_text(text.replace("0.25", "0.0"))
    mended = modicum(*command)
    assert mended.code == 0, mended.err
    assert len(rows(out / "metrics.jsonl")) == 3
    assert [row["revision"] for row in rows(out / "plan.jsonl")] == [1]


def start(runs: Any, out: Path, steps: int) -> subprocess.Popen[str]:
    """A run in a process of its own, that has come to its tenth step."""
    command = [sys.executable, "-m", "modicum", "train", runs.recipe, "--out", out, "--quiet"]
    command += ["--set", f"training.steps={steps}", "--set", "checkpoint.every=8"]
    # A process in the background of a shell inherits an ignored SIGINT; a terminal's does not.
    process = subprocess.Popen(
        list(map(str, command)),
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    metrics, patience = out / "metrics.jsonl", time.monotonic() + 180
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 10:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < patience
        time.sleep(0.01)
    return process


@pytest.mark.expensive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_goes_on(
    modicum: Any, runs: Any, tmp_path: Path, number: signal.Signals
) -> None:
    out, steps = tmp_path / "run", 100_000
    with start(runs, out, steps) as process:
        process.send_signal(number)
        _, error = process.communicate(timeout=180)
    assert process.returncode == 4
    how = "stopped (Ctrl-C)" if number == signal.SIGINT else "stopped by SIGTERM"
    assert error == f"modicum: {how}; the state is saved, and the same command resumes\n"
    done = len(rows(out / "metrics.jsonl"))
    assert max(path.name for path in (out / "checkpoints").iterdir()) == f"step-{done:08d}"
    record = json.loads((out / "run.json").read_text())
    assert (record["status"], record["interruptions"]) == ("interrupted", 1)
    assert "interrupted" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.expensive
def test_a_killed_run_goes_on_and_a_used_folder_is_locked(
    modicum: Any, runs: Any, tmp_path: Path
) -> None:
    out, whole, steps = tmp_path / "run", tmp_path / "whole", 150
    same = ("--set", f"training.steps={steps}", "--set", "checkpoint.every=8", "--quiet")
    with start(runs, out, steps) as process:
        ended = modicum("train", runs.recipe, "--out", out, *same)
        process.kill()
    assert ended.code == 2
    assert f"in use by process {process.pid}" in one_message(ended)
    assert len(rows(out / "metrics.jsonl")) < steps
    assert modicum("train", runs.recipe, "--out", out, *same).code == 0
    assert modicum("train", runs.recipe, "--out", whole, *same).code == 0
    losses = [[(r["step"], r["loss"]) for r in rows(f / "metrics.jsonl")] for f in (out, whole)]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == list(range(1, steps + 1))


# What a run is for


def test_chat_continues_a_prompt(modicum: Any, runs: Any) -> None:
    likeliest = ("--prompt", "def add", "--max-tokens", "4", "--temperature", "0")
    first, again = (modicum("chat", runs.new, *likeliest).out for _ in range(2))
    assert first == again
    assert first.startswith("def add")
    assert first.endswith("\n")
    base = modicum("chat", runs.adapted, *likeliest, "--base")
    assert base.out == first
    # What is likeliest may stay so where little was learned; of some that are drawn one does not.
    drawn = [("--prompt", "def", "--max-tokens", "12", "--seed", str(seed)) for seed in range(6)]
    adapted = [modicum("chat", runs.adapted, *words).out for words in drawn]
    assert adapted != [modicum("chat", runs.adapted, *words, "--base").out for words in drawn]
    without = modicum("chat", runs.new, *likeliest, "--base")
    assert without.code == 2
    assert "no adapter" in one_message(without)


def test_chat_reads_lines_from_a_pipe(
    modicum: Any, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    def said(text: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        ended = modicum("chat", runs.new, "--max-tokens", "3", "--seed", "1")
        assert (ended.code, ended.err) == (0, "")
        return str(ended.out).split("\n")

    assert said("/quit\ndef\n") == [""]
    once = said("def\n")
    assert said("def\n\n/new\ndef\n/quit\n") == [*once[:-1], *once]


def test_chat_changes_adapters_between_answers(
    modicum: Any, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    def said(text: str, *words: Any, seed: int = 0) -> Any:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        drawn = ("--max-tokens", "12", "--seed", str(seed), "--plain")
        return modicum("chat", *words, *drawn)

    more = (runs.adapted, "--adapter", f"more={runs.adapted}")
    asked = "def\n/new\n/adapter {}\ndef\n"
    # Where little was learned, what is drawn may be the base's; of some that are drawn one is not.
    for seed in range(12):
        own, base = (said("def\n", runs.adapted, *w, seed=seed).out for w in ((), ("--base",)))
        if own != base:
            break
    assert own != base
    assert said(asked.format("base"), *more, seed=seed).out == own + base
    assert said(asked.format("more"), *more, seed=seed).out == own + own
    assert said("def\n", *more, "--base", seed=seed).out == base
    alone = (runs.adapted, "--adapter", runs.adapted)  # by the folder's name
    assert said(asked.format(runs.adapted.name), *alone, seed=seed).out == own + own
    for word, problem in (("mor", "Did you mean 'more'?"), ("more=x", "is no weight")):
        wrong = said(f"/adapter {word}\n", *more)
        assert wrong.code == 2
        assert problem in one_message(wrong)


@pytest.mark.parametrize("how", [KeyboardInterrupt, EOFError, "/quit"])
def test_chat_at_a_terminal_ends_with_0(
    modicum: Any, runs: Any, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    def typed(prompt: str) -> str:
        if isinstance(how, str):
            return how
        raise how

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", typed)
    ended = modicum("chat", runs.new)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[-1] == "ended"


@pytest.mark.parametrize(
    ("command", "name", "said"),
    [
        ("prove lora", "modicum.proofs.prove", "; the same command begins anew"),
        ("demo", "modicum.cli.demo.run_demo", "; the same command resumes"),
        ("data x.yaml", "modicum.cli.data.show", "; the same command begins anew"),
        ("serve FOLDER --port 0", "modicum.serve.loading.load_served", ""),
        ("chat FOLDER", "modicum.serve.load_run", ""),
    ],
)
def test_what_is_said_of_an_interruption_is_so(
    modicum: Any, runs: Any, monkeypatch: pytest.MonkeyPatch, command: str, name: str, said: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(name, interrupted)
    ended = modicum(*command.replace("FOLDER", str(runs.new)).split())
    assert ended.code == 4
    assert one_message(ended) == f"modicum: interrupted{said}\n"


LOADING = """
import signal, sys
from modicum.cli import main
signal.signal(signal.SIGALRM, main.on_interrupt)  # as SIGINT's, but on time
signal.setitimer(signal.ITIMER_REAL, float(sys.argv.pop(1)))
main.run()
"""


@pytest.mark.expensive
@pytest.mark.parametrize("after", [0.01, 0.1, 0.5, 1.0, 2.0])
def test_ctrl_c_while_a_chat_loads_is_one_sentence(runs: Any, after: float) -> None:
    command = [sys.executable, "-c", LOADING, str(after), "chat", str(runs.new)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.wait(timeout=180)  # its input stays open: it waits for text once it has loaded
        out, error = process.communicate()
    assert (out, error) == ("", "modicum: interrupted\n")
    # Python itself ends by the signal where it came in a text that is compiled while it runs.
    assert process.returncode in (4, -signal.SIGINT)


def test_ctrl_c_after_a_command_is_the_program_s_that_called_it(
    modicum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        modicum("methods")
        monkeypatch.setattr("modicum.cli.main.os._exit", left.append)
        with pytest.raises(KeyboardInterrupt):  # from a module's own lines, not `__main__`'s
            exec("raise_signal(2)", {"__name__": "notebook", "raise_signal": signal.raise_signal})
    finally:
        signal.signal(signal.SIGINT, before)
    assert not left


@pytest.mark.parametrize("command", [("chat", "--prompt", "x"), ("report",), ("watch",)])
def test_a_folder_that_holds_no_run(modicum: Any, tmp_path: Path, command: Any) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        ended = modicum(command[0], folder, *command[1:])
        assert ended.code == 2
        one_message(ended)


def test_a_merged_model_computes_what_the_adapter_does(
    modicum: Any, runs: Any, tmp_path: Path
) -> None:
    import torch

    from modicum.models import huggingface
    from modicum.serve import load_run

    out = tmp_path / "merged"
    assert modicum("merge", runs.adapted, "--out", out).out == f"{out}\n"
    adapted, ids = load_run(runs.adapted), torch.arange(12)[None]
    with torch.no_grad():
        expected = adapted.model(ids)
        torch.testing.assert_close(huggingface.load(out)(ids), expected, atol=1e-5, rtol=0)
        assert (huggingface.load(runs.new)(ids) - expected).abs().max() > 1e-3
    assert (out / "tokenizer.json").exists()
    for run, where in ((runs.adapted, out), (runs.new, tmp_path / "other")):
        again = modicum("merge", run, "--out", where)
        assert again.code == 2
        one_message(again)


def test_a_merged_model_stops_where_the_texts_of_its_run_ended(
    modicum: Any, runs: Any, tmp_path: Path
) -> None:
    from modicum.data import Tokenizer

    run, out = tmp_path / "run", tmp_path / "merged"
    shutil.copytree(runs.adapted, run)
    file = run / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "!"}))
    ended = modicum("merge", run, "--out", out)
    assert ended.code == 0, ended.err
    ends = [Tokenizer.load(each / "tokenizer").eos_id for each in (runs.adapted, run)]
    said = json.loads((out / "generation_config.json").read_text())
    assert said["eos_token_id"] == ends
    assert ends[0] != ends[1]


def test_an_exported_file_holds_the_merged_model(modicum: Any, runs: Any, tmp_path: Path) -> None:
    import gguf
    import torch

    from modicum.models import huggingface

    file, merged = tmp_path / "model.gguf", tmp_path / "merged"
    ended = modicum("export", runs.adapted, "--out", file, "--dtype", "f32")
    assert (ended.code, ended.out) == (0, f"{file}\n")
    modicum("merge", runs.adapted, "--out", merged)
    numbers = {each.name: each.data for each in gguf.GGUFReader(file).tensors}
    expected = huggingface.load(merged).get_parameter("model.layers.0.self_attn.v_proj.weight")
    found = torch.from_numpy(numbers["blk.0.attn_v.weight"].copy())
    torch.testing.assert_close(found, expected.detach(), atol=1e-6, rtol=0)
    alone = ("--form", "gguf-adapter", "--dtype", "f32", "--out", tmp_path / "adapter.gguf")
    assert modicum("export", runs.adapted, *alone).code == 0
    kept = {each.name for each in gguf.GGUFReader(tmp_path / "adapter.gguf").tensors}
    assert {"blk.0.attn_v.weight.lora_a", "blk.0.attn_v.weight.lora_b"} <= kept
    ended = modicum("export", runs.new, *alone)
    assert ended.code == 2
    assert "no adapter" in one_message(ended)


@pytest.mark.expensive
def test_several_methods_are_proven_in_one_command(modicum: Any, tmp_path: Path) -> None:
    ended = modicum("prove", "nf4", "of_no_name", "--save", tmp_path / "none")
    assert ended.code == 2
    assert "of_no_name" in one_message(ended)
    assert not (tmp_path / "none").exists()
    ended = modicum("prove", "nf4", "int8", "--json", "--save", tmp_path)
    assert ended.code == 0, ended.err
    made = json.loads(ended.out)
    assert [each["name"] for each in made] == ["nf4", "int8"]
    for each in made:
        assert json.loads((tmp_path / f"{each['name']}.json").read_text()) == each


def test_an_adapter_is_folded_into_a_lora(modicum: Any, runs: Any, tmp_path: Path) -> None:
    out = tmp_path / "folded"
    to = ("--form", "peft", "--out", out)
    for more, said in (
        ((), "say of which rank"),
        (("--rank", 1, "--tolerance", 1e-9), "is allowed"),
    ):
        ended = modicum("export", runs.adapted, *to, *more)
        assert ended.code == 2
        assert said in one_message(ended)
        assert not out.exists()
    ended = modicum("export", runs.adapted, *to, "--rank", 64)
    assert ended.code == 0
    assert ended.out.startswith("a LoRA of rank 64 loses ")
    assert " of the change of the weights and " in ended.out
    assert ended.out.splitlines()[0].endswith(" of that of the held-out logits")
    assert ended.out.endswith(f"\n{out}\n")
    assert json.loads((out / "adapter_config.json").read_text())["peft_type"] == "LORA"
    for run, more, said in (
        (runs.adapted, (*to, "--rank", 64), "something already"),
        (runs.new, ("--form", "peft", "--out", tmp_path / "b", "--rank", 2), "no adapter"),
        (runs.adapted, ("--rank", 2), "is for --form peft"),
    ):
        ended = modicum("export", run, *more)
        assert ended.code == 2
        assert said in one_message(ended)


def test_a_plan_says_where_its_adapter_travels(modicum: Any, runs: Any) -> None:
    recipe = (runs.adapted / "recipe.yaml",)
    found = json.loads(modicum("plan", *recipe, "--json").out)["adapter"]
    assert found["loads_in"] == "peft, vLLM"
    assert found["in_vllm"]
    assert f"a LoRA of rank {found['ranks'][0]}, exact" in found["reason"]
    shown = modicum("plan", *recipe).out
    assert "adapter loads in" in shown
    assert "not run here" in shown.replace("\n", " ")
    listed = {each["name"]: each for each in json.loads(modicum("methods", "--json").out)}
    assert listed["lora"]["loads_in"] == "peft, vLLM"
    assert listed["galore"]["loads_in"] is None
    page = " ".join(modicum("methods", "dora").out.split())
    assert "peft, exactly; in vLLM only merged" in page


@pytest.mark.expensive
def test_a_plan_by_a_trace_has_the_same_figures(modicum: Any, runs: Any) -> None:
    known = modicum("plan", runs.recipe, "--json")
    traced = modicum("plan", runs.recipe, "--traced", "--json")
    expected, found = (json.loads(each.out)["prediction"] for each in (known, traced))
    assert (expected["ledger"], found["ledger"]) == ("arithmetic", "traced")
    assert found["peak_bytes"] == pytest.approx(expected["peak_bytes"], rel=0.01)
    assert "by a trace of the model" in modicum("plan", runs.recipe, "--traced").out


def test_a_merge_into_bf16_says_how_much_was_rounded(
    modicum: Any, runs: Any, tmp_path: Path
) -> None:
    from modicum.models import huggingface, saving

    base, run = tmp_path / "base", tmp_path / "run"
    saving.save(huggingface.load(runs.new).bfloat16(), base)
    shutil.copytree(runs.adapted, run)
    (run / "adapter" / "base_weights.json").unlink()
    config = run / "adapter" / "adapter_config.json"
    settings = json.loads(config.read_text()) | {"base_model_name_or_path": str(base)}
    config.write_text(json.dumps(settings))
    ended = modicum("merge", run, "--out", tmp_path / "merged")
    assert (ended.code, ended.err.count("\n")) == (0, 1)
    assert ended.err.startswith("warning: merged weights were rounded to a low precision: the err")


def test_report_says_where_it_is(modicum: Any, runs: Any) -> None:
    assert modicum("report", runs.adapted).out == f"{runs.adapted / 'report.html'}\n"
    assert json.loads(modicum("report", runs.adapted, "--json").out)["steps"] == 3


def test_report_of_several_runs(
    modicum: Any, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert modicum("report", runs.adapted, runs.new).out == "comparison.html\n"
    assert "adapter.method" in (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert modicum("report", runs.new, "--out", "one.html").out == "one.html\n"
    summaries = json.loads(modicum("report", runs.adapted, runs.new, "--json").out)
    assert [summary["folder"] for summary in summaries] == [str(runs.adapted), str(runs.new)]
    ended = modicum("report", runs.new, runs.new)
    assert ended.code == 2
    assert "named twice" in one_message(ended)


@pytest.mark.parametrize(
    "words",
    [
        ("prove", "lora", "--save"),
        ("merge", "run", "--out"),
        ("export", "run", "--out"),
        ("drill", "--output"),
        ("drill", "--work"),
        ("demo", "--runs"),
        ("demo", "--functions"),
        ("init", "--out"),
        ("train", "demo-pretrain", "--out"),
    ],
)
def test_a_place_that_takes_no_file_is_named_before_the_work(
    modicum: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file" / "below" / "it", tmp_path / ("a" * 300)):
        ended = modicum(*words, place)
        assert ended.code == 2
        assert words[-1] in one_message(ended)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# The process


def test_without_the_extra_the_fix_is_named(modicum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "modicum.cli.main.find_spec", lambda name: None if name in ("rich", "yaml") else name
    )
    ended = modicum("methods")
    assert ended.code == 2
    assert one_message(ended).endswith("needs rich, yaml: pip install 'modicum[cli]'\n")


def test_an_interruption_before_the_run_ends_with_4(
    modicum: Any, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr("modicum.recipe_yaml.load", stopped)
    ended = modicum("plan", runs.recipe)
    assert ended.code == 4
    assert "interrupted" in one_message(ended)


def test_a_list_needs_no_torch_and_a_reader_may_leave(runs: Any) -> None:
    code = (
        "import sys\nfrom modicum.cli import main\n"
        "try:\n    main.run()\nfinally:\n    assert 'torch' not in sys.modules, 'torch'"
    )
    for command in (["methods"], ["train", str(runs.recipe), "--out", str(runs.new)]):
        done = subprocess.run(
            [sys.executable, "-c", code, *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run(
        [sys.executable, "-m", "modicum", "schema"], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (0, b"")


# checkpoint


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_a_converted_checkpoint_has_the_run_s_weights(
    modicum: Any, runs: Any, tmp_path: Path
) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    target = tmp_path / "torch"
    assert modicum("checkpoint", "convert", runs.new, target).out == f"{target}\n"
    exported = load_file(runs.new / "model" / "model.safetensors")
    name = next(name for name in exported if name.endswith("down_proj.weight"))
    state = {"model": {name: torch.zeros_like(exported[name])}}
    dcp.load(state, checkpoint_id=target)
    assert torch.equal(state["model"][name], exported[name])


@pytest.mark.parametrize("to", ["dcp", "modicum"])
def test_a_checkpoint_that_cannot_be_converted_is_one_message(
    modicum: Any, runs: Any, tmp_path: Path, to: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / ".metadata").write_bytes(b"a pickle")
    new, inside = tmp_path / "new", tmp_path / "file" / "inside"
    cases = {
        (tmp_path / "nowhere", new): "there is no such folder",
        (tmp_path / "file", new): "there is no such folder",
        (tmp_path / "torch", new): "SafetensorsWriter",
        (runs.new, tmp_path / "torch"): "there is something already",
        (runs.new, inside): "a folder is needed, and this is a file",
    }
    for (source, target), words in cases.items():
        ended = modicum("checkpoint", "convert", source, target, "--to", to)
        assert ended.code == 2
        assert words in one_message(ended)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "torch"}


# bench


def test_bench_machine_shows_the_record_that_plans_rest_on(modicum: Any) -> None:
    shown = json.loads(modicum("bench", "machine", "--json").out)
    record, depends = shown["record"], shown["depends_on"]
    assert 0 < record["loaded_bytes"] < 10**9
    assert 0 <= record["kept"][0] <= record["kept"][1] < 1
    assert 0 < record["efficiency"] < 2
    assert depends["threads"] == os.environ["OMP_NUM_THREADS"]
    assert json.loads(Path(shown["file"]).read_text(encoding="utf-8"))["record"] == record
    plain = modicum("bench", "machine")
    assert (plain.code, plain.err) == (0, "")
    for words in ("loaded", "kept", "efficiency", depends["processor"], record["when"]):
        assert words in plain.out


@pytest.mark.expensive
def test_a_budget_of_tensors_is_planned_beside_what_python_and_torch_hold(
    modicum: Any, runs: Any
) -> None:
    ended = modicum("plan", runs.recipe, "--set", "budget.tensors=500MB", "--json")
    prediction = json.loads(ended.out)["prediction"]
    assert prediction["budget_bytes"] == prediction["process_base"] + 500 * 10**6
    least, most = prediction["process_range"]
    assert prediction["process_base"] < least <= prediction["process_bytes"] <= most
    out = modicum("plan", runs.recipe, "--set", "budget.tensors=500MB").out
    assert "before the first tensor; 500 MB of the budget are left" in " ".join(out.split())
    refused = modicum("plan", runs.recipe, "--set", "budget.tensors=10kB")
    assert refused.code == 3
    assert "does not fit budget.tensors (10 kB)" in refused.err
    assert "--set budget.tensors=" in refused.err

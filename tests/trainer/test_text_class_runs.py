"""Runs of classifiers of transformers: planned, trained, adapted, interrupted, exported."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from classifiers import base_folder, rows, theirs, write_rows
from peft import PeftModel
from pool import Pool
from safetensors.torch import load_file, save_file
from tests.trainer.test_ranks import outcome, trains
from tests.trainer.test_ranks import rows as logged
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import modicum
from modicum.adapters import load
from modicum.cli.commands.merge import merge
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.models import traced_cache
from modicum.models.traced_cache import TraceRequest
from modicum.serve import load_adapted, load_run
from modicum.verify import verify_export

LORA = {"adapter": {"method": "lora", "rank": 4, "dropout": 0.1}}
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": LORA,
    "nf4": LORA | {"linear": {"method": "nf4"}},
    "bf16": LORA,  # on a base whose files are in bf16
}
FIRST: list[Any] = ["bert-full", "bert-lora", "gpt2-full", "bert-bf16"]
LATER = ["gpt2-nf4", "roberta-lora", "distilbert-full", "bert-nf4", "qwen3-lora", "gpt2-bf16"]
FIRST += [pytest.param(name, marks=pytest.mark.slow) for name in LATER]


@pytest.fixture(autouse=True, scope="module")
def traced_here() -> Iterator[None]:
    """Traces are made in this process: to start another takes longer than all else."""

    def here(request: TraceRequest, wanted: list[Any]) -> Any:
        asked = {"build": request.build, "arguments": dict(request.arguments), "wanted": wanted}
        return json.loads(json.dumps(traced_cache.answer(asked)))["passes"]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traced_cache, "_traced_apart", here)
        yield


def values(base: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    """A recipe in plain values, with data of its own."""
    data = folder / "data.jsonl"
    if not data.exists():
        write_rows(data, rows())
    training = {"steps": 18, "batch_size": 16, "micro_batch_size": 8, "learning_rate": 5e-3}
    made: dict[str, Any] = {
        "task": {"method": "text_classes"},
        "model": {"path": str(base)},
        "data": {"path": str(data), "sequence_length": 12, "validation_fraction": 0.2},
        "training": training,
        "evaluation": {"every": 6},
        "checkpoint": {"every": 4},
    }
    for name, section in sections.items():
        made[name] = made.get(name, {}) | section
    return made


def rounded(base: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the weights of a folder in this dtype."""
    stored = load_file(base / "model.safetensors")
    save_file({name: each.to(dtype) for name, each in stored.items()}, base / "model.safetensors")


@pytest.fixture(scope="module", params=FIRST)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A run folder, and the recipe that made it."""
    name, how = request.param.split("-")
    folder = tmp_path_factory.mktemp(f"{name}-{how}")
    base = base_folder(folder / "base", name)
    if how == "bf16":
        rounded(base)
    made = values(base, folder, **WAYS[how])
    assert trains(Ranks(), made, folder / "run") == "done"
    return folder / "run", made


@pytest.mark.expensive
def test_the_loss_falls_and_the_forecast_holds(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, made = trained
    losses = [row["loss"] for row in logged(folder)]
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.15
    plan = modicum.plan(modicum.Recipe(**made))
    assert in_bf16(made) == ("bf16" in str(folder))
    assert plan.counts["classes"] == {"animals": 24, "plants": 24}
    last = logged(folder, "evaluations")[-1]
    assert {"accuracy", "macro_f1", "by_class"} <= last.keys()
    assert set(last["by_class"]) == {"animals", "plants"}
    facts = json.loads((folder / "run.json").read_text())
    assert facts["data"]["classes"] == plan.counts["classes"]
    # A plan is for rows of `sequence_length`, and one more micro-batch has as long ones.
    assert facts["peak_bytes"]["measured"] <= 1.1 * facts["peak_bytes"]["predicted"]


def in_bf16(made: dict[str, Any]) -> bool:
    """Whether frozen weights are held in bf16."""
    return modicum.plan(modicum.Recipe(**made)).recipe.training.precision == "bf16"


@pytest.mark.expensive
def test_interrupted_it_resumes_to_the_bit(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, made = trained
    assert trains(Ranks(), made, tmp_path / "run", (0, 7)).startswith("4: stopped")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(folder)


@pytest.mark.expensive
@torch.no_grad()
def test_others_read_what_it_exports(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, made = trained
    last = logged(folder, "evaluations")[-1]
    if (folder / "model").is_dir():
        model = theirs(folder / "model")
        assert model.config.id2label == {0: "animals", 1: "plants"}
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    else:
        if "linear" in made:  # PEFT would have to quantize alike
            return
        pad: dict[str, Any] = {"dtype": torch.float32}
        if folder.parent.name.startswith(("qwen3", "gpt2")):
            pad["pad_token_id"] = 0
        base = AutoModelForSequenceClassification.from_pretrained(
            made["model"]["path"], num_labels=2, **pad
        )
        ours = AutoModelForSequenceClassification.from_pretrained(
            made["model"]["path"], num_labels=2, **pad
        )
        load(ours.eval(), folder / "adapter")
        model = PeftModel.from_pretrained(base, folder / "adapter").eval()
        ids = torch.tensor([[2, 5, 9, 3]])
        torch.testing.assert_close(ours(ids).logits, model(ids).logits, rtol=0, atol=1e-6)
        tokenizer = AutoTokenizer.from_pretrained(made["model"]["path"])
    task = modicum.plan(modicum.Recipe(**made)).task
    inputs = task.look(modicum.Recipe(**made))
    texts = inputs.texts
    held = [place for place, flag in enumerate(texts.flags) if flag]
    given = [texts.rows[place].texts[0] for place in held]
    batch = tokenizer(given, padding=True, truncation=True, max_length=12, return_tensors="pt")
    batch.pop("token_type_ids", None)
    logits = model(**batch).logits
    labels = torch.tensor([texts.labels[place] for place in held])
    loss = torch.nn.functional.cross_entropy(logits, labels)
    # What was trained in bf16 is computed in fp32 here.
    assert float(loss) == pytest.approx(last["loss"], rel=2e-2 if in_bf16(made) else 1e-4)


@pytest.mark.expensive
@torch.no_grad()
def test_merged_it_computes_the_same(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, made = trained
    if "adapter" not in made:
        with pytest.raises(InputError) as caught:
            merge(folder, tmp_path / "merged")
        assert caught.value.problem.endswith(f"its model is in {folder}/model")
        return
    data = Path(made["data"]["path"])
    kept = data.read_text()
    data.unlink()  # it is not asked for
    merge(folder, tmp_path / "merged")
    data.write_text(kept)
    model, _ = load_adapted(folder)
    found, ids = theirs(tmp_path / "merged"), torch.tensor([[2, 5, 9, 3]])
    error = 5e-2 if in_bf16(made) else 1e-4  # the sum is rounded to bf16
    torch.testing.assert_close(found(ids).logits, model(ids), rtol=0, atol=error)
    assert found.config.id2label == {0: "animals", 1: "plants"}
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("cat")["input_ids"]


@pytest.mark.expensive
def test_what_is_for_models_that_write_refuses_it(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    with pytest.raises(InputError, match="trains no model that writes text"):
        load_run(folder)


@pytest.mark.expensive
def test_what_was_exported_computes_what_was_trained(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    done = verify_export(folder)
    assert done.findings == []
    assert all(check["other_classes"] == 0 for check in done.checks if "error" in check)


@pytest.mark.expensive
def test_pairs_of_texts_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "bert")
    drawn = rows(40)
    pairs = [
        {
            "premise": one["text"],
            "hypothesis": other["text"],
            "same": one["label"] == other["label"],
        }
        for one, other in zip(drawn, random.Random(1).choices(drawn, k=40), strict=True)
    ]
    write_rows(tmp_path / "data.jsonl", pairs)
    task = {"text_columns": ["premise", "hypothesis"], "label_column": "same"}
    made = values(base, tmp_path, task=task, training={"steps": 4})
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    model, tokenizer = (
        each.from_pretrained(tmp_path / "run" / "model")
        for each in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    assert model.config.id2label == {0: "false", 1: "true"}
    recipe = modicum.Recipe(**made)
    texts = modicum.plan(recipe).task.look(recipe).texts
    held = [place for place, flag in enumerate(texts.flags) if flag]
    given = [list(texts.rows[place].texts) for place in held]
    batch = tokenizer(
        given, padding=True, truncation=True, max_length=12, return_tensors="pt",
        return_token_type_ids=True,
    )  # fmt: skip
    assert batch["token_type_ids"].any()
    labels = torch.tensor([texts.labels[place] for place in held])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model.eval()(**batch).logits, labels)
    last = logged(tmp_path / "run", "evaluations")[-1]
    assert float(loss) == pytest.approx(last["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "how"), [("ddp", "lora"), ("fsdp", "full"), ("fsdp", "lora")])
def test_ranks_learn_what_one_process_does(
    strategy: str, how: str, tmp_path: Path, pool: Pool
) -> None:
    sections = {} if how == "full" else {"adapter": {"method": "lora", "rank": 4}}
    # Dropout draws other numbers on every rank.
    base = base_folder(tmp_path / "base", "bert")
    config = json.loads((base / "config.json").read_text())
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (base / "config.json").write_text(json.dumps(config | without))
    # Of 7 rows, no two ranks have as many.
    made = values(base, tmp_path, **sections, training={"batch_size": 7, "micro_batch_size": 2})
    assert trains(Ranks(), made, tmp_path / "one") == "done"
    made |= {"parallel": {"strategy": strategy}}
    assert pool.run(trains, made, tmp_path / "two", ranks=2) == ["done", "done"]
    two, one = ([row["loss"] for row in logged(tmp_path / run)] for run in ("two", "one"))
    assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how", "precision"),
    [("bert", "full", "bf16"), ("bert", "lora", "fp32"), ("gpt2", "lora", "bf16")],
)
def test_in_bf16_and_recomputed(name: str, how: str, precision: str, tmp_path: Path) -> None:
    made = values(base_folder(tmp_path / "base", name), tmp_path, **WAYS[how])
    made["training"] |= {"precision": precision, "recompute": "blocks"}
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    losses = [row["loss"] for row in logged(tmp_path / "run")]
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.1

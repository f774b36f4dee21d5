"""Training that starts from an adapter: ours and PEFT's, checked, resumed, on ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from safetensors.torch import load_file
from tests.trainer.conftest import lora, losses, outcome, rows, run
from tests.trainer.test_ranks import column, trains

import modicum
from modicum.core.errors import InputError
from modicum.recipe import Recipe
from modicum.trainer import continued, train

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"]},
    "mos": {"method": "mos", "rank": 2},
}


@pytest.fixture(scope="session")
def earlier(finished: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that gives the folder of a run that trained an adapter of a method."""
    made: dict[str, Path] = {}

    def of(method: str) -> Path:
        if method not in made:
            made[method] = tmp_path_factory.mktemp(method) / "run"
            values = recipe_of(finished, dataset, ADAPTERS[method])
            run(values, made[method])
        return made[method]

    return of


def recipe_of(
    finished: Path, dataset: Path, adapter: dict[str, Any], start: Path | None = None
) -> dict[str, Any]:
    values = lora(finished, dataset, training={"steps": 6, "micro_batch_size": 8})
    values["adapter"] = adapter
    if start is not None:
        values["model"] = {"path": str(finished), "adapter": str(start)}
    return values


@pytest.mark.parametrize("method", ["lora", "mos"])
def test_it_begins_where_the_other_ended(dataset, finished, earlier, tmp_path, method):
    before = earlier(method)
    # What a run exports is PEFT's LoRA where that is exact, so also of MoS.
    values = recipe_of(finished, dataset, {"method": "lora"}, before / "adapter")
    plan = modicum.plan(Recipe(**values))
    shown = next(row for row in plan.choices if row["field"] == "model.adapter")
    assert shown["value"] == str(before / "adapter")
    assert "starts from this lora" in shown["why"]
    train(plan, tmp_path / "run", listener=lambda _: None)
    ended, began = (rows(folder, "evaluations.jsonl") for folder in (before, tmp_path / "run"))
    assert began[0]["loss"] == pytest.approx(ended[-1]["loss"], abs=1e-6)
    assert began[-1]["loss"] < began[0]["loss"]


def test_fields_come_from_the_folder_and_dropout_may_be_another(dataset, finished, earlier):
    start = earlier("lora") / "adapter"
    adapter = {"method": "lora", "dropout": 0.3}
    plan = modicum.plan(Recipe(**recipe_of(finished, dataset, adapter, start)))
    assert plan.recipe.adapter == {
        "method": "lora", "rank": 4, "alpha": 8.0, "dropout": 0.3,
        "targets": ["q_proj", "v_proj"], "exclude": [], "also": [], "rank_stabilized": False,
    }  # fmt: skip


@pytest.mark.expensive
def test_a_run_resumes_without_the_folder_to_the_bit(dataset, finished, earlier, tmp_path):
    start = tmp_path / "adapter"
    shutil.copytree(earlier("lora") / "adapter", start)
    values = recipe_of(finished, dataset, {"method": "lora"}, start)
    run(values, tmp_path / "straight")
    short = {**values, "training": {**values["training"], "schedule": "constant"}}
    run(short, tmp_path / "other")
    for steps, gone in ((3, False), (6, True)):
        if gone:
            shutil.rmtree(start)
        recipe = Recipe(**{**short, "training": {**short["training"], "steps": steps}})
        plan = continued(recipe, tmp_path / "run")
        assert any(row["field"] == "model.adapter" for row in plan.choices)
        train(plan, tmp_path / "run", listener=lambda _: None)
    assert losses(tmp_path / "run") == losses(tmp_path / "other")
    assert outcome(tmp_path / "run")["weights"] == outcome(tmp_path / "other")["weights"]


@pytest.mark.expensive
def test_before_its_first_checkpoint_a_run_has_its_copy(dataset, finished, earlier, tmp_path):
    start = tmp_path / "adapter"
    shutil.copytree(earlier("lora") / "adapter", start)
    values = recipe_of(finished, dataset, {"method": "lora"}, start)
    run(values, tmp_path / "run")
    expected = outcome(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**record, "status": "interrupted"}))
    shutil.rmtree(start)
    train(continued(Recipe(**values), tmp_path / "run"), tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


def test_pissa_continues_with_the_base_that_it_rewrote(dataset, finished, tmp_path):
    """Its own format holds what it took out of the base."""
    from modicum.adapters import PiSSA
    from modicum.models.huggingface import load

    model = load(finished / "model")
    attached = PiSSA(rank=2).attach(model)
    for parameter in attached.parameters():
        parameter.data.mul_(1.1)
    attached.save(tmp_path / "adapter", form="modicum")
    values = recipe_of(finished, dataset, {"method": "pissa"}, tmp_path / "adapter")
    content = run(values, tmp_path / "run")
    assert content["final"]["initial_validation_loss"] != pytest.approx(
        rows(finished, "evaluations.jsonl")[-1]["loss"], abs=1e-4
    )
    kept = load_file(tmp_path / "run" / "start" / "adapter.safetensors")
    assert kept.keys() == load_file(tmp_path / "adapter" / "adapter.safetensors").keys()


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"method": "pissa"}, r"adapter\.method.*another method.*allowed: lora"),
        ({"method": "lora", "rank": 8}, r"adapter\.rank.*has another.*allowed: 4"),
        ({"method": "lora", "targets": ["q_proj"]}, r"adapter\.targets.*on other layers"),
    ],
)
def test_what_does_not_go_with_it_is_refused(dataset, finished, earlier, adapter, message):
    start = earlier("lora") / "adapter"
    with pytest.raises(InputError, match=message):
        modicum.plan(Recipe(**recipe_of(finished, dataset, adapter, start)))


def test_no_folder_no_adapter_and_other_base_weights_are_refused(
    dataset, finished, earlier, tmp_path
):
    def planned(start: Path) -> None:
        modicum.plan(Recipe(**recipe_of(finished, dataset, {"method": "lora"}, start)))

    with pytest.raises(InputError, match=r"model\.adapter.*no such folder"):
        planned(tmp_path / "nowhere")
    with pytest.raises(InputError, match="not an adapter"):
        planned(finished / "tokenizer")
    other = tmp_path / "other"
    shutil.copytree(earlier("lora") / "adapter", other)
    digests = json.loads((other / "base_weights.json").read_text())
    changed = dict.fromkeys(digests, "sha256:0")
    (other / "base_weights.json").write_text(json.dumps(changed))
    with pytest.raises(InputError, match="trained on other base weights"):
        planned(other)


def test_it_needs_a_model_and_an_adapter() -> None:
    with pytest.raises(InputError, match=r"model\.adapter.*model\.path"):
        Recipe(model={"adapter": "x"}, adapter={"method": "lora"})
    with pytest.raises(InputError, match="the section adapter"):
        Recipe(model={"path": "y", "adapter": "x"})


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_start_from_it_too(pool: Pool, dataset, finished, earlier, tmp_path, strategy):
    values = recipe_of(
        finished, dataset, {"method": "lora", "dropout": 0.0}, earlier("lora") / "adapter"
    )
    run(values, tmp_path / "alone")
    values["parallel"] = {"strategy": strategy}
    assert pool.run(trains, values, tmp_path / "run") == ["done"] * 2
    expected = column(tmp_path / "alone", "loss")
    assert column(tmp_path / "run", "loss") == pytest.approx(expected, rel=1e-4)


@pytest.mark.expensive
def test_it_begins_where_peft_ended(dataset, finished, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(finished / "model")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules="all-linear",
        init_lora_weights=False,  # so B is not zero
    )
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    for file in (finished / "model").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "merged")

    values = recipe_of(finished, dataset, {"method": "lora"}, tmp_path / "adapter")
    run(values, tmp_path / "run")
    merged = values | {"model": {"path": str(tmp_path / "merged")}}
    run(merged, tmp_path / "other")
    began, other = (rows(tmp_path / each, "evaluations.jsonl")[0] for each in ("run", "other"))
    assert began["step"] == other["step"] == 0
    assert began["loss"] == pytest.approx(other["loss"], abs=1e-5)
    scales = []
    for folder in ("adapter", "run/adapter"):
        again = transformers.AutoModelForCausalLM.from_pretrained(finished / "model")
        back = peft.PeftModel.from_pretrained(again, tmp_path / folder)
        scales.append({n: m.scaling for n, m in back.named_modules() if hasattr(m, "scaling")})
    assert scales[0] == scales[1]
    assert {"default": 3.0} in scales[0].values()

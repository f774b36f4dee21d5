"""A recipe is made of what is found; models have headers alone, and nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modicum.core.errors import DoesNotFit, InputError
from modicum.models.config import ModelConfig
from modicum.planner import plan, question
from modicum.planner.starting import OpenQuestion, Start, method, start
from modicum.planner.starting.recipe_text import recipe_text
from modicum.recipe_yaml import load

SMALL = ModelConfig(vocabulary_size=300, width=64, layers=2, heads=2, context=512)
SEVEN = ModelConfig(
    vocabulary_size=32000, width=4096, layers=32, heads=32, mlp_width=11008, context=4096
)
Hollow = Callable[[ModelConfig], Path]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Forty rows of question and answer."""
    file = tmp_path / "rows.jsonl"
    row = {"question": "to be", "answer": "or not to be " * 5}
    file.write_text((json.dumps(row) + "\n") * 40)
    return file


def reasons(made: Start) -> dict[str, str]:
    return {name: setting.why for name, setting in made.draft.settings.items()}


def test_a_recipe_says_why_and_reads_back_as_it_was_planned(
    hollow: Hollow, rows: Path, tmp_path: Path
) -> None:
    made = start(str(hollow(SMALL)), str(rows))
    assert all(reasons(made).values())
    file = tmp_path / "made.yaml"
    file.write_text(recipe_text(made.draft.settings.values()))
    assert load(file) == made.recipe
    assert max(map(len, file.read_text().replace(str(tmp_path), "").splitlines())) <= 100
    data, training = made.recipe.data, made.recipe.training
    assert (data.column, data.prompt_column) == ("answer", "question")
    assert made.data["exact"]
    assert made.data["documents"] == 40
    assert data.sequence_length >= made.data["longest"]
    assert (training.precision, training.epochs) == ("fp32", 3)
    assert made.recipe.adapter is None
    assert made.plan is not None
    assert made.plan.recipe.data == data


def test_a_length_and_a_warm_up_in_tokens_are_not_given_twice(hollow: Hollow, rows: Path) -> None:
    asked = {"training.tokens": "20k", "training.warmup_fraction": 0.1}
    made = start(str(hollow(SMALL)), str(rows), method="lora", asked=asked, memory="2GB")
    training, row = made.recipe.training, made.recipe.data.sequence_length
    assert (training.tokens, training.steps, training.epochs) == (20_000, None, None)
    assert (training.warmup_steps, training.warmup_fraction) == (0, 0.1)
    assert made.plan is not None
    assert made.plan.steps == -(-20_000 // (training.batch_size * row))


def test_an_adapter_that_is_asked_for_by_its_field_is_the_method(
    hollow: Hollow, rows: Path
) -> None:
    model = str(hollow(SMALL))
    full = start(model, str(rows), memory="2GB").recipe
    named = start(model, str(rows), memory="2GB", method="lora").recipe
    asked = start(model, str(rows), memory="2GB", asked={"adapter.method": "lora"}).recipe
    assert asked == named
    assert asked.training.learning_rate != full.training.learning_rate


def test_a_stream_has_a_number_of_updates_and_no_epochs(hollow: Hollow, rows: Path) -> None:
    made = start(str(hollow(SMALL)), str(rows), asked={"data.streaming": True})
    assert made.recipe.data.streaming
    assert made.recipe.training.epochs is None
    assert made.plan is not None
    assert made.plan.steps == made.recipe.training.steps


def test_a_stream_of_the_hub_is_not_looked_at(hollow: Hollow) -> None:
    with pytest.raises(InputError, match="a data set of the hub that is streamed") as caught:
        start(str(hollow(SMALL)), "hub:owner/name", asked={"data.streaming": True})
    assert caught.value.field == "data.streaming"


def test_what_is_asked_for_wins(hollow: Hollow, rows: Path) -> None:
    asked = {"training.steps": 7, "data.column": "question", "training.seed": 3}
    made = start(str(hollow(SMALL)), str(rows), method="lora", asked=asked, memory="2GB")
    recipe = made.recipe
    assert (recipe.training.steps, recipe.training.epochs) == (7, None)
    assert (recipe.data.column, recipe.data.prompt_column) == ("question", None)
    assert recipe.training.seed == 3
    assert recipe.adapter == {"method": "lora", "rank": 8}
    assert recipe.budget.memory == 2 * 10**9
    assert (recipe.training.learning_rate, recipe.training.precision) == (1e-3, "bf16")


def test_a_section_may_be_asked_for_with_all_that_it_has(hollow: Hollow, rows: Path) -> None:
    model = str(hollow(SMALL))
    one, two = (
        start(model, str(rows), asked=asked).recipe
        for asked in ({"adapter": {"method": "lora", "rank": 4}},
                      {"adapter.method": "lora", "adapter.rank": 4})
    )  # fmt: skip
    assert one == two
    assert one.training.learning_rate == 1e-3


@pytest.mark.parametrize("asked", [{}, {"training.precision": "auto"}])
def test_a_base_in_fp16_stays_so(
    hollow: Callable[..., Path],
    rows: Path,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = hollow(SEVEN, "F16")
    monkeypatch.setattr("modicum.core.machine.memory_bytes", lambda: (10**12, 10**12))
    made = start(str(model), str(rows), asked={"budget.tensors": "20GB", **asked})
    assert made.recipe.training.precision == "auto"
    assert made.recipe.linear is None  # 4 bits are not needed
    assert made.plan is not None
    assert made.plan.recipe.linear == {"method": "fp16"}


def test_the_choice_counts_as_a_plan_of_it_does(
    hollow: Hollow, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the record of runs that have a budget, and of a tokenizer that is there."""
    order: list[object] = []
    monkeypatch.setattr(question, "map_for", lambda *, budget: order.append(budget))
    real = method.machine_record
    monkeypatch.setattr(method, "machine_record", lambda d: order.append("record") or real(d))
    start(str(hollow(SMALL)), str(rows), memory="2GB")
    assert order[:2] == [True, "record"]


@pytest.mark.parametrize(
    ("memory", "adapter", "linear"),
    [(400, None, None), (50, "lora", None), (12, "lora", "nf4")],
)
def test_the_budget_decides_what_is_trained(
    hollow: Hollow,
    rows: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory: int,
    adapter: str | None,
    linear: str | None,
) -> None:
    monkeypatch.setattr("modicum.core.machine.memory_bytes", lambda: (10**12, 10**12))
    asked = {"budget.tensors": f"{memory}GB"}
    made = start(str(hollow(SEVEN)), str(rows), asked=asked)
    assert (made.recipe.adapter or {}).get("method") == adapter
    assert (made.recipe.linear or {}).get("method") == linear
    if adapter is not None:
        assert "full training needs" in reasons(made)["adapter.method"]
        assert made.recipe.training.learning_rate == 2e-4


def test_a_recipe_for_a_larger_machine_is_made_by_the_budget_that_is_stated(
    hollow: Hollow, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modicum.core.machine.memory_bytes", lambda: (281_000_000, 31_000_000))
    monkeypatch.setattr("modicum.planner.refusal.remedies", lambda asked: iter(()))
    made = start(str(hollow(SMALL)), str(rows), asked={"budget.tensors": "1GB"})
    assert made.recipe.adapter is None
    assert made.plan is None
    assert "does not fit this machine's usable memory (281 MB)" in str(made.refused)


@pytest.mark.expensive
def test_what_does_not_fit_is_made_and_says_what_would(hollow: Hollow, rows: Path) -> None:
    made = start(str(hollow(SMALL)), str(rows), asked={"budget.tensors": "100kB"})
    assert made.plan is None
    assert made.refused is not None
    assert made.recipe.linear == {"method": "nf4"}
    with pytest.raises(DoesNotFit):
        plan(made.recipe)


def test_a_config_alone_is_planned(tmp_path: Path, rows: Path) -> None:
    folder = tmp_path / "config"
    folder.mkdir()
    raw = SMALL.to_hf() | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(raw))
    made = start(str(folder), str(rows))
    assert (made.model["weights"], made.model["dtype"]) == (False, "BF16")
    assert "no weights" in reasons(made)["model.path"]
    assert made.plan is not None
    assert made.plan.row()["weights"] is False


def test_three_rows_are_all_trained(hollow: Hollow, tmp_path: Path) -> None:
    file = tmp_path / "three.jsonl"
    file.write_text('{"text": "to be or not to be"}\n' * 3)
    made = start(str(hollow(SMALL)), str(file))
    assert made.recipe.data.validation_fraction == 0
    assert made.recipe.training.batch_size == 1
    assert "evaluation.every" not in made.draft.settings


def test_model_and_sources_can_be_asked_for_too(hollow: Hollow, rows: Path) -> None:
    model = str(hollow(SMALL))
    source = {"path": str(rows), "column": "answer"}
    made = start(asked={"model.path": model, "data.sources": [source, source]})
    assert made.recipe.model.path == model
    assert len(made.recipe.data.sources) == 2
    assert made.recipe.data.path is None
    assert made.data["documents"] == 80
    assert "model.layers" not in made.draft.settings


@pytest.mark.expensive
def test_many_rows_are_counted_by_the_first(
    hollow: Hollow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("modicum.planner.starting.lengths", "modicum.data.survey"):
        monkeypatch.setattr(f"{module}.SURVEYED_BYTES", 50_000)
    file = tmp_path / "many.jsonl"
    file.write_text(('{"text": "%s"}\n' % ("to be " * 20)) * 100_000)
    made = start(str(hollow(SMALL)), str(file))
    assert (made.data["documents"], made.data["exact"]) == (100_000, False)
    assert made.recipe.training.epochs == 1
    assert made.recipe.data.validation_fraction == 0.005


def test_a_text_is_trained_for_steps(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("to be or not to be, that is the question\n\n" * 9000)
    made = start(None, str(file))
    assert made.recipe.training.epochs is None
    assert made.data["continuous"]
    assert made.plan is not None
    assert made.plan.epochs == pytest.approx(4, rel=0.2)


def test_validation_data_next_to_it_is_used(hollow: Hollow, rows: Path) -> None:
    other = rows.with_name("rows-val.jsonl")
    other.write_text(rows.read_text())
    made = start(str(hollow(SMALL)), str(rows))
    assert made.recipe.data.validation_path == str(other)
    assert "data.validation_fraction" not in made.draft.settings


def test_open_questions_are_asked_and_answers_checked(hollow: Hollow, tmp_path: Path) -> None:
    file = tmp_path / "odd.csv"
    lines = ["nr,eins,zwei", *(f'{n},"{"ein Satz " * 4}","{"noch einer " * 4}"' for n in range(30))]
    file.write_text("\n".join(lines))
    model, asked = str(hollow(SMALL)), []

    def answer(question: OpenQuestion) -> Any:
        asked.append(question.field)
        return "eins" if question.field == "data.column" else question.default

    made = start(model, str(file), ask=answer)
    assert asked == ["budget.memory", "data.column"]
    assert made.recipe.data.column == "eins"
    assert reasons(made)["data.column"] == "as answered"
    guessed = start(model, str(file))
    assert guessed.recipe.data.column == "zwei"
    assert "a guess" in reasons(guessed)["data.column"]
    with pytest.raises(InputError, match="none of the answers"):
        start(model, str(file), memory="2GB", ask=lambda question: "drei")


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    """Thirty conversations."""
    file = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "to be"}, {"role": "assistant", "content": "or not"}]
    file.write_text((json.dumps({"messages": turns}) + "\n") * 30)
    return file


def test_conversations_have_a_template_that_goes_with_the_tokenizer(
    hollow: Hollow, talk: Path, tmp_path: Path
) -> None:
    model = str(hollow(SMALL))
    made = start(model, str(talk))
    # The tokenizer lacks the tokens of chatml and of llama-3.
    assert made.recipe.data.chat_template == "zephyr"
    assert "no template of its own" in reasons(made)["data.chat_template"]
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    wanted = {"data.chat_template": str(template)}
    made = start(model, str(talk), ask=lambda question: wanted.get(question.field))
    assert made.recipe.data.chat_template == str(template)
    assert made.recipe.data.format == "messages"
    with pytest.raises(InputError, match="chatml") as caught:
        start(model, str(talk), asked={"data.chat_template": "chatml"})
    assert caught.value.field == "data.chat_template"
    (Path(model) / "chat_template.jinja").write_text(template.read_text())
    made = start(model, str(talk))
    assert made.recipe.data.chat_template is None
    assert "the model's own" in reasons(made)["data.format"]


def test_a_new_model_on_conversations_says_its_template(talk: Path) -> None:
    assert start(None, str(talk)).recipe.data.chat_template == "chatml"


def test_conversations_of_a_new_model_are_counted_with_the_templates_tokens(talk: Path) -> None:
    made = start(None, str(talk))
    # Four marks, four ends of lines, roles and words; spelled in letters the marks alone are 20.
    assert made.data["longest"] < 20
    assert made.plan is not None
    steps = made.plan.row()["steps"]
    assert f"of about {steps:,} updates" in reasons(made)["training.warmup_steps"]


@pytest.mark.parametrize(
    ("method", "model", "said"),
    [("lorra", "m", "Did you mean 'lora'"), ("lora", None, "there is none")],
)
def test_a_method_that_cannot_be_is_refused(method: str, model: str | None, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        start(model, None, method=method)
    assert caught.value.field == "--method"


def test_a_task_that_is_not_of_texts_is_refused_before_its_data_are_read(rows: Path) -> None:
    with pytest.raises(InputError, match=r"task\.method: recipes of this task") as caught:
        start(None, str(rows), asked={"task.method": "images"})
    assert "modicum methods --room tasks" in str(caught.value)


def test_a_task_that_is_no_name_is_refused(rows: Path) -> None:
    with pytest.raises(InputError, match=r"task\.method"):
        start(None, str(rows), asked={"task.method": 3})

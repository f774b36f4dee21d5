from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
import torch

from modicum.core.errors import DoesNotFit, InputError
from modicum.core.machine.record import MachineRecord, OtherRuns
from modicum.core.units import format_bytes
from modicum.models.config import ModelConfig
from modicum.planner import plan
from modicum.planner.choose import HEADROOM, choices
from modicum.planner.planning import answered_anyway, asked_of
from modicum.planner.predict import predict
from modicum.planner.prediction import Choice
from modicum.recipe import Recipe

BILLION = ModelConfig(
    vocabulary_size=32000, width=2048, layers=22, heads=32, kv_heads=4, mlp_width=5632, context=2048
)


def settings(change: str) -> dict[str, str]:
    """The fields and values of a suggested change."""
    words = change.split(" (needs")[0]
    pairs = re.findall(r"--set (\S+)=(\S+)", words)
    assert " ".join(f"--set {field}={value}" for field, value in pairs) == words
    return dict(pairs)


def applied(recipe: Recipe, change: str) -> Recipe:
    """The recipe after a suggested change, its values read as the command line reads them."""
    import yaml

    values = {f.replace(".", "__"): yaml.safe_load(v) for f, v in settings(change).items()}
    return recipe.changed(**values)


def chosen(made, field: str):
    return {row["field"]: row["value"] for row in made.choices}.get(field)


def test_without_a_budget_the_whole_batch_goes_at_once(new):
    made = plan(new(training={"batch_size": 16}))
    assert chosen(made, "training.micro_batch_size") == 16
    assert chosen(made, "training.recompute") == "none"
    assert made.prediction.choice.micro_batches == 1
    assert all(row["why"] for row in made.choices)


def test_a_micro_batch_is_not_larger_than_is_useful(new):
    made = plan(new(training={"batch_size": 128}))
    assert chosen(made, "training.micro_batch_size") == 32  # of 128 tokens each: 4096
    assert "as fast as more" in made.choices[0]["why"]


def test_a_budget_makes_micro_batches_smaller_and_then_recomputes(new, needs):
    recipe = new(training={"batch_size": 16})
    whole = needs(plan(recipe))
    half = plan(recipe.changed(budget__memory=whole - 20_000_000))
    size = chosen(half, "training.micro_batch_size")
    assert size < 16
    assert chosen(half, "training.recompute") == "none"
    assert needs(half) <= whole - 20_000_000
    assert "largest that keeps budget.memory" in half.choices[0]["why"]
    least = half.prediction.choice
    fixed = recipe.changed(training__micro_batch_size=16, training__recompute="auto")
    tight = plan(fixed.changed(budget__memory=whole - 8_000_000))
    assert tight.prediction.choice.recompute
    assert "do not fit" in tight.choices[0]["why"]
    assert least.micro_batches * least.micro_batch_size >= 16


def test_the_larger_micro_batch_would_not_have_kept_the_budget(new, needs):
    recipe = new(training={"batch_size": 16, "recompute": "none"})
    budget = needs(plan(recipe)) - 10_000_000
    made = plan(recipe.changed(budget__memory=budget))
    assert made.prediction.choice.micro_batch_size < 16
    size = made.prediction.choice.micro_batch_size
    larger = min(-(-16 // count) for count in range(1, 17) if -(-16 // count) > size)
    choice = Choice(larger, -(-16 // larger), recompute=False)
    prediction = predict(recipe, made.inputs.config, choice)
    assert needs(made) <= budget < needs(replace(made, prediction=prediction))


def test_blocks_that_a_run_has_compiled_are_counted_when_it_resumes(new, monkeypatch):
    record = MachineRecord(30_000_000, (0.02, 0.1), 0.5, compiled_bytes=50_000_000)
    monkeypatch.setattr("modicum.planner.planning.machine_record", lambda device: record)
    for asked, found in (("auto", "blocks"), ("blocks", "none")):
        recipe = new(training={"compile": asked})
        kept = [{"field": "training.compile", "value": found, "why": "it was tried"}]
        more = plan(recipe, keep=kept).process_base - plan(recipe).process_base
        assert more == (50_000_000 if found == "blocks" else -50_000_000)


@pytest.mark.parametrize("size", [8, 4, 2])
def test_a_budget_that_holds_a_micro_batch_gets_it(size, new, needs):
    recipe = new(
        training={"batch_size": 16, "recompute": "none"}, checkpoint={"asynchronous": False}
    )
    holds = needs(plan(recipe.changed(training__micro_batch_size=size)))
    made = plan(recipe.changed(budget__memory=holds + 1))
    assert chosen(made, "training.micro_batch_size") == size


def test_bytes_of_the_process_are_what_it_holds_before_tensors_and_those_with_their_share(new):
    made = plan(new())
    tensors = made.prediction.peak_bytes
    copied = made.prediction.host_bytes  # what is staged for checkpoints, once
    assert copied == pytest.approx(12 * made.prediction.trainable, rel=1e-3)
    assert chosen(made, "checkpoint.asynchronous") is True
    assert (made.record.loaded_bytes, made.record.kept) == (30_000_000, (0.02, 0.1))
    assert made.process_base == 280_000_000  # 250 MB now, and what a run loads
    # The allocator keeps something next to tensors that come and go, and nothing next to others.
    lasting = made.prediction.lasting_bytes
    assert lasting == pytest.approx(12 * made.prediction.trainable, rel=0.05)
    least, expected, most = (
        made.process_base + tensors + round((tensors - lasting) * k) for k in (0.02, 0.06, 0.1)
    )
    most += copied  # its checkpoint may be under way at the peak
    assert made.process_range == (least, most)
    saving = plan(new(checkpoint={"every": 10}))
    assert saving.process_bytes == expected + copied
    assert plan(new(checkpoint={"every": 1000})).process_bytes == expected
    row = made.row()["prediction"]
    assert row["peak_bytes"] == tensors == max(row["by_phase"].values())
    assert row["process_bytes"] == made.process_bytes
    assert (row["process_base"], row["process_range"]) == (280_000_000, [least, most])
    weights = sum(r["bytes"] for r in row["table"] if r["kind"] == "weight")
    assert weights == 4 * made.prediction.total
    optimizer = sum(r["bytes"] for r in row["table"] if r["kind"] == "optimizer")
    assert optimizer == pytest.approx(8 * made.prediction.trainable, rel=1e-3)


def test_blocks_that_run_again_leave_more_between_the_places_of_what_they_work_in(new, monkeypatch):
    measured = MachineRecord(30_000_000, (0.02, 0.1), 0.5, kept_again=(0.4, 0.6))
    monkeypatch.setattr("modicum.planner.planning.machine_record", lambda device: measured)
    for recompute, (least, most) in (("none", (0.02, 0.1)), ("blocks", (0.4, 0.6))):
        recipe = new(training={"recompute": recompute}, checkpoint={"asynchronous": False})
        made = plan(recipe)
        prediction, base = made.prediction, made.process_base
        assert made.process_range == (
            prediction.process_bytes(base, least, staged=False),
            prediction.process_bytes(base, most),
        )
        middle = (least + most) / 2
        assert made.process_bytes == prediction.process_bytes(base, middle, staged=False)


def test_what_a_run_loads_and_keeps_is_that_of_runs_that_read_the_same(new, monkeypatch):
    measured = MachineRecord(
        30_000_000, (0.02, 0.1), 0.5, with_tokenizer_bytes=20_000_000,
        without_gradients_bytes=5_000_000, images=OtherRuns(10_000_000, (0.5, 0.6), 0.25),
        sequences=OtherRuns(11_000_000, (0.0, 0.0), 0.1),
    )  # fmt: skip
    monkeypatch.setattr("modicum.planner.planning.machine_record", lambda device: measured)
    text = plan(new())
    assert text.process_base == 280_000_000
    forward = new(optimizer={"method": "distzo2"}, training={"clip_norm": None})
    assert plan(forward).process_base == 255_000_000
    images = plan(Recipe(task={"method": "images", "images": 64, "held_out": 16}))
    assert images.process_base == 260_000_000
    assert images.record.kept == (0.5, 0.6)
    sequences = plan(Recipe(task={"method": "sequences", "sequences": 64, "held_out": 16}))
    assert (sequences.process_base, sequences.record.efficiency) == (261_000_000, 0.1)
    prediction = images.prediction
    grown = prediction.process_bytes(0, 0.0, staged=False) + round(0.5 * prediction.small_bytes)
    assert images.process_range[0] - images.process_base == pytest.approx(grown, abs=2)


def test_a_budget_is_kept_with_a_tenth_of_what_the_run_adds_to_spare(new, needs):
    recipe = new(training={"batch_size": 4, "micro_batch_size": 4, "recompute": "none"})
    recipe = recipe.changed(checkpoint__asynchronous=False)
    made = plan(recipe)
    added = made.prediction.process_bytes(0, 0.06)
    needed = made.process_base + round((1 + HEADROOM) * added)
    assert abs(needed - needs(made)) <= 1
    assert plan(recipe.changed(budget__memory=needed + 1)).prediction == made.prediction
    with pytest.raises(DoesNotFit):
        plan(recipe.changed(budget__memory=needed - 2))


def test_a_small_run_has_some_bytes_to_spare(new, needs, monkeypatch):
    recipe = new(training={"batch_size": 4, "micro_batch_size": 4, "recompute": "none"})
    before = needs(plan(recipe))
    monkeypatch.setattr("modicum.planner.choose.LEAST_HEADROOM", 48_000_000)
    added = plan(recipe).prediction.process_bytes(0, 0.06)
    assert needs(plan(recipe)) - before == 48_000_000 - round(HEADROOM * added)


def test_a_budget_of_tensors_is_beyond_what_python_and_torch_hold(new, needs):
    recipe = new(training={"batch_size": 4, "micro_batch_size": 4, "recompute": "none"})
    recipe = recipe.changed(checkpoint__asynchronous=False)
    made = plan(recipe)
    own = needs(made) - made.process_base
    kept = plan(recipe.changed(budget__tensors=own))
    assert (kept.budget, kept.prediction) == (made.process_base + own, made.prediction)
    assert kept.row()["prediction"]["budget_bytes"] == made.process_base + own
    with pytest.raises(DoesNotFit, match=r"^does not fit budget\.tensors \("):
        plan(recipe.changed(budget__tensors=own - 1))


@pytest.mark.parametrize("field", ["memory", "tensors"])
def test_a_budget_whose_unit_was_forgotten_says_so(new, field):
    said = rf"^does not fit budget\.{field} \(8 B\); a number without a unit is bytes: "
    with pytest.raises(DoesNotFit, match=said):
        plan(new().changed(**{f"budget__{field}": 8}))


def test_of_two_budgets_the_smaller_counts(new, needs):
    recipe = new(training={"batch_size": 16})
    needed, base = needs(plan(recipe)), plan(recipe).process_base
    both = recipe.changed(budget__memory=needed, budget__tensors="10GB")
    assert plan(both).budget == needed
    less = needed - 20_000_000
    both = recipe.changed(budget__memory=needed, budget__tensors=less - base)
    made = plan(both)
    assert made.budget == less
    assert needs(made) <= less
    assert "largest that keeps budget.tensors" in made.choices[0]["why"]


def test_without_a_budget_there_is_no_limit_to_show(new):
    assert plan(new()).budget is None


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"vocabulary_size": 8192, "tied_embeddings": False}},
        {"training": {"micro_batch_size": 8, "recompute": "none"}},
        {"data": {"sequence_length": 1024}},
    ],
    ids=["plain", "large vocabulary", "fixed", "long"],
)
def test_a_refusal_names_three_changes_and_each_makes_it_fit(new, needs, sections):
    training = {"batch_size": 8, **sections.pop("training", {})}
    recipe = new(**sections, training=training)
    least = recipe.changed(training__micro_batch_size=1, training__recompute="blocks")
    needed = plan(least)
    budget = needed.process_base + int(0.6 * needed.prediction.peak_bytes)
    recipe = recipe.changed(budget__memory=budget)
    with pytest.raises(DoesNotFit) as caught:
        plan(recipe)
    changes = caught.value.changes
    assert len(changes) == 3
    assert len({tuple(sorted(settings(change))) for change in changes}) == 3
    for change in changes:
        made = plan(applied(recipe, change))
        assert needs(made) <= made.recipe.budget.memory


def test_a_refusal_offers_the_cheap_before_the_dear(new, needs):
    recipe = new(training={"batch_size": 8, "micro_batch_size": 8, "recompute": "none"})
    least = plan(recipe.changed(training__micro_batch_size=2))
    budget = needs(least) + 1_000_000
    with pytest.raises(DoesNotFit) as caught:
        plan(recipe.changed(budget__memory=budget))
    first, *others = [set(settings(change)) for change in caught.value.changes]
    assert first == {"training.micro_batch_size"}
    assert not any({"model.layers", "budget.memory"} & fields for fields in others[:1])


def test_half_precision_is_not_suggested_where_it_saves_nothing(new):
    # One row at a time of few tokens: weights and moments are all there is, and they stay fp32.
    model = {"width": 256, "vocabulary_size": 512}
    recipe = new(model=model, data={"sequence_length": 16}, training={"batch_size": 1})
    made = plan(recipe)
    budget = made.process_base + int(0.9 * made.prediction.peak_bytes)
    with pytest.raises(DoesNotFit) as caught:
        plan(recipe.changed(budget__memory=budget))
    assert not any("training.precision" in change for change in caught.value.changes)


def test_a_processor_that_is_slow_in_bf16_is_named(new):
    made = plan(new(training={"precision": "bf16"}))
    slow = replace(made, record=replace(made.record, efficiency=0.6, half_efficiency=0.06))
    assert slow.seconds_in_fp32 == pytest.approx(slow.seconds / 10)
    assert slow.row()["prediction"]["seconds_in_fp32"] == slow.seconds_in_fp32
    as_fast = replace(made, record=replace(made.record, efficiency=0.6, half_efficiency=0.6))
    assert as_fast.seconds_in_fp32 is None
    assert replace(slow, prediction=plan(new()).prediction).seconds_in_fp32 is None


@pytest.mark.expensive
def test_a_billion_parameters_are_planned_at_once_and_never_allocated(hollow, text, traced_here):
    folder = hollow(BILLION)
    recipe = Recipe(
        model={"path": str(folder)},
        data={"path": str(text), "sequence_length": 512},
        adapter={"method": "lora", "rank": 8},
        training={"precision": "bf16", "batch_size": 16},
    )
    start = time.perf_counter()
    made = plan(recipe.changed(budget__memory="8GB"))
    seconds = time.perf_counter() - start
    assert made.prediction.total - made.prediction.trainable == BILLION.parameter_count()
    assert made.prediction.trainable == 22 * 8 * (
        2 * (2048 + 2048) + 2 * (2048 + 256) + 3 * (2048 + 5632)
    )
    assert made.process_bytes <= 8 * 10**9
    assert seconds < 20  # two on an idle machine; what it guards against takes minutes
    with pytest.raises(DoesNotFit) as caught:
        plan(recipe.changed(budget__memory="4GB", training__precision="fp32"))
    assert settings(caught.value.changes[0]) == {"training.precision": "bf16"}
    assert not traced_here  # nor was an adapter tried that only a trace knows


@pytest.mark.expensive
def test_full_training_of_what_fits_only_with_an_adapter_is_told_so(hollow, text):
    recipe = Recipe(
        model={"path": str(hollow(BILLION))},
        data={"path": str(text), "sequence_length": 128},
        training={"precision": "bf16", "batch_size": 4},
        budget={"memory": "6GB"},
    )
    with pytest.raises(DoesNotFit) as caught:
        plan(recipe)
    assert settings(caught.value.changes[0]) == {"adapter.method": "lora"}
    assert plan(applied(recipe, caught.value.changes[0])).prediction.trainable < 10**7


def test_choices_are_replayed_and_not_made_anew(new):
    recipe = new(training={"batch_size": 16})
    replay = [
        {"field": "training.micro_batch_size", "value": 4, "why": "then"},
        {"field": "training.recompute", "value": "blocks", "why": "then"},
        {"field": "training.device", "value": "cpu", "why": "then"},
    ]
    made = plan(recipe, replay=replay)
    choice = made.prediction.choice
    assert (choice.micro_batch_size, choice.micro_batches, choice.recompute) == (4, 4, True)
    assert list(made.choices) == replay
    assert plan(recipe, replay=list(made.choices)).prediction == made.prediction


def test_a_revision_keeps_choices_and_takes_the_measured_speed(new):
    made = plan(new())
    revised = made.revised("measured", 1234.5)
    assert revised.revision == 2
    assert revised.row()["prediction"]["tokens_per_second"] == 1234.5
    assert revised.choices == made.choices
    steps = made.recipe.training.steps
    expected = steps * made.tokens_per_update / 1234.5
    assert revised.row()["prediction"]["seconds"] == pytest.approx(expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_cuda_is_refused_where_there_is_none(new):
    with pytest.raises(InputError, match="no CUDA device") as caught:
        plan(new(training={"device": "cuda"}))
    assert caught.value.field == "training.device"


def test_a_transform_that_finds_no_dense_layer_is_refused(hollow, text):
    """Where a compressor puts factors in every layer's place there is none."""
    folder = hollow(ModelConfig(vocabulary_size=300, width=32, layers=2, heads=2, mlp_width=64))
    data = {"path": str(text), "sequence_length": 16}
    values = {"model": {"path": str(folder)}, "data": data, "transform": {"method": "eva"}}
    some = {"method": "fwsvd", "targets": ["q_proj"]}
    assert plan(Recipe(**values, compress=some)).prediction.peak_bytes
    with pytest.raises(InputError, match="no linear or convolution layer has a dense weight"):
        plan(Recipe(**values, compress={"method": "fwsvd"}))


def test_a_refusal_counts_as_its_budget_does_and_offers_a_larger_one_of_its_kind(new, needs):
    recipe = new(model={"layers": 1}, data={"sequence_length": 32}, training={"batch_size": 1})
    recipe = recipe.changed(training__precision="bf16", training__recompute="blocks")
    recipe = recipe.changed(checkpoint__asynchronous=False)
    made = plan(recipe)
    own = needs(made) - made.process_base
    with pytest.raises(DoesNotFit) as caught:
        plan(recipe.changed(budget__tensors=own // 64))
    told = str(caught.value)
    assert "does not fit budget.tensors (" in told
    assert f"needs {format_bytes(own)} for the process, beyond 280 MB of Python and torch" in told
    *_, last = caught.value.changes
    larger = settings(last)
    assert set(larger) == {"budget.tensors"}
    assert last.endswith(f"(needs {format_bytes(own)})")
    assert plan(applied(recipe, last)).prediction == made.prediction
    with pytest.raises(DoesNotFit) as caught:  # both are too small, so both are to be larger
        plan(recipe.changed(budget__tensors=own // 64, budget__memory=made.process_base))
    *_, last = caught.value.changes
    assert set(settings(last)) == {"budget.tensors", "budget.memory"}
    assert plan(applied(recipe, last)).prediction == made.prediction
    with pytest.raises(DoesNotFit) as caught:  # of one that is large enough nothing is said
        plan(recipe.changed(budget__tensors=own // 64, budget__memory="1GB"))
    assert set(settings(caught.value.changes[-1])) == {"budget.tensors"}


IN_BACKWARD = {"method": "galore", "in_backward": True, "rank": 4}


def test_what_the_rules_forbid_is_not_chosen(new):
    """In the backward pass gradients are used up, so the planner does not choose accumulation."""
    training = {"batch_size": 256, "clip_norm": None, "recompute": "none"}
    made = new(training=training, optimizer=IN_BACKWARD)
    offered = list(choices(made, "cpu", 1))
    assert {choice.micro_batches for choice in offered} == {1}
    plain = made.changed(optimizer__in_backward=False)
    assert min(choice.micro_batches for choice in choices(plain, "cpu", 1)) > 1
    half = made.changed(training__micro_batch_size=128)
    with pytest.raises(InputError, match="left to accumulate; set training"):
        plan(half)
    assert {choice.micro_batches for choice in choices(half, "cpu", 2)} == {1}


def test_a_policy_on_activations_leaves_no_choice_to_recompute():
    made = Recipe(task={"method": "images"}, memory={"method": "comet"})
    assert {choice.recompute for choice in choices(made, "cpu", 1)} == {False}
    free = Recipe(task={"method": "images"})
    assert {choice.recompute for choice in choices(free, "cpu", 1)} == {False, True}


def test_a_plan_lists_what_the_optimizer_does_with_each_class(new):
    made = plan(new(optimizer={"method": "muon"}))
    rows = made.row()["optimizer"]
    assert {row["rule"] for row in rows if row["class"] == "matrix"} == {"Muon"}
    assert {row["rule"] for row in rows if row["class"] != "matrix"} == {"Adam at 0.2 of the rate"}
    state = made.prediction.ledger.bytes("optimizer")
    assert sum(row["bytes"] for row in rows) == state
    assert "optimizer" not in plan(new()).row()


def test_two_recipes_that_are_looked_at_together_are_each_planned_as_alone(new, monkeypatch):
    """One has a budget, and maps its tensors otherwise."""
    mapped: list[bool] = []
    monkeypatch.setattr("modicum.planner.question.map_for", lambda *, budget: mapped.append(budget))
    questions = [asked_of(new(budget={"memory": "4GB"})), asked_of(new())]
    for asked in questions:
        answered_anyway(asked)
    assert mapped == [True, False, True, False]

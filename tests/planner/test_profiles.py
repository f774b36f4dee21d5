"""Machines to plan for that we are not on."""

from __future__ import annotations

from itertools import islice

import pytest

from modicum.core.errors import DoesNotFit, InputError
from modicum.planner import made_to_fit, plan
from modicum.planner.planning import asked_of
from modicum.planner.profiles import profile, profile_of, shipped_profiles
from modicum.planner.question import changed
from modicum.planner.remedies import remedies
from modicum.recipe import Recipe

MINE = {
    "name": "mine",
    "device": "cpu",
    "memory": "4GB",
    "flops": {"fp32": 1e11},
    "efficiency": 0.5,
    "base": "300MB",
    "kept": [0.1, 0.2],
    "measured": True,
}


def test_profiles_that_ship_are_valid_and_say_that_nobody_measured_them():
    assert {"h100-80g", "rtx4090", "laptop-16g"} <= shipped_profiles().keys()
    for name in shipped_profiles():
        found = profile(name)
        assert found.name == name
        assert not found.measured
        assert found.source


def test_a_plan_for_another_machine_has_its_room_and_its_rate(new):
    recipe = new(training={"batch_size": 8})
    gpu = plan(recipe, machine=profile("rtx4090"))
    assert (gpu.device, gpu.process_bytes) == ("cuda", None)
    rate = profile("rtx4090").flops["fp32"] * 0.4
    assert gpu.seconds == pytest.approx(recipe.training.steps * gpu.prediction.flops / rate)
    assert gpu.row()["machine"]["measured"] is False
    faster = plan(recipe.changed(training__precision="bf16"), machine=profile("rtx4090"))
    assert faster.tokens_per_second == pytest.approx(2 * gpu.tokens_per_second)
    mine = plan(recipe, machine=profile_of(MINE, "mine.yaml"))
    peak = mine.prediction.process_bytes(300_000_000, 0.2)
    assert (mine.process_base, mine.process_range[1]) == (300_000_000, peak)
    assert "machine" not in plan(recipe).row()


def test_a_profile_knows_runs_that_read_no_text():
    of_images = {"efficiency": 0.2, "base": "260MB", "kept": [0.0, 0.4]}
    mine = profile_of(MINE | {"images": of_images, "sequences": None}, "mine.yaml")
    task = {"images": 64, "held_out": 16}
    images = plan(Recipe(task={"method": "images", **task}), machine=mine)
    assert (images.process_base, images.record.efficiency) == (260_000_000, 0.2)
    assert images.record.kept == (0.0, 0.4)
    assert mine.of_run("tokenizer") is mine.of_run("sequences") is mine
    with pytest.raises(InputError, match="the least comes first") as caught:
        profile_of(MINE | {"images": of_images | {"kept": [0.4, 0.0]}}, "mine.yaml")
    assert "images.kept" in str(caught.value)


def test_what_does_not_fit_another_machine_is_refused_for_that_machine(new):
    small = profile_of(MINE | {"memory": "330MB"}, "small.yaml")
    with pytest.raises(DoesNotFit, match=r"mine's free memory \(330 MB\)"):
        plan(new(model={"width": 512}, training={"batch_size": 1}), machine=small)
    with pytest.raises(InputError, match="mine has no CUDA device") as caught:
        plan(new(training={"device": "cuda"}), machine=profile_of(MINE, "mine.yaml"))
    assert caught.value.field == "training.device"


def test_a_budget_beyond_the_accelerator_s_memory_is_no_more_room(new, monkeypatch):
    monkeypatch.setattr("modicum.planner.refusal.remedies", lambda asked: iter(()))
    large = new(model={"layers": 24, "width": 4096}, training={"batch_size": 1})
    for budget in ({"memory": "200GB"}, {"tensors": "200GB"}, {"memory": "1TB", "tensors": "1TB"}):
        with pytest.raises(DoesNotFit, match=r"^does not fit the accelerator's memory \(24\.5 GB"):
            plan(large.changed(budget=budget), machine=profile("rtx4090"))
    small = profile_of(MINE | {"memory": "330MB"}, "small.yaml")
    recipe = new(model={"width": 512}, training={"batch_size": 1}, budget={"memory": "200GB"})
    with pytest.raises(DoesNotFit, match=r"^does not fit mine's free memory \(330 MB\)"):
        plan(recipe, machine=small)


def test_a_budget_on_this_processor_counts_all_of_its_memory_and_no_more(new, monkeypatch):
    monkeypatch.setattr("modicum.planner.refusal.remedies", lambda asked: iter(()))
    monkeypatch.setattr("modicum.core.machine.memory_bytes", lambda: (400_000_000, 1_000_000))
    recipe = new(training={"batch_size": 1})
    made = plan(recipe.changed(budget__memory="390MB"))
    # What is free is less, and changes until the run begins.
    assert made.process_base + made.prediction.peak_bytes > 251_000_000
    assert plan(recipe.changed(budget__memory="1000TB")).prediction == made.prediction
    large = new(model={"width": 512}, training={"batch_size": 1}, budget={"memory": "200GB"})
    with pytest.raises(DoesNotFit, match=r"^does not fit this machine's usable memory \(400 MB\)"):
        plan(large)
    with pytest.raises(DoesNotFit, match=r"part of this machine's usable memory \(200 MB\)"):
        plan(large.changed(training__batch_size=2), ranks=2)


def test_pages_of_files_of_this_process_are_no_more_room_than_it_may_use(new, monkeypatch):
    monkeypatch.setattr("modicum.planner.refusal.remedies", lambda asked: iter(()))
    # A container's limit of 400 MB: of the 250 MB that the process holds, 240 MB are of files.
    monkeypatch.setattr("modicum.core.machine.memory_bytes", lambda: (400_000_000, 390_000_000))
    recipe = new(model={"width": 512}, training={"batch_size": 1})
    with pytest.raises(DoesNotFit, match=r"^does not fit this machine's free memory \(400 MB\)"):
        plan(recipe)
    with pytest.raises(DoesNotFit, match=r"^does not fit this machine's usable memory \(400 MB\)"):
        plan(recipe.changed(budget__memory="200GB"))


def test_a_host_without_room_for_the_copy_of_the_state_is_named(new):
    recipe = new(training={"batch_size": 8}, checkpoint={"asynchronous": True})
    values = {"device": "cuda", "accelerator_memory": "24GB", "base": "1GB", "memory": "1001MB"}
    tight = profile_of(MINE | values, "tight.yaml")
    said = r"^does not fit the host's free memory \(1 GB\): the copy of .* needs 3\.35 MB there"
    with pytest.raises(DoesNotFit, match=said) as caught:
        plan(recipe, machine=tight)
    assert caught.value.changes[0] == "--set checkpoint.asynchronous=auto"
    assert caught.value.yaml == "checkpoint: {asynchronous: auto}"
    fitting, remedy = made_to_fit(recipe, machine=tight)
    assert remedy.change == {"checkpoint.asynchronous": "auto"}
    assert not plan(fitting, machine=tight).prediction.choice.asynchronous


def test_where_host_and_accelerator_are_short_a_remedy_is_one_for_both(new):
    values = {"device": "cuda", "accelerator_memory": "24GB", "base": "1GB", "memory": "1001MB"}
    tight = profile_of(MINE | values, "tight.yaml")
    recipe = new(training={"batch_size": 8}, checkpoint={"asynchronous": True})
    least = recipe.changed(
        checkpoint__asynchronous=False, training__micro_batch_size=1, training__recompute="blocks"
    )
    budget = plan(least, machine=tight).prediction.peak_bytes - 500_000
    short = recipe.changed(budget__tensors=budget)
    with pytest.raises(DoesNotFit, match=r"^does not fit budget\.tensors"):
        plan(short, machine=tight)
    found = list(islice(remedies(asked_of(short, machine=tight)), 3))
    assert found
    for remedy in found:
        made = plan(changed(short, remedy.change), machine=tight)
        assert made.prediction.peak_bytes <= budget
        assert made.prediction.host_bytes <= 1_000_000


def test_an_accelerator_s_profile_says_nothing_of_a_processor(new):
    recipe = new(training={"device": "cpu"})
    with pytest.raises(InputError, match="none of a processor") as caught:
        plan(recipe, machine=profile("rtx4090"))
    assert (caught.value.field, caught.value.value) == ("training.device", "cpu")
    assert plan(recipe, machine=profile("laptop-16g")).device == "cpu"


def test_ranks_of_another_machine_share_its_processor_and_have_an_accelerator_each(new):
    recipe = new(parallel={"strategy": "ddp"}, training={"batch_size": 8})
    for name, shared in (("laptop-16g", 4), ("rtx4090", 1)):
        machine = profile(name)
        alone, four = (asked_of(recipe, ranks=n, machine=machine).machine.flops for n in (1, 4))
        assert alone == machine.flops["fp32"]
        assert four == alone / shared
        host, part = (asked_of(recipe, ranks=n, machine=machine).room.host for n in (1, 4))
        assert part < host / 3


def test_ranks_of_another_machine_send_at_its_rate(new):
    recipe = new(parallel={"strategy": "ddp"}, training={"batch_size": 8})
    made = plan(recipe, ranks=2, machine=profile_of(MINE | {"link": 1e9}, "mine.yaml"))
    sent = made.prediction.wire_bytes
    assert made.row()["machine"]["wire_seconds"] == pytest.approx(sent / 1e9)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"device": "tpu"}, "device"),
        ({"memory": "much"}, "memory"),
        ({"flops": {}}, "flops"),
        ({"kept": [0.4, 0.2]}, "kept"),
        ({"device": "cuda"}, "accelerator_memory"),
        ({"efficency": 1.0}, "efficency"),
    ],
)
def test_a_wrong_file_names_its_field(change, field):
    with pytest.raises(InputError) as caught:
        profile_of(MINE | change, "mine.yaml")
    assert caught.value.field == field
    assert "mine.yaml" in str(caught.value)
    assert profile_of({"profile": MINE, "record": {}}, "bench.json").name == "mine"


def test_an_unknown_name_offers_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'rtx4090'"):
        profile("rtx4080")
    with pytest.raises(InputError, match="not a machine"):
        profile_of([1], "list.yaml")

"""Machines to plan for that we are not on."""

from __future__ import annotations

import pytest

from modicum.core.errors import DoesNotFit, InputError
from modicum.planner import plan
from modicum.planner.planning import asked_of
from modicum.planner.profiles import profile, profile_of, shipped_profiles

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


def test_what_does_not_fit_another_machine_is_refused_for_that_machine(new):
    small = profile_of(MINE | {"memory": "330MB"}, "small.yaml")
    with pytest.raises(DoesNotFit, match=r"mine's free memory \(330 MB\)"):
        plan(new(model={"width": 512}, training={"batch_size": 1}), machine=small)
    with pytest.raises(InputError, match="mine has no CUDA device") as caught:
        plan(new(training={"device": "cuda"}), machine=profile_of(MINE, "mine.yaml"))
    assert caught.value.field == "training.device"


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

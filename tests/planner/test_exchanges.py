"""What a step waits for on a measured link: by hand, in a plan, and for each way to exchange."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from modicum.cli.tables import plan_tables, print_plan
from modicum.core.contracts.ledger import Wire
from modicum.core.errors import InputError
from modicum.core.machine.links import MeasuredLink
from modicum.core.ranks.environment import planned_on
from modicum.core.ranks.layout import Layout
from modicum.planner import planning
from modicum.planner.coding_time import coding_seconds
from modicum.planner.exchanges import wire_query
from modicum.planner.planning import plan
from modicum.planner.predict import predict
from modicum.planner.prediction import Choice
from modicum.planner.wire_time import WireQuery, break_even, wire_time
from modicum.tasks import task_of

SUMS = (Wire("all_reduce", 8_000_000, "replicate", 4),)
LINK = MeasuredLink(0.001, 1e6)


def test_sums_hide_behind_the_last_backward_pass_but_the_last_of_them() -> None:
    at = WireQuery(SUMS, Layout.of(3), compute=6.0)
    busy = 8.0 + 4 * 4 * 0.001
    assert wire_time(at, LINK).busy == pytest.approx(busy)
    assert wire_time(at, LINK).waited == pytest.approx(busy - 4.0)
    assert wire_time(replace(at, micro_batches=6), LINK).waited == pytest.approx(busy - 4.0 / 6)
    assert wire_time(replace(at, compute=100.0), LINK).waited == pytest.approx(busy / 4)
    assert wire_time(replace(at, compute=100.0, late=0.5), LINK).waited > busy / 2


def test_weights_are_waited_for_unless_they_are_deferred() -> None:
    wires = (
        Wire("reduce_scatter", 1_000_000, "shard", 2),
        Wire("all_gather", 3_000_000, "shard", 2),
    )
    at = WireQuery(wires, Layout.of(2, 2, copies=True), compute=30.0)
    link = MeasuredLink(0.0, 1e6)
    assert wire_time(at, link).waited == pytest.approx(0.5 + 3.0)
    assert wire_time(replace(at, deferred=True), link).waited == pytest.approx(0.5)
    cut = replace(at, layout=Layout.of(2, 2))
    assert wire_time(replace(cut, device="cuda"), link).waited == 0.0


# Of three blocks: each is gathered twice, and the rest once; each has its sum, and the rest too.
BLOCKS = (Wire("all_gather", 7_000_000, "shard", 7), Wire("reduce_scatter", 4_000_000, "shard", 4))


def test_calls_of_fsdp_travel_while_blocks_compute() -> None:
    link = MeasuredLink(0.0, 1e6)
    at = WireQuery(BLOCKS, Layout.of(2, 2), compute=0.0)
    assert wire_time(at, link).waited == pytest.approx(11.0)
    # 3.5 calls go along with the forward pass, 7.5 with the backward pass; one stands alone.
    computes = wire_time(replace(at, compute=300.0), link)
    assert computes.waited == pytest.approx(3.5 / 3.5 + 7.5 / 7.5)
    link_decides = replace(at, compute=3.0)
    assert wire_time(link_decides, link).waited == pytest.approx(11.0 + 1 / 3.5 + 2 / 7.5 - 3.0)
    often = replace(at, compute=600.0, micro_batches=2)
    wires = tuple(replace(wire, bytes=2 * wire.bytes, count=2 * wire.count) for wire in BLOCKS)
    assert wire_time(replace(often, wires=wires), link).waited == pytest.approx(4.0)
    once = (replace(BLOCKS[0], bytes=4_000_000, count=4), BLOCKS[1])
    kept = replace(at, wires=once, compute=300.0, gathered=1)
    assert wire_time(kept, link).waited == pytest.approx(2.0)


@pytest.mark.parametrize(("waits", "waited"), [("gathers", 7 + 1), ("sums", 4 + 2)])
def test_what_fsdp_waits_for_at_once_hides_behind_nothing(waits: Any, waited: float) -> None:
    at = WireQuery(BLOCKS, Layout.of(2, 2), compute=300.0, waits=[waits])
    assert wire_time(at, MeasuredLink(0.0, 1e6)).waited == pytest.approx(waited)


@pytest.mark.parametrize("copies", [True, False])
def test_sums_of_matrices_go_over_all_ranks_where_these_share_the_weights(copies: bool) -> None:
    at = WireQuery(SUMS, Layout.of(3, 3, copies=copies), compute=0.0)
    assert wire_time(at, LINK).busy == pytest.approx(8.0 + 4 * 4 * 0.001)


def test_sums_of_the_last_micro_batch_alone_hide_behind_its_pass() -> None:
    wires = (Wire("all_gather", 2_800_000, "shard", 28), *SUMS)
    at = WireQuery(wires, Layout.of(2, 2), compute=12.0, micro_batches=4, sums_once=True)
    # Of a pass one call stands alone; the last backward pass, of 2 s, is shorter than its calls.
    last = 0.35 + 8.0 + 2.0 / 7.5 - 2.0
    assert wire_time(at, MeasuredLink(0.0, 1e6)).waited == pytest.approx(0.4 + 0.3 + last)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("copies", [True, False])
def test_what_an_optimizer_sends_is_waited_for(new, device: str, copies: bool) -> None:
    recipe = new(optimizer={"method": "muon"})
    choice = Choice(2, 1, False, Layout.of(2, 2, copies=copies))
    made = predict(recipe, task_of(recipe).look(recipe).config, choice)
    at, link = wire_query(recipe, made, device, 1e6), MeasuredLink(0.0, 1e6)
    assert "all_to_all" in {wire.collective for wire in at.updates}
    assert "all_to_all" not in {wire.collective for wire in at.wires}
    assert sorted(map(repr, (*at.wires, *at.updates))) == sorted(map(repr, made.ledger.wire))
    found, without = wire_time(at, link), wire_time(replace(at, updates=()), link)
    sent = sum(wire.bytes for wire in at.updates) / link.rate
    assert found.waited - without.waited == pytest.approx(sent)
    assert found.busy - without.busy == pytest.approx(sent)


def test_calls_within_a_host_go_by_the_link_that_is_there() -> None:
    wires = (Wire("reduce_scatter", 6_000_000, "shard", 2), Wire("all_reduce", 10, "replicate", 2))
    near, layout = MeasuredLink(0.01, 6e6), Layout.of(6, 3)
    far = MeasuredLink(1.0, 1.0, within=near)
    at = WireQuery(wires, layout, compute=0.0, on_a_host=3)
    between = 10 + 2 * 2 * 1.0
    assert wire_time(at, far).busy == pytest.approx(1 + 2 * 2 * 0.01 + between)
    apart = replace(at, on_a_host=2)  # a host has fewer ranks than a copy of the weights
    assert wire_time(apart, far).busy == pytest.approx(6e6 + 2 * 2 * 1.0 + between)
    alone = replace(far, within=None)
    assert wire_time(at, alone).busy == pytest.approx(6e6 + 2 * 2 * 1.0 + between)


@pytest.mark.parametrize(
    ("comm", "shard", "waits"),
    [(None, 2, []), ("dense_sums", 2, []), ("sdp4bit", 2, ["gathers"]), (None, 1, ["sums"])],
)
def test_a_plan_knows_what_fsdp_waits_for(new, comm, shard: int, waits: list[str]) -> None:
    more = {} if comm is None else {"comm": {"method": comm}}
    recipe = new(parallel={"strategy": "fsdp", "reshard_after_forward": False}, **more)
    layout = Layout(replicas=3 - shard, shards=2)
    made = predict(recipe, task_of(recipe).look(recipe).config, Choice(2, 1, False, layout))
    at = wire_query(recipe, made, "cpu", 1e9)
    assert (at.waits, at.gathered) == (waits, 1)


def test_sums_are_waited_for_where_updates_are_made_in_the_backward_pass(new) -> None:
    optimizer = {"method": "muon", "in_backward": True}
    recipe = new(optimizer=optimizer, training={"clip_norm": None})
    config, choice = task_of(recipe).look(recipe).config, Choice(2, 1, False, Layout.of(2, 2))
    made = predict(recipe, config, choice)
    assert wire_query(recipe, made, "cpu", 1e9).waits == ["sums"]


def test_an_exchange_s_own_number_of_ranks_on_a_host_is_that_of_its_hops(new) -> None:
    comm = {"method": "sdp4bit", "ranks_per_node": 2}
    recipe = new(parallel={"strategy": "zero"}, comm=comm)
    layout = Layout.of(4, 4, copies=True)
    made = predict(recipe, task_of(recipe).look(recipe).config, Choice(2, 1, False, layout))
    at = wire_query(recipe, made, "cpu", 1e9)
    assert {wire.axis for wire in at.wires} == {"local", "node", "shard"}
    assert [at.among(axis) for axis in ("local", "node", "shard")] == [2, 2, 4]


def test_moving_bytes_takes_the_processor_that_computes() -> None:
    at, link = WireQuery(SUMS, Layout.of(2), compute=100.0), MeasuredLink(0.0, 1e9, cpu=1e-7)
    assert wire_time(at, link).waited == pytest.approx(0.008 / 4 + 0.8)
    assert wire_time(replace(at, device="cuda"), link).waited == pytest.approx(0.008 / 4)


def test_where_fewer_bytes_pay() -> None:
    dense = WireQuery(SUMS, Layout.of(2), compute=3.0)
    fewer = replace(dense, wires=(Wire("all_reduce", 800_000, "replicate", 4),), compute=3.1)
    link = MeasuredLink(0.0, 1.0)
    rate = break_even(dense, fewer, link)
    assert rate is not None
    at = MeasuredLink(0.0, rate)
    steps = [each.compute + wire_time(each, at).waited for each in (dense, fewer)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-3)
    assert break_even(dense, replace(fewer, wires=SUMS), link) is None
    assert break_even(dense, replace(fewer, compute=1.0), link) == math.inf


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> MeasuredLink:
    """A link of 10 Mb/s between ranks of this host."""
    link = MeasuredLink(0.001, 1.25e6, 1e-9, 2, "now")
    monkeypatch.setattr(planning, "known_links", lambda: {"local": link})
    return link


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "known_links", dict)


def test_a_plan_s_seconds_are_compute_and_what_waits_for_the_wire(new, slow) -> None:
    recipe = new(parallel={"strategy": "ddp"}, training={"batch_size": 8})
    made = plan(recipe, ranks=2)
    alone = replace(made, link=None)
    assert made.wire_time is not None
    waited = made.seconds - alone.seconds
    assert waited == pytest.approx(made.steps * made.wire_time.waited, rel=1e-6)
    assert made.wire_time.busy > made.prediction.wire_bytes / slow.rate
    assert made.row()["link"]["busy_seconds"] == made.wire_time.busy
    assert plan(recipe).wire_time is None


def test_what_an_exchange_makes_counts_without_a_link_too(new) -> None:
    parallel = {"strategy": "ddp"}
    dense = plan(new(parallel=parallel), ranks=2)
    coded = plan(new(parallel=parallel, comm={"method": "powersgd"}), ranks=2)
    assert coded.link is None
    assert coded.prediction.flops == dense.prediction.flops
    made = coded.prediction.flops + coded.prediction.coding_flops
    assert coded.seconds / dense.seconds == pytest.approx(made / dense.prediction.flops)
    assert made > dense.prediction.flops


def test_codes_take_time_of_a_step(new) -> None:
    parallel = {"strategy": "zero"}
    dense = plan(new(parallel=parallel), ranks=2)
    coded = plan(new(parallel=parallel, comm={"method": "sdp4bit"}), ranks=2)
    coding = coding_seconds(coded.prediction.ledger.wire)
    assert coding > 0
    assert coded.seconds - dense.seconds == pytest.approx(coded.steps * coding)


@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_codes_between_hosts_are_those_of_hosts(new, monkeypatch, strategy: str) -> None:
    recipe = new(parallel={"strategy": strategy}, comm={"method": "sdp4bit"})
    config = task_of(recipe).look(recipe).config
    choice = Choice(2, 1, recompute=False, layout=Layout.of(2, 2, copies=strategy == "zero"))

    def sent() -> dict[str, int]:
        wire = predict(recipe, config, choice).ledger.wire
        coded = [each for each in wire if each.collective == "all_to_all"]
        return {each.axis: each.bytes for each in coded}

    near = sent()
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    far = sent()
    assert (set(near), set(far)) == ({"local"}, {"node"})
    assert far["node"] < 0.7 * near["local"]  # gradients of 4 bits, not of 8


def test_a_plan_for_several_hosts_has_their_link(new, monkeypatch) -> None:
    near, far = MeasuredLink(1e-5, 1e9, 0.0, 2, "now"), MeasuredLink(1e-3, 1e6, 0.0, 2, "now")
    monkeypatch.setattr(planning, "known_links", lambda: {"local": near, "node": far})
    machine = replace(planning.shared_machine(torch.device("cpu")), flops=8e9)
    monkeypatch.setattr(planning, "shared_machine", lambda device: machine)
    recipe = new(parallel={"strategy": "ddp"}, training={"batch_size": 8})
    with planned_on(2, 4):
        apart = plan(recipe, ranks=4, advise=True)
    here = plan(recipe, ranks=4)
    assert (apart.link, here.link) == (replace(far, within=near), near)
    assert apart.exchanges
    assert (apart.machine.flops, here.machine.flops) == (4e9, 2e9)
    with pytest.raises(InputError, match="3 ranks cannot be on 2 hosts"), planned_on(2, 3):
        pass


def test_codes_are_tried_where_ranks_share_the_optimizer_s_state(new, slow) -> None:
    recipe = new(parallel={"strategy": "zero"}, training={"batch_size": 8})
    made = plan(recipe, ranks=2, advise=True)
    ways = {(way["comm"] or {"method": "plain"})["method"]: way for way in made.row()["exchanges"]}
    assert set(ways) == {"plain", "dense_sums", "sdp4bit", "acp_sgd", "powersgd"}
    assert ways["sdp4bit"]["bytes"] < ways["plain"]["bytes"] / 5
    assert ways["sdp4bit"]["break_even"] > slow.rate
    assert ways["sdp4bit"]["step_seconds"] < ways["plain"]["step_seconds"]


def test_without_a_link_nothing_is_said_of_it(new, fast) -> None:
    made = plan(new(parallel={"strategy": "ddp"}, training={"batch_size": 8}), ranks=2, advise=True)
    assert made.wire_time is None
    assert "link" not in made.row()
    assert "exchanges" not in made.row()


def test_each_way_to_exchange_has_its_step_and_where_it_pays(new, slow, capsys) -> None:
    comm = {"method": "powersgd", "rank": 2}
    recipe = new(parallel={"strategy": "ddp"}, training={"batch_size": 8}, comm=comm)
    made = plan(recipe, ranks=2, advise=True)
    ways = {(way["comm"] or {"method": "plain"})["method"]: way for way in made.row()["exchanges"]}
    assert set(ways) == {"plain", "dear", "dense_sums", "acp_sgd", "powersgd"}
    assert ways["powersgd"]["here"]
    assert ways["powersgd"]["comm"]["rank"] == 2
    assert ways["powersgd"]["bytes"] == made.prediction.wire_bytes
    assert ways["dense_sums"]["bytes"] * 2 == ways["plain"]["bytes"]
    assert ways["plain"]["break_even"] is None
    for name in ("dense_sums", "acp_sgd"):
        way, below = ways[name], ways[name]["break_even"]
        faster = way["step_seconds"] < ways["plain"]["step_seconds"]
        assert way["always"] or below is not None
        assert faster == (way["always"] or slow.rate < below)
    print_plan(made.row())
    shown = capsys.readouterr().out
    assert "powersgd, rank 2 (the recipe's)" in shown
    costs = {row[0]: row[2] for row in plan_tables(made.row())[1]}
    assert "on the link, for which a step waits" in costs["wire"]


GO_WITH_FSDP = ("dense_sums", "powersgd", "acp_sgd")


def test_what_does_not_go_with_the_layout_is_left_out(new, slow) -> None:
    recipe = new(parallel={"strategy": "fsdp"}, training={"batch_size": 8})
    ways = plan(recipe, ranks=2, advise=True).row()["exchanges"]
    found = {way["comm"] and way["comm"]["method"]: way["bytes"] for way in ways}
    assert {None, "dense_sums", "powersgd"} <= found.keys() <= {None, *GO_WITH_FSDP}
    assert all(found[name] < found[None] for name in found if name is not None)


@pytest.mark.parametrize("method", ["acp_sgd", "dear", "dense_sums", "powersgd", "sdp4bit"])
def test_on_one_rank_the_plan_says_that_nothing_travels(new, method: str) -> None:
    made = plan(new(comm={"method": method}))
    [row] = [row for row in made.choices if row["field"] == "comm.method"]
    assert row["value"] == method
    assert row["why"] == "there is one rank, and nothing travels: gradients are used as they are"
    plain = plan(new())
    assert made.prediction.ledger == plain.prediction.ledger
    assert made.prediction.wire_bytes == 0

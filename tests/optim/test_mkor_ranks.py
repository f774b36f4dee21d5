"""MKOR on several ranks, unsharded and sharded, against the same updates in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import LAYOUTS
from pool import Pool
from tests.optim.test_eva_ranks import STEPS, Training
from torch import Tensor

from modicum.checkpoint import CheckpointStore
from modicum.core.contracts.parameters import trained_shapes
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import own_part
from modicum.optim import MKOR
from modicum.optim.layer_factors import assign
from modicum.optim.transform import TransformQuery
from modicum.proofs.contracts.optim.subjects import llama

pytestmark = pytest.mark.ranks
COUNTS = {"zero 2": 2} | {name: count for name, (count, _) in LAYOUTS.items()}
END = 19  # after so many updates the losses below end it


class MKORTraining(Training):
    method = MKOR

    def loss_of(self, step: int) -> float:
        return 8.0 if step == 0 else max(8.0 - 2 * step, 2.0)


def on_ranks(ranks: Ranks, layout: str, fields: dict[str, Any]) -> Any:
    training = MKORTraining(ranks, layout, False, **fields)
    training.steps(0, STEPS)
    held = {key: v.clone() for key, v in training.eva.factors.state_dict().items()}
    return training.outcome() | {"state": held}


CASES = [
    ("ddp 2", "full"),
    ("fsdp 2", "full"),
    ("zero 2", "full"),
    ("fsdp 2", "fp16"),
    pytest.param("ddp 2", "fp16", marks=pytest.mark.expensive),
    pytest.param("hybrid 4", "full", marks=pytest.mark.expensive),
    pytest.param("fsdp 4", "full", marks=pytest.mark.expensive),
]


@pytest.mark.parametrize(("layout", "factors"), CASES, ids=str)
def test_updates_are_those_of_one_process(pool: Pool, layout: str, factors: str) -> None:
    """Unequal micro-batches and counts; in full precision to 1e-5, in fp16 to its rounding."""
    fields, close = {"every": 1, "factors": factors}, 1e-5 if factors == "full" else 2e-3
    alone = on_ranks(Ranks(), "alone", fields)
    results = pool.run(on_ranks, layout, fields, ranks=COUNTS[layout])
    for result in results:
        assert result["norms"] == pytest.approx(alone["norms"], rel=close)
        for name, weight in alone["weights"].items():
            off = float((result["weights"][name] - weight).abs().max())
            assert off <= close * float(weight.abs().max()), name
            assert torch.equal(result["weights"][name], results[0]["weights"][name])
        for name, factor in result["state"].items():
            off = float((factor - alone["state"][name]).abs().max())
            assert off <= close * float(alone["state"][name].abs().max()), name
    shards = 1 if layout == "zero 2" else LAYOUTS[layout][1]
    shards = 2 if layout == "zero 2" else shards
    kept = [name for result in results for name in result["state"]]
    copies = len(results) // shards  # each factor is with one of the ranks that share the rows
    assert sorted(kept) == sorted(list(alone["state"]) * copies)


def saved(ranks: Ranks, layout: str, folder: Path, at: int, last: int) -> dict[str, Any]:
    training = MKORTraining(ranks, layout, False, **HYBRID)
    training.steps(0, at)
    CheckpointStore(folder, ranks=ranks).save(at, training.registry)
    training.steps(at, last)
    return training.outcome()


def resumed(ranks: Ranks, layout: str, folder: Path, at: int, last: int) -> dict[str, Any]:
    training = MKORTraining(ranks, layout, False, **HYBRID)
    training.steps(30, 31)
    checkpoint = CheckpointStore(folder, ranks=ranks).newest()
    assert checkpoint is not None
    checkpoint.load(training.registry)
    training.steps(at, last)
    return training.outcome()


HYBRID = {"every": 3, "hybrid": True, "hybrid_window": 2, "hybrid_after": 3}


@pytest.mark.parametrize("at", [2, END + 1], ids=["before the end", "after it"])
@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2", "zero 2"])
def test_a_run_resumes_to_the_bit_on_either_side_of_its_end(
    pool: Pool, layout: str, at: int, tmp_path: Path
) -> None:
    last = END + 3
    straight = pool.run(saved, layout, tmp_path, at, last, ranks=2)
    again = pool.run(resumed, layout, tmp_path, at, last, ranks=2)
    for one, other in zip(straight, again, strict=True):
        assert "less than" in one["state"]["ended"]
        assert one["state"] == other["state"]
        assert one["norms"][at:] == other["norms"][1:]
        for name, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][name]), name


@pytest.mark.expensive
@pytest.mark.parametrize(("before", "after"), [("fsdp 2", "alone"), ("alone", "fsdp 2")])
def test_a_run_resumes_on_another_number_of_ranks(
    pool: Pool, before: str, after: str, tmp_path: Path
) -> None:
    straight = pool.run(saved, before, tmp_path, 2, 5, ranks=COUNTS[before])[0]
    for found in pool.run(resumed, after, tmp_path, 2, 5, ranks=COUNTS[after]):
        assert found["norms"][1:] == pytest.approx(straight["norms"][2:], rel=2e-3)


def exchanged(ranks: Ranks, layout: str) -> Any:
    """(bytes, collective) of each exchange of an update that refreshes, of one that does not, and
    of one after the end."""
    training, seen = MKORTraining(ranks, layout, False, every=2), []
    originals = dist.all_reduce, dist.all_to_all_single
    apply = training.eva.apply

    def summed(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        seen[-1].append(("all_reduce", tensor.numel() * tensor.element_size()))
        return originals[0](tensor, *arguments, **named)

    def sent(incoming: Tensor, outgoing: Tensor, *arguments: Any, **named: Any) -> Any:
        seen[-1].append(("all_to_all", outgoing.numel() * outgoing.element_size()))
        return originals[1](incoming, outgoing, *arguments, **named)

    def measured(**named: Any) -> None:
        seen.append([])
        dist.all_reduce, dist.all_to_all_single = summed, sent
        try:
            apply(**named)
        finally:
            dist.all_reduce, dist.all_to_all_single = originals

    training.eva.apply = measured
    training.steps(0, 2)
    training.eva.end("for the test")
    training.steps(2, 3)
    layers = training.eva.layers
    return seen, [(at.out_features, at.in_features) for at in layers]


@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2"])
def test_what_crosses_the_wire(pool: Pool, layout: str) -> None:
    """Counts and vectors where factors are refreshed; G to its owner and back; after the end
    nothing."""
    results = pool.run(exchanged, layout, ranks=2)
    sides = results[0][1]
    for rank, ((first, second, third), _) in enumerate(results):
        numbers = sum(o + i + 1 for o, i in sides)
        sums = [("all_reduce", 4 * (len(sides) + 1)), ("all_reduce", 2 * numbers)]
        rows: list[Any] = []
        if layout == "fsdp 2":
            owners = assign({k: o * o + i * i for k, (o, i) in enumerate(sides)}, 2)
            heights = [(-(-o // 2), o - -(-o // 2)) for o, _ in sides]
            # What stays on a rank is in the buffer too, and does not cross.
            there = sum(heights[k][rank] * i for k, (_, i) in enumerate(sides))
            back = sum(o * i for k, (o, i) in enumerate(sides) if owners[k] == rank)
            rows = [("all_to_all", 4 * there), ("all_to_all", 4 * back)]
        assert first == sums + rows
        assert second == rows
        assert third == []


def spoilt(ranks: Ranks, layout: str) -> bool:
    """Whether factors are what they were after an update with NaN in one rank's gradient."""
    training = MKORTraining(ranks, layout, False, every=1)
    training.steps(0, 2)
    held = {name: v.clone() for name, v in training.eva.factors.state_dict().items()}
    apply = training.eva.apply

    def spoiling(**named: Any) -> None:
        if ranks.rank == 1:
            parameters = list(training.eva.parameters.values())
            own_part(parameters[0].grad)[0].fill_(torch.nan)
        apply(**named)

    training.eva.apply = spoiling
    training.steps(2, 3)
    now = training.eva.factors.state_dict()
    return bool(held) and all(torch.equal(v, now[name]) for name, v in held.items())


@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2"])
def test_what_is_no_number_on_one_rank_changes_no_factor_on_any(pool: Pool, layout: str) -> None:
    assert pool.run(spoilt, layout, ranks=2) == [True, True]


def test_the_ledger_says_what_crosses_and_what_the_largest_owner_keeps() -> None:
    at = TransformQuery(trained_shapes(llama()), ranks=2, shards=2)
    sides = [(p.shape[0], p.shape[1]) for p in at.layers]
    owners = assign({k: o * o + i * i for k, (o, i) in enumerate(sides)}, 2)
    kept = [
        2 * sum(o * o + i * i for k, (o, i) in enumerate(sides) if owners[k] == rank)
        for rank in (0, 1)
    ]
    ledger = MKOR(every=1).ledger(at)
    assert ledger.bytes("optimizer") == max(kept)
    numbers = sum(o + i + 1 for o, i in sides)
    found = {wire.collective: wire.bytes for wire in ledger.wire}
    assert found["all_reduce"] == 2 * numbers + 4 * (len(sides) + 1)
    assert MKOR(every=10).ledger(at).wire[0].bytes == found["all_reduce"] // 10

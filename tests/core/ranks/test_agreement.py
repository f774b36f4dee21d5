"""A rank that would exchange something else is named, on all ranks, before anything is sent."""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from torch import nn

from modicum.comm import SDP4Bit
from modicum.comm.acp_sgd import ACPSGD
from modicum.comm.dear import DeAR
from modicum.comm.dense_sums import DenseSums
from modicum.comm.powersgd import PowerSGD
from modicum.core.contracts.parameters import trainable
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.ranks.agreement import same_terms
from modicum.core.ranks.ddp_hook import DDPHook
from modicum.core.ranks.environment import met_store
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.parallel.replicated import Replicated

pytestmark = pytest.mark.ranks


def said(act: Any) -> str:
    try:
        act()
    except InputError as error:
        return error.problem
    return "agreed"


def connecting(ranks: Ranks, kinds: list[str], fields: list[dict[str, Any]]) -> str:
    known = {m.info.name: m for m in (PowerSGD, ACPSGD, DenseSums, SDP4Bit)}
    method = known[kinds[ranks.rank]](**fields[ranks.rank])
    return said(method.bind(ExchangeContext(ranks)).connect)


@pytest.mark.parametrize(
    ("kinds", "fields", "difference"),
    [
        (["powersgd"] * 2, [{"rank": 4}, {"rank": 8}], "rank is 4 there and 8 here"),
        (["dense_sums"] * 2, [{}, {"dtype": "bf16"}], "dtype is fp32 there and bf16 here"),
        (["powersgd", "acp_sgd"], [{"rank": 4}] * 2, "kind is PowerSGDExchange there"),
        (["sdp4bit"] * 2, [{"ranks_per_node": 1}, {"ranks_per_node": 2}], "ranks_per_node is 1"),
    ],
)
def test_another_exchange_is_named_on_all_ranks(
    pool: Pool, kinds: list[str], fields: list[dict[str, Any]], difference: str
) -> None:
    one, other = pool.run(connecting, kinds, fields)
    assert one == other
    assert one.startswith("rank 1 has another exchange than rank 0: ")
    assert difference in one
    assert pool.run(connecting, [kinds[0]] * 2, [fields[0]] * 2) == ["agreed"] * 2


def model_of(widths: list[int], *, half: bool = False, frozen: bool = False) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(4, width) for width in widths))
    if frozen:
        model[0].bias.requires_grad_(False)
    return model.bfloat16() if half else model


def starting(ranks: Ranks, kind: str, models: list[dict[str, Any]]) -> str:
    model, layout = model_of(**models[ranks.rank]), Layout.of(ranks.size)
    if kind == "dear":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return said(lambda: DeAR().wrap(model, optimizer))
    return said(lambda: Replicated(ranks, layout).start(model))


@pytest.mark.parametrize("kind", ["dear", "replicated"])
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"widths": [4, 5]}, "1.weight is float32 [4, 4], number 2 there and float32 [5, 4]"),
        ({"widths": [4]}, "1.weight is float32 [4, 4], number 2 there and not here"),
        ({"widths": [4, 4], "half": True}, "and bfloat16 [4, 4], number 0 here"),
        ({"widths": [4, 4], "frozen": True}, "0.bias is float32 [4], number 1 there and not here"),
    ],
)
def test_another_model_is_named_on_all_ranks(
    pool: Pool, kind: str, other: dict[str, Any], difference: str
) -> None:
    first = {"widths": [4, 4]}
    one, two = pool.run(starting, kind, [first, other])
    assert one == two
    assert one.startswith("rank 1 has another model than rank 0: ")
    assert difference in one
    assert pool.run(starting, kind, [first, first]) == ["agreed"] * 2


def wrapping(ranks: Ranks, buckets: list[int]) -> str:
    model = model_of([4])
    value = DeAR(bucket_bytes=buckets[ranks.rank])
    return said(lambda: value.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def frozen(ranks: Ranks, widths: list[int]) -> Any:
    """A frozen layer that each rank filled with its number, after wrapping."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, widths[ranks.rank]).requires_grad_(False))
    with torch.no_grad():
        model[1].weight.fill_(ranks.rank)
        model[1].weight.data = model[1].weight.data.T.contiguous().T  # not contiguous
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    said_of = said(lambda: DeAR().wrap(model, optimizer))
    return said_of, float(model[1].weight.detach().abs().sum())


def test_wraps_give_all_ranks_frozen_weights_too(pool: Pool) -> None:
    assert pool.run(frozen, [4, 4]) == [("agreed", 0.0)] * 2
    (one, _), (two, _) = pool.run(frozen, [4, 5])
    assert one == two
    assert one.startswith("rank 1 has another frozen model than rank 0: 1.weight is float32 [4, 4]")


def hooking(ranks: Ranks, widths: list[int]) -> str:
    model = nn.parallel.DistributedDataParallel(model_of([4]))
    exchange = PowerSGD(rank=widths[ranks.rank]).bind(ExchangeContext(ranks))
    return said(lambda: DDPHook(exchange, model))


def test_wraps_and_hooks_ask_too(pool: Pool) -> None:
    assert len(set(found := pool.run(wrapping, [4096, 8192]))) == 1
    assert "bucket_bytes is 4096 there and 8192 here" in found[0]
    assert len(set(found := pool.run(hooking, [1, 2]))) == 1
    assert "rank is 1 there and 2 here" in found[0]


def named(layers: dict[str, int], *, half: bool = False) -> nn.ModuleDict:
    """Layers of these names and widths, without biases."""
    model = nn.ModuleDict({name: nn.Linear(4, width, bias=False) for name, width in layers.items()})
    return model.bfloat16() if half else model


def summing(ranks: Ranks, kind: str, methods: list[str], models: list[dict[str, Any]]) -> list[str]:
    """What is said where the models' gradients are to be summed."""
    known: dict[str, Any] = {m.info.name: m for m in (PowerSGD, ACPSGD, DenseSums)}
    found = []
    for method in methods:
        model = named(**models[ranks.rank])
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if kind == "hook":
            wrapped = nn.parallel.DistributedDataParallel(model)
            found.append(said(partial(known[method]().ddp_hook, wrapped)))
        else:
            exchange = known[method]().bind(ExchangeContext(ranks))
            found.append(said(partial(exchange.reduce, model)))
    return found


OTHERS: list[tuple[dict[str, Any], str]] = [
    (
        {"layers": {"b": 4, "a": 4}},
        "b.weight is float32 [4, 4], number 1 there and float32 [4, 4], number",
    ),
    ({"layers": {"x": 4, "y": 4}}, "a.weight is float32 [4, 4], number 0 there and not here"),
    ({"layers": {"a": 2, "b": 6}}, "number 0 there and float32 [2, 4], number 0 here"),
    ({"layers": {"a": 4, "b": 4}, "half": True}, "number 0 there and bfloat16 [4, 4], number 0"),
]


@pytest.mark.parametrize(
    ("kind", "other", "difference"),
    [
        *(("reduce", *each) for each in OTHERS),
        *(("hook", *each) for each in OTHERS[:2]),  # DDP itself compares shapes
    ],
    ids=str,
)
def test_another_model_is_named_where_matrices_are_summed(
    pool: Pool, kind: str, other: dict[str, Any], difference: str
) -> None:
    methods, first = ["powersgd", "acp_sgd", "dense_sums"], {"layers": {"a": 4, "b": 4}}
    one, two = pool.run(summing, kind, methods, [first, other])
    assert one == two
    for words in one:
        assert words.startswith("rank 1 has another model than rank 0: ")
        assert difference in words
    assert pool.run(summing, kind, methods, [first, first]) == [["agreed"] * 3] * 2


def unfreezing(ranks: Ranks) -> tuple[str, str, list[float]]:
    """What is said on a rank that trains one more layer, and sums once all have said so."""
    model = named({"a": 4, "b": 4})
    model["b"].requires_grad_(False)
    exchange = PowerSGD().bind(ExchangeContext(ranks))

    def summed() -> list[float]:
        for _, parameter in trainable(model):
            parameter.grad = torch.full_like(parameter, 1.0 + ranks.rank)
        exchange.reduce(model)
        exchange.commit()
        return [float(parameter.grad[0, 0]) for _, parameter in trainable(model)]

    assert summed() == [3.0]
    assert summed() == [3.0]
    model["b"].requires_grad_(True)
    alone = said(summed) if ranks.rank == 1 else ""  # nobody else is asked
    torch.distributed.barrier()
    if ranks.rank == 1:
        model["b"].requires_grad_(False)
    others = said(lambda: exchange.meet(model))
    model["b"].requires_grad_(True)
    exchange.meet(model)
    return alone, others, summed()


def test_other_parameters_than_were_compared_are_noticed_and_compared_anew(pool: Pool) -> None:
    one, other = pool.run(unfreezing)
    assert other[0] == (
        "other parameters are trained than ranks have compared: b.weight is not then and float32 "
        "[4, 4], number 1 now; call meet(model) on all ranks where that changes"
    )
    assert one[1] == other[1]
    assert "b.weight is float32 [4, 4], number 1 there and not here" in one[1]
    assert one[2] == other[2] == [3.0, 3.0]


def in_another_order(ranks: Ranks) -> str:
    terms = [{"rank": 4, "seed": 0}, {"seed": 0, "rank": 4}][ranks.rank]
    return said(lambda: same_terms(ranks, "exchange", terms))


def test_the_order_of_terms_does_not_matter(pool: Pool) -> None:
    assert pool.run(in_another_order) == ["agreed"] * 2


def comparing(ranks: Ranks, whats: list[str]) -> str:
    return said(lambda: same_terms(ranks, whats[ranks.rank], {"of": "this"}))


def test_ranks_that_compare_different_things_are_told_so(pool: Pool) -> None:
    found = pool.run(comparing, ["model", "exchange"])
    assert found == ["rank 1 is about to compare its exchange, and rank 0 its model"] * 2


def started_again(ranks: Ranks) -> bool:
    """The first time a rank dies before it compares anything; torchrun's store stays."""
    with patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "7"}):
        if ranks.first:
            met_store().add("terms of 0", 1)
    with patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "8"}):
        same_terms(ranks, "exchange", {"rank": 4})
        same_terms(ranks, "model", {"rank": 5})
    return True


def test_ranks_that_are_started_again_compare_what_they_say_now(pool: Pool) -> None:
    assert all(pool.run(started_again))


def test_one_rank_agrees_with_itself() -> None:
    same_terms(Ranks(), "exchange", {"rank": 4})
    Strategy().start(model_of([4]))

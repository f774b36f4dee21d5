from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from modicum.core.contracts.ledger import ModelQuery
from modicum.core.layers.saved_tensors import Shares
from modicum.core.machine.memory import TensorMeter, tensor_bytes
from modicum.memory import COMET
from modicum.models.convnet import ConvNet, ConvNetConfig, create
from modicum.models.convnet_ledger import ledger
from modicum.proofs.bench.meters import saved_bytes

ROWS = 12
CONFIGS: dict[str, ConvNetConfig] = {
    "plain": ConvNetConfig(widths=(16, 16, 32, 32)),
    "norms": ConvNetConfig(widths=(16, 16, 32, 32), norm="group"),
    "odd": ConvNetConfig(classes=7, channels=1, size=24, widths=(24, 40, 20), pool_every=1),
    "tiny": ConvNetConfig(widths=(8, 8, 16)),
    "unpooled": ConvNetConfig(size=16, widths=(16, 24), pool_every=3),
}


def autocast(half: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if half else nullcontext()


def inputs(config: ConvNetConfig, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(rows, config.channels, config.size, config.size, generator=generator)
    return images, torch.randint(config.classes, (rows,), generator=generator)


def loss(model: ConvNet, batch: tuple[Tensor, Tensor], half: bool = False) -> Tensor:
    with autocast(half):
        return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="sum")


def shape(half: bool, rows: int = ROWS) -> ModelQuery:
    return ModelQuery(rows, 1, compute_bytes=2 if half else 4)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_saved_activations_are_those_that_autograd_keeps(name: str, half: bool) -> None:
    config = CONFIGS[name]
    model, batch = create(config, 0), inputs(config)
    with saved_bytes([*model.parameters(), *batch]) as saved:
        total = loss(model, batch, half)
    assert total.requires_grad
    assert ledger(config, shape(half)).bytes("activation", "loss") == saved.total


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_those_of_pytorchs_counter(name: str, recompute: bool) -> None:
    config = CONFIGS[name]
    model, batch = create(config, 0), inputs(config)
    model.recompute = recompute
    with FlopCounterMode(display=False) as forward:
        total = loss(model, batch)
    with FlopCounterMode(display=False) as backward:
        total.backward()
    said = ledger(config, shape(False), recompute=recompute)
    assert said.flops("forward") == forward.get_total_flops()
    assert said.flops("backward") == backward.get_total_flops()


def test_of_large_tensors_a_policy_makes_small_ones_and_works_on_them_still() -> None:
    def large(rows: int, shares: Shares) -> dict[str, tuple[int, int]]:
        said = ledger(CONFIGS["plain"], shape(False, rows), shares=shares)
        kinds = ("activation", "workspace")
        return {
            kind: (
                sum(entry.large for entry in said.entries if entry.kind == kind),
                sum(entry.bytes for entry in said.entries if entry.kind == kind),
            )
            for kind in kinds
        }

    # What the first block makes: 64 KiB an image. Later blocks make smaller ones, and what these
    # leave free in the heap has a place for it, until none is small.
    assert large(511, Shares())["workspace"][0] == 0
    assert large(1024, Shares())["workspace"][0] == 0
    plain, less = large(2048, Shares()), large(2048, Shares(0.1, 0.03))
    assert plain["workspace"][0] == plain["workspace"][1]
    assert less["workspace"][0] == less["workspace"][1]
    assert 0 == less["activation"][0] < plain["activation"][0] < plain["activation"][1]


def test_what_later_blocks_work_in_is_small_where_their_tensors_are() -> None:
    def loss(config: str, rows: int) -> tuple[int, int, int | None]:
        entries = ledger(CONFIGS[config], shape(False, rows)).entries
        (found,) = (e for e in entries if (e.kind, e.phases) == ("workspace", ("loss",)))
        return found.bytes, found.large, found.rest

    # The last block makes 32 KiB an image, half of what the first one does.
    size, large, small = loss("plain", 512)
    assert (large, small) == (0, size)
    size, large, small = loss("plain", 1024)  # as large as those that are mapped, and fits the heap
    assert (large, small) == (0, size)
    size, large, small = loss("plain", 2048)
    assert 0.9 * size < large <= size
    assert small is not None
    assert small < 0.1 * size


def test_weights_and_batch_are_exact() -> None:
    config = CONFIGS["norms"]
    model, batch = create(config, 0), inputs(config)
    said = ledger(config, ModelQuery(ROWS, 1, micro_batches=3))
    assert said.bytes("weight") == tensor_bytes(list(model.parameters()))
    assert said.bytes("buffer") == 3 * tensor_bytes(list(batch))


def peak(model: ConvNet, batch: tuple[Tensor, Tensor], half: bool, context: Any = None) -> int:
    model.zero_grad()
    with TensorMeter("cpu") as meter:
        with context or nullcontext():
            total = loss(model, batch, half)
        total.backward()
    assert meter.peak is not None
    return meter.peak + tensor_bytes([*model.parameters(), *batch])


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_peak_is_near_the_meters(name: str, recompute: bool, half: bool) -> None:
    config = CONFIGS[name]
    model, batch = create(config, 0), inputs(config)
    model.recompute = recompute
    measured = peak(model, batch, half)
    said = ledger(config, shape(half), recompute=recompute).peak() + 4 * config.parameter_count()
    assert 0.9 * measured <= said <= 1.25 * measured


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "left"), [("plain", 0.5), ("norms", 0.8), ("tiny", 0.5)])
def test_a_policys_shares_are_what_the_ledger_needs(name: str, left: float, half: bool) -> None:
    config, rows = CONFIGS[name], 48
    model, batch = create(config, 0), inputs(config, rows)
    runtime = COMET().attach(model)
    measured = peak(model, batch, half, runtime.context())
    assert runtime.measured is not None
    said = ledger(config, shape(half, rows), shares=runtime.measured)
    with runtime.context():
        total = loss(model, batch, half)
    # The images are their owner's, and counted among what is held.
    images = 0 if half else batch[0].nbytes
    held = runtime.held_bytes - images - batch[1].nbytes
    assert said.bytes("activation", "loss") == pytest.approx(held, rel=0.01)
    del total
    grown = 4 * config.parameter_count()
    assert 0.9 * measured <= said.peak() + grown <= 1.15 * measured
    plain = ledger(config, shape(half, rows)).bytes("activation", "loss")
    assert said.bytes("activation", "loss") < left * plain


def test_no_policy_reaches_blocks_that_run_again() -> None:
    config, tight = CONFIGS["plain"], Shares(0.1, 0.03)
    plain = ledger(config, shape(False), recompute=True)
    assert ledger(config, shape(False), recompute=True, shares=tight).peak() == plain.peak()

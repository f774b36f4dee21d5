"""AdamW with 8-bit moments: the update, rows that are coded alike wherever they are, its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from layouts import CONFIG, LAYOUTS, strategy_of
from pool import Pool
from torch import Tensor, nn

from modicum.checkpoint import CheckpointStore
from modicum.core.contracts.ledger import OptimizerQuery, TrainedParameter
from modicum.core.contracts.parameters import optimizer_groups, trained_shapes
from modicum.core.contracts.state import StateRegistry, model_view, optimizer_view
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.machine.memory import TensorMeter, bytes_by_kind
from modicum.core.random import normal_
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import is_sharded, laid_like, own_part, whole
from modicum.models.llama import Llama
from modicum.optim import AdamW, AdamW8bit
from modicum.optim.coded_rows import CHUNK, decode, encode

SMALLEST = 8


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return normal_(torch.empty(shape), seed=seed, name="numbers")


def steps(optimizer: torch.optim.Optimizer, weight: nn.Parameter, first: int, last: int) -> None:
    for step in range(first, last):
        weight.grad = numbers(*weight.shape, seed=step).to(weight.dtype)
        optimizer.step()


@given(st.integers(1, 6), st.integers(1, 700), st.integers(0, 6), st.booleans())
def test_a_part_of_the_rows_has_the_same_codes(
    rows: int, width: int, start: int, signed: bool
) -> None:
    values = numbers(rows, width)
    values = values if signed else values.square()
    codes, scales = encode(values, signed=signed)
    part = slice(start, start + 2)
    found = encode(values[part], signed=signed)
    assert torch.equal(found[0], codes[part])
    assert torch.equal(found[1], scales[part])
    back = decode(codes, scales, signed=signed)
    apart = (back - values).abs().amax(dim=1)
    assert bool((apart <= 0.9 / 64 / 2 * values.abs().amax(dim=1) * 1.01).all())


@pytest.mark.parametrize("shape", [(6, 5), (7,)], ids=str)
def test_weights_in_fp64_are_not_rounded(shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(numbers(*shape).double() + 1e-12)
    optimizer, before = AdamW8bit([weight], lr=0.1, smallest=SMALLEST), weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(weight, before)


def test_a_second_moment_does_not_become_zero_by_rounding() -> None:
    moment = torch.tensor([[1.0, 1e-12, 0.0], [0.0, 0.0, 0.0]])
    back = decode(*encode(moment, signed=False), signed=False)
    assert bool((back[0] > 0).all())
    assert torch.equal(back[1], moment[1])


def test_moments_that_stay_in_fp32_make_it_adamw() -> None:
    ours, others = (nn.Parameter(numbers(40, 30)) for _ in range(2))
    fields: dict[str, Any] = {"betas": (0.8, 0.9), "epsilon": 1e-3, "weight_decay": 0.2}
    steps(AdamW8bit([ours], lr=0.1, smallest=10_000, **fields), ours, 0, 5)
    steps(AdamW([others], lr=0.1, **fields), others, 0, 5)
    torch.testing.assert_close(ours, others, rtol=1e-6, atol=1e-7)


def test_it_goes_where_adamw_goes() -> None:
    ours, others = (nn.Parameter(numbers(64, 300)) for _ in range(2))
    begun = ours.detach().clone()
    steps(AdamW8bit([ours], lr=0.01), ours, 0, 10)
    steps(AdamW([others], lr=0.01), others, 0, 10)
    assert (ours - others).norm() < 0.05 * (others - begun).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2048, 600), (3000, 40), (40, 3, 5, 5)])
def test_chunks_are_no_seams_and_bound_the_scratch_memory(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = nn.Parameter(numbers(*shape).to(dtype))
    top = nn.Parameter(weight.detach()[:9].clone())
    optimizer, small = AdamW8bit([weight], smallest=9), AdamW8bit([top], smallest=9)
    for step in range(2):
        weight.grad = numbers(*shape, seed=step).to(dtype)
        top.grad = weight.grad[:9].clone()
        small.step()
        with TensorMeter("cpu") as meter:
            optimizer.step()
    assert torch.equal(weight[:9], top)
    at = OptimizerQuery((TrainedParameter("w", shape, "matrix", dtype.itemsize),))
    said = AdamW8bit.value(smallest=9).ledger(at).bytes("workspace", "step")
    assert 0.85 * said < (meter.peak or 0) <= said + 4096
    assert said <= 8 * 4 * CHUNK


def test_any_layout_in_memory_is_updated() -> None:
    weight = nn.Parameter(numbers(8, 4, 3, 3).to(memory_format=torch.channels_last))
    other = nn.Parameter(weight.detach().contiguous())
    for one in (weight, other):
        steps(AdamW8bit([one], smallest=SMALLEST), one, 0, 3)
    assert torch.equal(weight, other)


class Training:
    """The decoder, the optimizer and a strategy; gradients are a function of step and name."""

    def __init__(self, ranks: Ranks, layout: str) -> None:
        self.strategy = strategy_of(ranks, layout)
        with on_meta():
            self.model = Llama(CONFIG)
        self.strategy.cut(self.model, self.model.model.layers, torch.device("cpu"))
        materialise(self.model, "cpu")
        self.model.initialise(0)
        self.strategy.start(self.model)
        groups = optimizer_groups(self.model, learning_rate=1e-2, weight_decay=0.1)
        self.optimizer = AdamW8bit.value(smallest=SMALLEST).bind(groups)
        self.registry = StateRegistry()
        self.registry.add_view(model_view(self.model))
        self.registry.add_view(optimizer_view(self.optimizer))

    def steps(self, first: int, last: int) -> None:
        self.strategy.rest(self.model)
        for step in range(first, last):
            for name, parameter in self.model.named_parameters():
                full = normal_(torch.empty(parameter.shape), seed=step, name=name)
                part, before = own_part(parameter)
                mine = full[before : before + len(part)]
                parameter.grad = laid_like(mine, parameter) if is_sharded(parameter) else mine
            self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {n: whole(p.detach()).clone() for n, p in self.model.named_parameters()}


def trained(ranks: Ranks, layout: str, folder: Path | None = None) -> Any:
    """Weights after six steps, and the bytes of the state; a checkpoint after three."""
    training = Training(ranks, layout)
    training.steps(0, 3)
    if folder is not None:
        CheckpointStore(folder, ranks=ranks).save(3, training.registry)
    training.steps(3, 6)
    return training.weights(), bytes_by_kind(training.model, training.optimizer)["optimizer"]


def resumed(ranks: Ranks, layout: str, folder: Path) -> Any:
    training = Training(ranks, layout)
    training.steps(20, 21)
    checkpoint = CheckpointStore(folder, ranks=ranks).newest()
    assert checkpoint is not None
    checkpoint.load(training.registry)
    training.steps(3, 6)
    return training.weights(), bytes_by_kind(training.model, training.optimizer)["optimizer"]


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2", "fsdp 3", "hybrid 4"])
def test_ranks_update_as_one_process_does_to_the_bit(pool: Pool, layout: str) -> None:
    weights, _ = trained(Ranks(), "alone")
    count, shards = LAYOUTS[layout]
    results = pool.run(trained, layout, ranks=count)
    for found, _ in results:
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    with on_meta():
        at = OptimizerQuery(trained_shapes(Llama(CONFIG)), shards=shards)
    said = AdamW8bit.value(smallest=SMALLEST).ledger(at).bytes("optimizer")
    assert said == max(kept for _, kept in results)


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize(
    ("before", "after"),
    [("alone", "fsdp 3"), ("fsdp 3", "alone"), ("fsdp 2", "fsdp 3"), ("fsdp 3", "hybrid 4")],
)
def test_a_run_resumes_on_another_layout_to_the_bit(
    pool: Pool, before: str, after: str, tmp_path: Path
) -> None:
    weights, _ = pool.run(trained, before, tmp_path, ranks=LAYOUTS[before][0])[0]
    for found, _ in pool.run(resumed, after, tmp_path, ranks=LAYOUTS[after][0]):
        assert all(torch.equal(found[name], weights[name]) for name in weights)

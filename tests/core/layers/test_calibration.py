"""Calibration against per-example gradients that autograd computes one by one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.calibration import Calibration, calibrate
from modicum.core.layers.statistics import fisher, token_fisher
from modicum.core.ranks.ranks import Ranks
from modicum.models import ModelConfig, create
from modicum.proofs.contracts.adapters.subjects import llama, tokens


class Sequences(nn.Module):
    """Layers over [B, T, ...] with what calibration must see through: dropout, in-place, reuse."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.bend = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.twice = nn.Linear(7, 7, bias=False)
        self.unused = nn.Linear(7, 3)
        self.last = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.bend(self.first(x)))
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(hidden))))
        self.unused(hidden)
        return self.last(hidden).mean(dim=1)


def model(seed: int = 0) -> Sequences:
    torch.manual_seed(seed)
    return Sequences()


def batch(rows: int = 6, positions: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, positions, 5, generator=generator)
    return x, torch.randn(rows, 2, generator=generator)


def loss(of: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return (of(given[0]) - given[1]).square().sum()


def one_by_one(of: nn.Module, batches: list[Any], layer: str) -> Tensor:
    """The mean over examples of squared gradients, summed over output features."""
    of.eval()
    weight = of.get_submodule(layer).get_parameter("weight")
    squares = torch.zeros(weight.shape, dtype=torch.float64)
    examples = 0
    for x, y in batches:
        for row in range(len(x)):
            (grad,) = torch.autograd.grad(loss(of, (x[row : row + 1], y[row : row + 1])), weight)
            squares += grad.double().square()
            examples += 1
    return squares.sum(dim=0) / examples


@pytest.mark.parametrize("positions", [1, 4, 40])
def test_fisher_is_the_square_of_each_examples_gradient(positions: int) -> None:
    of = model()
    batches = [batch(6, positions, 0), batch(3, positions, 1)]
    found = calibrate(of, batches, loss, layers=["first", "twice", "last"])
    assert found.examples == 9
    once = 9 * positions
    assert found.positions == {"first": once, "twice": 2 * once, "last": once}
    for layer in found.positions:
        expected = one_by_one(of, batches, layer)
        assert torch.allclose(found.mean("fisher", layer), expected, rtol=2e-5)


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))
def test_both_ways_to_the_square_are_one(rows: int, positions: int, ins: int, outs: int) -> None:
    generator = torch.Generator().manual_seed(rows + 10 * positions)
    x = torch.randn(rows, positions, ins, generator=generator, dtype=torch.float64)
    delta = torch.randn(rows, positions, outs, generator=generator, dtype=torch.float64)
    expected = torch.einsum("bto,bti->boi", delta, x).square().sum(dim=(0, 1))
    assert torch.allclose(fisher(x, delta), expected)
    each = torch.einsum("bto,bti->btoi", delta, x).square().sum(dim=(0, 1, 2))
    assert torch.allclose(token_fisher(x, delta), each)
    if positions == 1:
        assert torch.allclose(token_fisher(x, delta), expected)


def test_two_opposite_gradients_do_not_cancel() -> None:
    of = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(of.weight)
    x, y = torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([[1.0], [-1.0]])
    assert torch.autograd.grad(loss(of, (x, y)), of.weight)[0].abs().max() == 0
    found = calibrate(nn.Sequential(of), [(x, y)], loss)
    assert found.mean("fisher", "0").tolist() == [4.0, 16.0]


def test_moments_are_exact_whatever_the_batches_and_leave_padding_out() -> None:
    of = model().double()
    x, y = (tensor.double() for tensor in batch(8, 5))
    kept = torch.rand(8, 5, generator=torch.Generator().manual_seed(0)) > 0.3

    def seen(size: int) -> Calibration:
        parts = zip(x.split(size), y.split(size), kept.split(size), strict=True)
        return calibrate(
            of, list(parts), loss, layers=["first"], statistics=["moment"], mask=lambda b: b[2]
        )

    expected = x[kept].mT @ x[kept] / kept.sum()
    for size in (8, 3, 1):
        found = seen(size)
        assert found.positions["first"] == int(kept.sum())
        assert torch.allclose(found.mean("moment", "first"), expected, rtol=1e-12, atol=0)


def test_a_mask_of_other_positions_counts_a_layer_whole() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.pooled = nn.Linear(5, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.pooled(self.first(x).mean(dim=1))

    kept = torch.eye(6, 4) > 0
    found = calibrate(Pooled(), [batch()], loss, statistics=["moment"], mask=lambda _: kept)
    assert found.positions == {"first": 4, "pooled": 6}


def test_the_model_is_left_as_it_was() -> None:
    of = model().train()
    of.drop.eval()
    of.last.weight.requires_grad_(False)
    of.first.weight.grad = torch.ones_like(of.first.weight)
    before = {name: value.clone() for name, value in of.state_dict().items()}
    state = torch.get_rng_state()
    calibrate(of, [batch()], loss, layers=["first", "last"])
    assert torch.equal(torch.get_rng_state(), state)
    assert of.training
    assert of.first.training
    assert not of.drop.training
    assert all(torch.equal(before[name], value) for name, value in of.state_dict().items())
    grads = {name: p.grad for name, p in of.named_parameters() if p.grad is not None}
    assert grads.keys() == {"first.weight"}
    assert grads["first.weight"].unique().tolist() == [1.0]
    assert [n for n, p in of.named_parameters() if not p.requires_grad] == ["last.weight"]
    assert not any(module._forward_hooks for module in of.modules())


def test_it_is_left_as_it_was_by_a_loss_that_raises() -> None:
    of = model().train()

    def broken(of: nn.Module, given: Any) -> Tensor:
        of(given[0])
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        calibrate(of, [batch()], broken)
    assert all(module.training for module in of.modules())
    assert all(parameter.requires_grad for parameter in of.parameters())
    assert not any(module._forward_hooks for module in of.modules())


def test_dropout_is_off() -> None:
    one, other = (calibrate(model().train(), [batch()], loss, layers=["last"]) for _ in range(2))
    assert torch.equal(one.mean("fisher", "last"), other.mean("fisher", "last"))


def test_an_output_without_part_in_the_loss_has_no_gradient() -> None:
    found = calibrate(model(), [batch()], loss)
    assert found.mean("fisher", "unused").tolist() == [0.0] * 7
    assert found.mean("fisher", "last").min() > 0


def test_a_layer_of_which_one_use_matters_counts_that_use() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.layer(2 * x)
            return self.layer(x).mean(dim=1)

    of, given = Partly(), batch()
    found = calibrate(of, [given], loss).mean("fisher", "layer")
    assert torch.allclose(found, one_by_one(of, [given], "layer"), rtol=1e-5)


def test_positions_may_be_folded_into_rows() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x.flatten(0, 1)).view(*x.shape[:2], 2).mean(dim=1)

    of, given = Folded(), batch()
    found = calibrate(of, [given], loss).mean("fisher", "layer")
    assert torch.allclose(found, one_by_one(of, [given], "layer"), rtol=1e-5)


def test_recomputed_blocks_are_counted_once() -> None:
    of, ids = llama(), tokens()

    def next_token(of: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(of(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    plain = calibrate(of, [ids], next_token)
    of.recompute = True
    again = calibrate(of, [ids], next_token)
    assert plain.positions == again.positions
    for layer in plain.positions:
        assert torch.equal(plain.mean("fisher", layer), again.mean("fisher", layer)), layer


def test_low_precision_is_summed_wide() -> None:
    of = model().bfloat16()
    x, y = (tensor.bfloat16() for tensor in batch(64))
    found = calibrate(
        of, [(x, y)], loss, statistics=["fisher", "moment", "square"], layers=["first"]
    )
    wide = calibrate(of.float(), [(x.float(), y.float())], loss, layers=["first"])
    assert found.sums["moment", "first"].dtype == torch.float64
    exact = x.flatten(0, 1).double()
    assert torch.allclose(found.sums["moment", "first"], exact.mT @ exact, rtol=1e-12)
    square = found.sums["square", "first"]
    assert torch.allclose(square, exact.square().sum(0), rtol=1e-12)
    one, other = found.mean("fisher", "first"), wide.mean("fisher", "first")
    assert torch.allclose(one, other, rtol=0.02)


@dataclass
class Named:
    words: list[str]
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("kind", ["mapping", "dataclass"])
def test_batches_of_other_kinds(kind: str) -> None:
    x, y = batch()
    given: Any = {"x": x, "y": y} if kind == "mapping" else Named(["a"] * 6, x, y)

    def read(of: nn.Module, given: Any) -> Tensor:
        parts = (given["x"], given["y"]) if kind == "mapping" else (given.x, given.y)
        return loss(of, parts)

    found = calibrate(model(), [given], read, layers=["last"])
    assert found.examples == 6
    plain = calibrate(model(), [(x, y)], loss, layers=["last"])
    assert torch.equal(found.mean("fisher", "last"), plain.mean("fisher", "last"))


def test_a_limit_and_progress() -> None:
    told: list[tuple[int, int | None]] = []
    batches = [batch(4, seed=seed) for seed in range(5)]
    found = calibrate(
        model(), batches, loss, limit=9, progress=lambda done, total: told.append((done, total))
    )
    assert found.examples == 12
    assert told == [(1, 5), (2, 5), (3, 5)]
    assert calibrate(model(), iter(batches), loss).examples == 20


def test_empty_batches_add_nothing() -> None:
    x, y = batch()
    found = calibrate(model(), [(x[:0], y[:0]), (x, y)], loss, layers=["last"])
    assert found.examples == 6


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"statistics": ["fischer"]}, "Did you mean 'fisher'"),
        ({"batches": [{"words": "none"}]}, "no tensor"),
        ({"batches": []}, r"no example reached this layer.*first"),
        ({"loss": lambda of, given: torch.ones(())}, "the loss has no gradient"),
        ({"batches": [(torch.full((2, 3, 5), float("inf")), torch.ones(2, 2))]}, "is not finite"),
    ],
)
def test_what_cannot_be_calibrated_says_why(fields: dict[str, Any], problem: str) -> None:
    given: dict[str, Any] = {"batches": [batch()], "loss": loss} | fields
    with pytest.raises(InputError, match=problem):
        calibrate(model(), given.pop("batches"), given.pop("loss"), **given)


def test_rows_that_belong_to_no_example_are_refused() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(0, 1)[:-1]).sum()

    with pytest.raises(InputError, match=r"layer sees 23 rows in a batch of 6"):
        calibrate(Uneven(), [batch()], lambda of, given: of(given[0]))


def test_a_calibration_travels_through_a_file(tmp_path: Path) -> None:
    found = calibrate(model(), [batch()], loss, statistics=["fisher", "moment"])
    file = found.save(tmp_path / "deep" / "file.safetensors")
    again = Calibration.load(file)
    assert (again.examples, again.positions) == (found.examples, found.positions)
    assert again.sums.keys() == found.sums.keys()
    assert all(torch.equal(again.sums[key], value) for key, value in found.sums.items())
    with pytest.raises(InputError, match="no such file"):
        Calibration.load(tmp_path / "other")
    file.write_bytes(b"nothing")
    with pytest.raises(InputError, match="holds no calibration"):
        Calibration.load(file)
    with pytest.raises(InputError, match=r"did not note the moment .*Did you mean 'first'"):
        found.mean("moment", "frist")


def test_a_cache_knows_model_data_and_settings(tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(of: nn.Module, given: Any) -> Tensor:
        calls.append(1)
        return loss(of, given)

    def found(of: nn.Module, batches: Any, **fields: Any) -> tuple[Tensor, int]:
        calls.clear()
        got = calibrate(of, batches, counted, cache=tmp_path, layers=["first", "last"], **fields)
        return got.mean("fisher", "first"), len(calls)

    first, passes = found(model(), [batch()])
    assert passes == 1
    again, passes = found(model(), [batch()])
    assert passes == 0
    assert torch.equal(first, again)
    assert found(model(seed=1), [batch()])[1] == 1
    assert found(model(), [batch(seed=1)])[1] == 1
    assert found(model(), [batch()], limit=3)[1] == 1
    assert found(model(), [batch()], statistics=["fisher", "moment"])[1] == 1
    with pytest.raises(InputError, match="give a list"):
        found(model(), iter([batch()]))


def test_a_cache_knows_the_mask_by_its_values(tmp_path: Path) -> None:
    every, half = torch.ones(6, 4) > 0, torch.arange(4).expand(6, 4) < 2
    for kept, count in ((every, 24), (half, 12), (every, 24)):
        found = calibrate(
            model(),
            [batch()],
            loss,
            layers=["first"],
            statistics=["moment"],
            mask=lambda _, kept=kept: kept,
            cache=tmp_path,
        )
        assert found.positions == {"first": count}


def test_a_cache_knows_a_partial_by_what_it_binds(tmp_path: Path) -> None:
    def scaled(of: nn.Module, given: Any, by: float) -> Tensor:
        return by * loss(of, given)

    def found(by: float) -> Tensor:
        named = partial(scaled, by=by)
        known = calibrate(model(), [batch()], named, layers=["last"], cache=tmp_path)
        return known.mean("fisher", "last")

    assert torch.allclose(found(2.0), 4 * found(1.0))


@pytest.mark.parametrize("kind", ["tensor", "module"])
def test_a_cache_knows_tensors_and_modules_that_a_partial_binds(tmp_path: Path, kind: str) -> None:
    def scaled(of: nn.Module, given: Any, by: Any) -> Tensor:
        return (by if kind == "tensor" else by.weight).sum() * loss(of, given)

    def found(value: float) -> Tensor:
        layer = nn.Linear(2000, 1, bias=False).requires_grad_(False)
        layer.weight.zero_()[0, 1000] = value  # which the text of a tensor leaves out
        named = partial(scaled, by=layer.weight if kind == "tensor" else layer)
        known = calibrate(model(), [batch()], named, layers=["last"], cache=tmp_path)
        return known.mean("fisher", "last")

    assert torch.allclose(found(2.0), 4 * found(1.0))


def test_products_are_wide_within_the_callers_autocast() -> None:
    x, y = batch()
    of = nn.Sequential(nn.Linear(5, 2))

    def exact(of: nn.Module, given: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return loss(of, given)

    expected = calibrate(of, [(x[:, 0], y)], exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = calibrate(of, [(x[:, 0], y)], exact)
    assert torch.equal(found.mean("fisher", "0"), expected.mean("fisher", "0"))


def share(ranks: Ranks, cache: Path | None = None) -> tuple[Calibration, int]:
    of = create(ModelConfig(vocabulary_size=13, width=12, layers=2, heads=2), seed=0)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(13, (3, 9), generator=generator) for _ in range(6)]
    calls: list[int] = []

    def next_token(of: nn.Module, ids: Tensor) -> Tensor:
        calls.append(1)
        return F.cross_entropy(of(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    mine = batches[ranks.rank :: ranks.size]
    kinds = ["fisher", "moment"]
    found = calibrate(of, mine, next_token, statistics=kinds, ranks=ranks, cache=cache)
    return found, len(calls)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_find_what_one_does(pool: Pool, ranks: int, tmp_path: Path) -> None:
    alone, _ = share(Ranks())
    together = pool.run(share, tmp_path, ranks=ranks)
    for found, passes in together:
        assert passes in (1, 2, 3)
        assert (found.examples, found.positions) == (alone.examples, alone.positions)
        for key, value in alone.sums.items():
            assert torch.allclose(found.sums[key], value, rtol=1e-13, atol=1e-18)
            assert torch.equal(found.sums[key], together[0][0].sums[key])
    kept = pool.run(share, tmp_path, ranks=ranks)
    assert [passes for _, passes in kept] == [0] * ranks
    for found, _ in kept:
        for key, value in found.sums.items():
            assert torch.equal(value, together[0][0].sums[key])

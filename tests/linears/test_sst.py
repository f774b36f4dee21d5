"""SST layers: gradients of directions, lengths, swaps and rounds, draws, ranks, interruptions."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from layouts import CONFIG, strategy_of
from pool import Pool
from torch import Tensor, nn

from modicum.core.contracts.parameters import metadata, optimizer_groups
from modicum.core.contracts.run_hooks import members_of
from modicum.core.contracts.state import optimizer_state, trained_state
from modicum.core.contracts.traits import TraitHolder, clashes
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.linears import SST, SSTLinear
from modicum.linears.sst import drawn
from modicum.models.llama import Llama
from modicum.optim import AdamW, GaLore
from modicum.optim.backward import step_in_backward
from modicum.proofs.contracts.optim.subjects import loss, tokens

ACTIVE, VALUES = ("left", "right"), ("resting_left", "resting_right")


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def made(outs: int, ins: int, rank: int, seed: int = 0) -> SSTLinear:
    layer = SSTLinear.from_dense(normal(outs, ins, seed=seed), None, rank=rank)
    assert isinstance(layer, SSTLinear)
    return layer


class Training:
    """One layer in training, on squares of its outputs."""

    def __init__(self, method: SST, outs: int = 7, ins: int = 10) -> None:
        self.layer = made(outs, ins, method.rank).float()
        self.model = nn.Sequential(self.layer)
        groups = optimizer_groups(self.model, learning_rate=1e-2, weight_decay=0.1)
        self.optimizer = AdamW.value().bind(groups)
        self.rounds = method.run_hook(self.model)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.rounds.before_update(step)
            self.update(step)
            self.rounds.after_optimizer(step, self.optimizer)
            self.optimizer.zero_grad()

    def update(self, step: int) -> None:
        x = normal(16, self.layer.in_features, seed=step).float()
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def moments(self, leaf: str) -> dict[str, Tensor]:
        state = self.optimizer.state.get(getattr(self.layer, leaf), {})
        return {name: value.clone() for name, value in state.items()}


def products(vectors: Tensor) -> Tensor:
    return vectors @ vectors.T - torch.eye(len(vectors), dtype=vectors.dtype)


@pytest.mark.parametrize("shape", [(7, 5), (5, 9), (33, 129)])
def test_it_is_the_svd_of_the_weight(shape: tuple[int, int]) -> None:
    weight, layer = normal(*shape), made(*shape, rank=3)
    assert (layer.to_dense() - weight).norm() < 1e-12 * weight.norm()
    for side in ("left", "right"):
        vectors = torch.cat([getattr(layer, side), getattr(layer, f"resting_{side}")])
        assert products(vectors.detach()).abs().max() < 1e-12
    assert torch.allclose(layer.sigma, torch.linalg.svdvals(weight))


@pytest.mark.parametrize("rank", [3, 7])
def test_vectors_get_the_gradients_of_their_directions(rank: int) -> None:
    layer, x, out = made(7, 10, rank), normal(4, 10, seed=1), normal(4, 7, seed=2)
    with torch.no_grad():
        layer.sigma[1] = 0.0
    dense = out.T @ x  # dL/dW
    x.requires_grad_()
    layer(x).backward(out)
    left, right = layer.left.detach(), layer.right.detach()
    assert layer.left.grad is not None
    assert layer.right.grad is not None
    assert torch.allclose(layer.left.grad, right @ dense.T, atol=1e-12)
    assert torch.allclose(layer.right.grad, left @ dense, atol=1e-12)
    assert layer.left.grad[1].norm() > 0.1, "a dead direction has no gradient"
    full = torch.cat([left, layer.resting_left]), torch.cat([right, layer.resting_right])
    assert layer.sigma.grad is not None
    assert torch.allclose(layer.sigma.grad, ((full[0] @ dense) * full[1]).sum(1), atol=1e-12)
    assert x.grad is not None
    assert torch.allclose(x.grad, out @ layer.to_dense(), atol=1e-12)
    # Autograd's own, over sigma, where that is not zero.
    plain = torch.autograd.grad(layer.to_dense(), layer.left, dense)[0]
    alive = [row for row in range(rank) if row != 1]
    expected = plain[alive] / layer.sigma.detach()[alive, None]
    assert torch.allclose(layer.left.grad[alive], expected, atol=1e-10)


def test_lengths_and_signs_hold_and_resting_vectors_stay_between_swaps() -> None:
    training = Training(SST(rank=2, interval=50))
    layer = training.layer
    with torch.no_grad():
        layer.sigma[-1] = 1e-4
    before = {name: getattr(layer, name).clone() for name in VALUES}
    lowest = 1.0
    for step in range(1, 9):
        training.steps(step, step)
        lowest = min(lowest, layer.sigma.min().item())
        for leaf in ACTIVE:
            assert (getattr(layer, leaf).norm(dim=1) - 1).abs().max() < 1e-6
    assert lowest == 0.0
    assert all(torch.equal(getattr(layer, name), before[name]) for name in VALUES)
    moments = sum(
        value.numel()
        for state in training.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    )
    assert moments == 2 * (2 * (7 + 10) + 7)
    assert {metadata(p).weight_decay_multiplier for p in layer.parameters()} == {0.0}


def test_lengths_hold_where_updates_are_made_in_the_backward_pass() -> None:
    training, plain = Training(SST(rank=2, interval=50)), Training(SST(rank=2, interval=50))
    stop = step_in_backward(training.optimizer)
    for step in range(1, 4):
        x = normal(16, 10, seed=step).float()
        training.model(x).square().mean().backward()
        plain.steps(step, step)
    stop()
    for leaf in ACTIVE:
        assert (getattr(training.layer, leaf).norm(dim=1) - 1).abs().max() < 1e-6
    assert torch.equal(training.layer.to_dense(), plain.layer.to_dense())


def test_a_swap_moves_vectors_values_and_state() -> None:
    training = Training(SST(rank=3, interval=4, seed=1))
    training.steps(1, 3)
    training.update(4)
    layer = training.layer
    weight = layer.to_dense().detach()
    old = {leaf: training.moments(leaf) for leaf in (*ACTIVE, "sigma")}
    vectors = torch.cat([layer.left, layer.resting_left]).detach()
    values = layer.sigma.detach().clone()
    training.rounds.after_optimizer(4, training.optimizer)
    assert torch.allclose(layer.to_dense(), weight, atol=1e-6)
    now = torch.cat([layer.left, layer.resting_left]).detach()
    order = [int((vectors == row).all(1).nonzero()) for row in now]
    assert sorted(order) == list(range(7)), "vectors are others, and not moved"
    assert order != list(range(7)), "nothing was swapped"
    assert torch.equal(layer.sigma, values[order])
    new = 0
    for leaf in ACTIVE:
        for name in ("exp_avg", "exp_avg_sq"):
            for row, source in enumerate(order[:3]):
                kept = old[leaf][name][row] if source == row else torch.zeros(1)
                new += source != row
                assert (training.moments(leaf)[name][row] == kept).all()
    assert new
    assert torch.equal(training.moments("sigma")["exp_avg"], old["sigma"]["exp_avg"][order])


def test_a_round_ends_with_orthogonal_vectors_and_no_state() -> None:
    training = Training(SST(rank=3, interval=2))  # 7 values: a round has three swaps
    training.steps(1, 5)
    training.update(6)
    layer = training.layer
    weight = layer.to_dense().detach()
    full = torch.cat([layer.left, layer.resting_left]).detach()
    assert products(full).abs().max() > 1e-3, "vectors were orthogonal still"
    training.rounds.after_optimizer(6, training.optimizer)
    full = torch.cat([layer.left, layer.resting_left]).detach()
    assert products(full).abs().max() < 1e-5
    assert torch.allclose(layer.to_dense(), weight, atol=1e-5)
    assert not any(training.moments(leaf) for leaf in (*ACTIVE, "sigma"))
    training.optimizer.zero_grad()
    training.steps(7, 12)
    assert layer.to_dense().isfinite().all()


def test_what_changes_has_a_higher_rank_than_what_trains() -> None:
    training = Training(SST(rank=2, interval=3), 12, 12)
    before = training.layer.to_dense().detach()
    training.layer.sigma.requires_grad_(False)
    training.steps(1, 2)
    early = torch.linalg.svdvals(training.layer.to_dense().detach() - before)
    training.steps(3, 36)
    late = torch.linalg.svdvals(training.layer.to_dense().detach() - before)
    assert int((early > 1e-4).sum()) <= 4, "two vectors on each side change at most rank four"
    assert int((late > 1e-4).sum()) > 8


def test_draws_are_of_seed_step_and_layer_and_as_likely_as_values() -> None:
    values = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.0, 1.0])

    def draw(seed: int = 0, name: str = "a", step: int = 200) -> list[int]:
        return drawn(values.repeat(8), 12, seed=seed, name=name, step=step)

    assert draw() == draw()
    assert len({tuple(each) for each in (draw(), draw(1), draw(name="b"), draw(step=400))}) == 4
    # Of one draw the chances are the values' shares; of two, as without replacement.
    each = [drawn(values, 2, seed=0, name="a", step=step) for step in range(2000)]
    shares = values / 16
    for place in range(6):
        chance = shares[place].item()
        other = sum(
            shares[first].item() * chance / (1 - shares[first].item())
            for first in range(6)
            if first != place
        )
        found = sum(place in pair for pair in each) / len(each)
        expected = chance + other
        assert abs(found - expected) < 4 * math.sqrt(0.25 / len(each)), place
    assert len(set(drawn(torch.zeros(5), 3, seed=0, name="a", step=1))) == 3


def test_interrupted_next_to_a_swap_or_a_round_it_ends_in_the_same_bits() -> None:
    method = SST(rank=3, interval=2)
    straight = Training(method)
    straight.steps(1, 9)
    for stop in (1, 2, 5, 6):  # before and after a swap, before and after the end of a round
        begun, again = Training(method), Training(method)
        begun.steps(1, stop)
        saved = {
            kind: {k: copy.deepcopy(v) for k, v in read().items()}
            for kind, (read, _) in _views(begun).items()
        }
        for kind, (_, write) in _views(again).items():
            write(saved[kind])
        again.steps(stop + 1, 9)
        for name, value in straight.model.state_dict().items():
            assert torch.equal(value, again.model.state_dict()[name]), f"{name}, stopped at {stop}"


def _views(training: Training) -> dict[str, Any]:
    return {
        "model": trained_state(training.model),
        "optimizer": optimizer_state(training.optimizer),
    }


def sharded(ranks: Ranks, layout: str, kind: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Losses of seven updates of a decoder, two swaps and ends of rounds among them."""
    method, strategy = SST(rank=3, interval=2), strategy_of(ranks, layout)
    with on_meta():
        model = Llama(replace(CONFIG, forms=method.plan(Llama(CONFIG))))
    strategy.cut(model, model.blocks, torch.device("cpu"))
    materialise(model, "cpu")
    model.initialise(0)
    strategy.start(model)
    groups = optimizer_groups(
        model, learning_rate=1e-2, weight_decay=0.1, trained=dict(strategy.trained(model))
    )
    optimizer = kind.value(**fields).bind(groups)
    rounds, losses = method.run_hook(model), []
    for step in range(1, 8):
        rounds.before_update(step)
        mine = tokens(4, seed=step)[ranks.rank :: ranks.size]
        strategy.before_backward(last=True)
        found = loss(model, mine) / ranks.size
        found.backward()
        strategy.after_backward()
        strategy.update(optimizer)
        rounds.after_optimizer(step, optimizer)
        if rounds.writes_weights:
            strategy.updated()
        optimizer.zero_grad()
        losses.append(ranks.sum(found.item())[0])
    strategy.rest(model)
    left = model.get_submodule("model.layers.0.mlp.up_proj").get_parameter("left")
    return {"losses": losses, "lengths": whole(left.detach()).norm(dim=1)}


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2", "zero 2"])
@pytest.mark.parametrize("kind", [AdamW, GaLore])
def test_ranks_train_as_one_process(pool: Pool, layout: str, kind: Any) -> None:
    fields = {"epsilon": 1e-3} | ({} if kind is AdamW else {"rank": 2, "update_gap": 3})
    alone = sharded(Ranks(), "alone", kind, fields)
    assert len({round(each, 4) for each in alone["losses"]}) == 7
    for found in pool.run(sharded, layout, kind, fields, ranks=2):
        for one, other in zip(found["losses"], alone["losses"], strict=True):
            assert abs(one - other) < 1e-5 * other, (found["losses"], alone["losses"])
        assert (found["lengths"] - 1).abs().max() < 1e-6


def test_what_it_does_not_combine_with_is_said() -> None:
    method = SST.tiny()
    own = TraitHolder("linear", method.traits, excludes=method.info.excludes)
    for trait, why in (
        ("adapts_base", "a form to be trained in"),
        ("needs_no_gradients", "length 1"),
    ):
        (clash,) = clashes([own, TraitHolder("other", frozenset({trait}))])
        assert why in clash.why
    assert members_of(method.run_hook(nn.Linear(2, 2))) == ("before_update", "after_optimizer")

"""Maestro: prefixes, the suffix penalty, what an update draws, pruning, and smaller layers."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.linears import LowRank, Maestro, OrderedLinear, OrderedSteps


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def made(outs: int = 5, ins: int = 7, bias: bool = True) -> OrderedLinear:
    offset = normal(1, outs, seed=9)[0] if bias else None
    return OrderedLinear.from_dense(normal(outs, ins), offset, rank=min(outs, ins))


def model_of(**fields: Any) -> tuple[nn.Sequential, OrderedSteps]:
    """Three layers of different ranks, in float32, and their part in updates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 9))
    value = Maestro(**fields)
    value.convert(model)
    return model, value.steps(model)


def layer_of(model: nn.Module, name: str) -> OrderedLinear:
    layer = model.get_submodule(name)
    assert isinstance(layer, OrderedLinear)
    return layer


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (6, 6)])
def test_at_full_width_it_is_the_dense_layer(shape: tuple[int, int]) -> None:
    layer, x = made(*shape), normal(3, shape[1], seed=1)
    assert torch.allclose(layer(x), F.linear(x, normal(*shape), layer.bias), atol=1e-12)
    layer.width = layer.rank
    assert torch.equal(layer(x), layer.eval()(x))
    sides = layer.down.norm(dim=1), layer.up.norm(dim=1)
    assert torch.allclose(*sides), "the root of S is on both sides"


def test_a_prefix_is_the_masked_product_and_is_for_training_alone() -> None:
    layer, x = made(), normal(3, 7, seed=1)
    full = layer(x)
    for width in range(1, layer.rank + 1):
        layer.width = width
        mask = (torch.arange(layer.rank) < width).double()
        expected = F.linear(x @ layer.down.mT * mask, layer.up.mT, layer.bias)
        assert torch.allclose(layer(x), expected, atol=1e-12)
        assert torch.equal(layer.eval()(x), full)
        layer.train()


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)])
def test_without_components_it_is_the_bias(shape: tuple[int, ...]) -> None:
    for bias in (True, False):
        layer = made(bias=bias)
        layer.kept = 0
        x = torch.ones(*shape, 7, dtype=torch.float64, requires_grad=True)
        out = layer(x)
        offset = torch.zeros(5).double() if layer.bias is None else layer.bias
        assert torch.equal(out, offset.expand(*shape, 5))
        out.sum().backward()
        assert x.grad is not None
        assert not x.grad.any()
        assert layer.down.grad is not None
        assert not layer.down.grad.any()
        assert not layer.to_dense().any()


def test_the_penalty_is_the_double_loop_and_finite_at_zero() -> None:
    model, steps = model_of(penalty=0.3)
    with torch.no_grad():
        layer_of(model, "2").down[2:] = 0
        layer_of(model, "4").up.zero_()
    leaves = {name: p.detach().double().requires_grad_() for name, p in steps.parameters.items()}
    looped = torch.zeros((), dtype=torch.float64)
    for factor in leaves.values():
        for first in range(len(factor)):
            square = torch.zeros((), dtype=torch.float64)
            for row in range(first, len(factor)):
                square = square + factor[row].square().sum()
            looped = looped + (square + 1e-12).sqrt()
    (0.3 * looped).backward()
    value, gradients = steps.term()
    assert value == pytest.approx(0.3 * looped.item(), rel=1e-12)
    for name, found in gradients:
        expected = leaves[name].grad
        assert expected is not None
        assert expected.isfinite().all()
        assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-9)


def test_each_width_of_each_layer_comes_once_a_cycle() -> None:
    _, steps = model_of()
    sizes = {"0": 6, "2": 4, "4": 4}
    every = {(name, width) for name, size in sizes.items() for width in range(1, size + 1)}
    for cycle in range(3):
        drawn = Counter(steps.drawn(14 * cycle + place + 1) for place in range(14))
        assert drawn.keys() == every
        assert set(drawn.values()) == {1}
    orders = [[steps.drawn(14 * cycle + place) for place in range(1, 15)] for cycle in range(2)]
    assert orders[0] != orders[1]
    steps.before_update(5)
    narrow = {name: layer.width for name, layer in steps.layers.items() if layer.width is not None}
    assert list(narrow.items()) == [steps.drawn(5)]
    with steps.forward_context("rehearse"):
        assert all(layer.width is None for layer in steps.layers.values())
    assert steps.layers[next(iter(narrow))].width == next(iter(narrow.values()))
    steps.close()
    assert all(layer.width is None for layer in steps.layers.values())


def trained(optimizer: str, updates: int = 12, **fields: Any) -> tuple[Any, Any, Any]:
    """A model after some updates, some of its components pruned, and what trains it."""
    fields = {"penalty": 0.05, "threshold": 0.4, "every": 6} | fields
    model, steps = model_of(**fields)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    learn(model, steps, made, updates)
    return model, steps, made


def learn(model: nn.Module, steps: OrderedSteps, optimizer: Any, updates: int) -> None:
    x = normal(16, 7, seed=3).float()
    for _ in range(updates):
        (model(x) - x[:, :1]).square().mean().backward()
        steps.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.update()


def test_importance_never_grows_and_pruned_is_a_suffix_that_stays_zero() -> None:
    model, steps, _ = trained("AdamW")
    ranks = {name: layer.kept for name, layer in steps.layers.items()}
    assert any(kept < steps.layers[name].rank for name, kept in ranks.items())
    for name, each in steps.importance().items():
        assert (each.diff() <= 0).all()
        layer = layer_of(model, name)
        assert not layer.down[layer.kept :].any()
        assert not layer.up[layer.kept :].any()
        assert layer.down[: layer.kept].abs().sum(1).all()


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_smaller_layers_compute_and_learn_the_same_to_the_bit(optimizer: str) -> None:
    model, steps, made = trained(optimizer, updates=13)
    twin = copy.deepcopy((model, steps, made))
    x = normal(5, 7, seed=4).float()
    masked = model.eval()(x)
    before = sum(parameter.numel() for parameter in model.parameters())
    steps.shrink(made)
    assert sum(parameter.numel() for parameter in model.parameters()) < before
    assert torch.equal(model(x), masked)
    learned = [(model.train(), steps, made), (twin[0].train(), *twin[1:])]
    for one in learned:
        learn(*one, updates=4)
    assert torch.equal(model.eval()(x), twin[0].eval()(x))
    states = {len(value) for value in made.state.values()}
    assert states == ({3} if optimizer == "AdamW" else set() if not made.state else states)
    assert all(parameter in made.state for parameter in steps.parameters.values()) or not made.state


def test_a_layer_that_lost_all_is_one_component_of_zeros() -> None:
    model, steps, made = trained("AdamW", updates=6, threshold=1e3)
    steps.shrink(made)
    for name in ("0", "2", "4"):
        layer = layer_of(model, name)
        assert (layer.kept, layer.rank) == (0, 1)
    learn(model, steps, made, 3)
    x = normal(5, 7).float()
    bias = layer_of(model, "4").bias
    assert bias is not None
    assert torch.equal(model.eval()(x), bias.expand(5, 9))
    assert not layer_of(model, "0").down.any()
    assert not layer_of(model, "0").to_dense().any()


def test_state_in_other_shapes_is_refused_and_nothing_is_changed() -> None:
    model, steps, made = trained("AdamW")
    parameter = layer_of(model, "0").down
    made.state[parameter]["rows"] = torch.ones(3)
    with pytest.raises(InputError, match="in another shape"):
        steps.shrink(made)
    assert layer_of(model, "0").down is parameter


def test_a_share_of_the_work_is_kept_by_gain() -> None:
    _, steps = model_of()
    dense = 7 * 6 + 6 * 4 + 4 * 9
    last = 0
    for share in (0.0, 0.2, 0.5, 3.0):
        steps.keep_share(share)
        work = sum(
            layer.kept * (layer.in_features + layer.out_features) for layer in steps.layers.values()
        )
        assert last <= work <= share * dense
        last = work
    assert all(layer.kept == layer.rank for layer in steps.layers.values())
    with pytest.raises(InputError, match="0 or more"):
        steps.keep_share(-0.1)


def test_its_state_resumes_to_the_bit() -> None:
    model, steps, made = trained("AdamW", updates=9)
    other, again = model_of(penalty=0.05, threshold=0.4, every=6)
    other.load_state_dict(model.state_dict())
    twin = torch.optim.AdamW(other.parameters(), lr=0.01)
    twin.load_state_dict(copy.deepcopy(made.state_dict()))
    again.load_state_dict(steps.state_dict())
    learn(model, steps, made, 9)
    learn(other, again, twin, 9)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    with pytest.raises(InputError, match="another number"):
        again.load_state_dict({"updates": 1, "kept": torch.tensor([1])})


def test_under_transformers_it_draws_and_prunes() -> None:
    from modicum.proofs.contracts.linears.subjects import tokens
    from modicum.proofs.contracts.transformers_loop import (
        hugging_face_llama,
        train_under_transformers,
    )

    model = hugging_face_llama(tie_word_embeddings=False)
    value = Maestro(penalty=0.05, threshold=0.5, every=2)
    value.convert(model)
    steps = value.steps(model)
    train_under_transformers(
        model, tokens(8), max_steps=4, learning_rate=1e-2, callback=steps.callback()
    )
    assert steps.updates == 4
    assert any(layer.kept < layer.rank for layer in steps.layers.values())
    steps.shrink()
    assert all(layer.rank == max(layer.kept, 1) for layer in steps.layers.values())


def test_plain_factors_are_a_low_rank_layer() -> None:
    layer, x = made(), normal(3, 7, seed=2)
    twin = LowRank.layer.from_dense(normal(5, 7), layer.bias, rank=5)
    assert torch.allclose(layer(x), twin(x), atol=1e-12)

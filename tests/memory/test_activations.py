"""A policy at work: what it measures, what it stores, how it resumes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from modicum.core.contracts.method import Context
from modicum.core.contracts.scaled_losses import refuse_scaled_losses
from modicum.core.errors import InputError
from modicum.core.random import normal_
from modicum.memory import COMET, ActivationContext, Activations
from modicum.models.convnet import ConvNet, ConvNetConfig, create
from modicum.optim import GaLore

CONFIG = ConvNetConfig(classes=5, size=16, widths=(8, 8, 12, 12))


def batch(step: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    images = normal_(torch.empty(rows, 3, 16, 16), seed=0, name="images", step=step)
    return images, (images.mean((1, 2, 3)) * 40).long() % 5


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if kind == "plain":
        return torch.optim.SGD(model.parameters(), lr=0.02)
    if kind == "galore":  # whose betas are in its value
        return GaLore(model.parameters(), lr=2e-3, rank=2, betas=(0.8, 0.9))
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def train(
    model: ConvNet, optimizer: torch.optim.Optimizer, runtime: Activations, steps: range
) -> list[float]:
    losses = []
    for step in steps:
        runtime.before_update()
        images, labels = batch(step)
        for part in range(2):  # two micro-batches
            with runtime.context():
                logits = model(images[3 * part : 3 * part + 3])
                loss = F.cross_entropy(logits, labels[3 * part :][:3], reduction="sum") / 6
            loss.backward()
        runtime.observe(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        runtime.after_step(step + 1)
        losses.append(loss.item())
    return losses


def test_statistics_are_those_of_the_whole_update() -> None:
    model = create(CONFIG, 0)
    optimizer = optimizer_of(model, "sgd")
    runtime = COMET(warmup=2, every=7).attach(model)
    train(model, optimizer, runtime, range(1))
    assert [layer.bound for layer in runtime.layers] == [0.0] * 4
    seen: dict[str, Any] = {}
    # As it is when it is observed: before the step of the update.
    momenta = {
        layer.name: float(optimizer.state[layer.module.weight]["momentum_buffer"].abs().mean())
        for layer in runtime.layers
    }

    def keep(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.setdefault(name, []).append((inputs[0].detach(), output))
        output.retain_grad()

    hooks = [
        layer.module.register_forward_hook(lambda m, i, o, n=layer.name: keep(n, m, i, o))
        for layer in runtime.layers
    ]
    train(model, optimizer, runtime, range(1, 2))
    for hook in hooks:
        hook.remove()
    assert runtime.layers[0].seen is None  # what it reads is the batch
    for layer in runtime.layers[1:]:
        inputs = torch.cat([x for x, _ in seen[layer.name]])
        squares = sum(y.grad.square().sum((0, 2, 3)) for _, y in seen[layer.name])
        assert layer.seen is not None
        found = layer.seen
        channels = sorted(squares.tolist())
        middle = (channels[len(channels) // 2] + channels[len(channels) // 2 - 1]) / 2
        assert found.gradient == pytest.approx(middle**0.5, rel=1e-5)
        assert found.nonzero == pytest.approx(float((inputs != 0).float().mean()))
        assert found.largest == float(inputs.abs().max())
        assert found.momentum == pytest.approx(momenta[layer.name])
        assert layer.bound == runtime.policy.next_bound(found)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "galore", "plain"])
def test_momentum_is_read_in_the_unit_of_gradients(kind: str) -> None:
    model = create(CONFIG, 0)
    optimizer = optimizer_of(model, kind)
    runtime = COMET(warmup=3, every=100).attach(model)
    train(model, optimizer, runtime, range(2))
    images, labels = batch(2)
    with runtime.context():
        loss = F.cross_entropy(model(images), labels, reduction="sum") / 6
    loss.backward()
    weight = runtime.layers[2].module.weight
    expected = (
        {
            "sgd": lambda: optimizer.state[weight]["momentum_buffer"],
            "adamw": lambda: optimizer.state[weight]["exp_avg"] / (1 - 0.9),
            "galore": lambda: optimizer.state[weight]["exp_avg"] / (1 - 0.8),
            "plain": lambda: weight.grad,
        }[kind]()
        .abs()
        .mean()
    )
    runtime.observe(optimizer)
    runtime.after_step()
    seen = runtime.layers[2].seen
    assert seen is not None
    assert seen.momentum == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_run_that_goes_on_is_the_one_that_did_not_stop(kind: str) -> None:
    def begin() -> tuple[ConvNet, torch.optim.Optimizer, Activations]:
        model = create(CONFIG, 0)
        return model, optimizer_of(model, kind), COMET(warmup=2, every=3).attach(model)

    model, optimizer, runtime = begin()
    whole = train(model, optimizer, runtime, range(9))
    model, optimizer, runtime = begin()
    first = train(model, optimizer, runtime, range(4))
    weights, moments, kept = model.state_dict(), optimizer.state_dict(), runtime.state_dict()
    model, optimizer, runtime = begin()
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    runtime.load_state_dict(kept)
    assert [layer.bound for layer in runtime.layers] == list(kept["bounds"].values())
    assert first + train(model, optimizer, runtime, range(4, 9)) == whole
    assert runtime.step == 9


def test_a_rehearsal_leaves_nothing_behind() -> None:
    def run(rehearse: bool) -> list[float]:
        model = create(CONFIG, 0)
        optimizer = optimizer_of(model, "sgd")
        runtime = COMET(warmup=1, every=1).attach(model)
        if rehearse:
            with runtime.context():
                model(batch(99)[0]).sum().backward()
            optimizer.zero_grad()
        return train(model, optimizer, runtime, range(4))

    assert run(True) == run(False)


def test_bytes_are_those_held_between_forward_and_backward() -> None:
    model = create(CONFIG, 0)
    runtime = COMET(warmup=1, every=5).attach(model)
    train(model, optimizer_of(model, "sgd"), runtime, range(1))
    images, _ = batch(1)
    with runtime.context():
        loss = model(images).sum()
    records = [kept._record for kept in runtime.saved._live.values() if kept._record is not None]
    assert len(records) == 3
    by_need = runtime.saved.by_need()
    assert sum(record.nbytes for record in records) == sum(
        part.numel() * part.element_size()
        for record in records
        for piece in record.pieces
        for part in piece.parts.values()
    )
    assert runtime.held_bytes == sum(held for held, _ in by_need.values())
    assert runtime.measured is not None
    assert runtime.measured.values < 0.2
    loss.backward()
    assert runtime.held_bytes == 0
    assert len(runtime.saved._live) == 0


def test_evaluation_is_left_alone() -> None:
    model = create(CONFIG, 0).eval()
    runtime = COMET().attach(model)
    images, _ = batch(0)
    with torch.no_grad(), runtime.context():
        found = model(images)
    assert torch.equal(found, model(images))
    assert runtime.measured is None


def test_bf16_products() -> None:
    model = create(CONFIG, 0)
    optimizer = optimizer_of(model, "adamw")
    runtime = COMET(warmup=1, every=1).attach(model)
    for step in range(3):
        images, labels = batch(step)
        with runtime.context(), torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        runtime.observe(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        runtime.after_step()
    assert runtime.measured is not None
    assert runtime.measured.values < 0.4
    assert all(layer.bound > 0 for layer in runtime.layers[1:])


def test_square_inputs_of_a_kernels_shape_are_told_from_weights() -> None:
    """Under autocast both are copies; the input is saved first."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1))
    runtime = COMET().attach(model)
    x = normal_(torch.empty(3, 3, 3, 3), seed=0, name="x").requires_grad_()
    with runtime.context(), torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().sum()
    held = {tuple(kept.shape) for kept in runtime.saved._live.values() if kept._record is not None}
    assert held == {(3, 3, 3, 3)}
    records = [kept for kept in runtime.saved._live.values() if kept._record is not None]
    assert len(records) == 1
    loss.backward()


def test_frozen_layers_keep_nothing_and_what_they_feed_stays_exact() -> None:
    model = create(CONFIG, 0)
    model.blocks[0].requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    runtime = COMET().attach(model)
    with runtime.context():
        loss = model(batch(0)[0]).sum()
    records = [kept for kept in runtime.saved._live.values() if kept._record is not None]
    assert [tuple(kept.shape) for kept in records] == [(6, 12, 8, 8)]
    loss.backward()


def test_a_weight_that_is_used_twice_counts_both_times() -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), layer, nn.ReLU(), layer)
    optimizer = optimizer_of(model, "sgd")
    runtime = COMET(warmup=1).attach(model)
    assert [each.name for each in runtime.layers] == ["0", "2"]
    with runtime.context():
        loss = model(batch(0)[0]).square().mean()
    loss.backward()
    assert runtime.layers[1].elements == 2 * 6 * 4 * 16 * 16
    runtime.observe(optimizer)
    runtime.after_step()
    assert runtime.layers[1].bound > 0


@pytest.mark.parametrize("normed", [nn.utils.weight_norm, parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_is_made_of_others_leaves_its_layer_exact(normed: Any) -> None:
    made, plain = normed(nn.Conv2d(4, 4, 3, padding=1)), nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), made, nn.ReLU(), plain)
    optimizer = optimizer_of(model, "sgd")
    runtime = COMET(warmup=1).attach(model)
    with parametrize.cached(), runtime.context():  # one tensor is the weight in all of the pass
        loss = model(batch(0)[0]).square().mean()
    loss.backward()
    assert [bool(layer.elements) for layer in runtime.layers] == [False, False, True]
    runtime.observe(optimizer)
    runtime.after_step()
    assert [bool(layer.bound) for layer in runtime.layers] == [False, False, True]


def test_forward_hooks_do_the_same_as_the_context() -> None:
    def run(hooked: bool) -> list[Tensor]:
        model = create(CONFIG, 0)
        runtime = COMET().attach(model)
        images, labels = batch(0)
        remove = runtime.hook_forward(model) if hooked else runtime.close
        if hooked:
            loss = F.cross_entropy(model(images), labels)
        else:
            with runtime.context():
                loss = F.cross_entropy(model(images), labels)
        assert runtime.held_bytes < 0.5 * runtime.saved.plain_bytes
        loss.backward()
        remove()
        F.cross_entropy(model(images), labels)
        assert runtime.held_bytes == 0
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, run(True), run(False)))


# What is refused


def test_a_model_without_convolutions_is_refused() -> None:
    with pytest.raises(InputError, match="what convolutions keep, and this model has none"):
        COMET().attach(nn.Linear(2, 2))


def test_blocks_that_are_not_seen_are_refused_at_once() -> None:
    model = create(CONFIG, 0)
    model.recompute = True
    runtime = COMET().attach(model)
    with pytest.raises(InputError, match="neither compiled nor recomputed"), runtime.context():
        model(batch(0)[0])


def test_nobody_observed() -> None:
    model = create(CONFIG, 0)
    runtime = COMET(warmup=1).attach(model)
    with runtime.context():
        loss = model(batch(0)[0]).sum()
    loss.backward()
    with pytest.raises(InputError, match=r"call observe\(optimizer\)"):
        runtime.after_step()


def test_a_rank_without_rows_of_a_weight_has_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = create(CONFIG, 0)
    runtime = COMET(warmup=1).attach(model)
    monkeypatch.setattr("modicum.memory.activations.momentum_of", lambda *_: torch.zeros(0, 3))
    with runtime.context():
        loss = model(batch(0)[0]).sum()
    loss.backward()
    runtime.observe(optimizer_of(model, "sgd"))
    runtime.after_step()
    assert (runtime.step, [layer.observed for layer in runtime.layers]) == (1, [False] * 4)
    assert [layer.bound for layer in runtime.layers] == [0.0] * 4  # no rank has seen a number


def test_neither_momentum_nor_gradient() -> None:
    model = create(CONFIG, 0)
    runtime = COMET(warmup=1).attach(model)
    optimizer = optimizer_of(model, "plain")
    with runtime.context():
        loss = model(batch(0)[0]).sum()
    loss.backward()
    optimizer.zero_grad()
    with pytest.raises(InputError, match=r"neither a momentum of blocks\.1\.conv\.weight"):
        runtime.observe(optimizer)


def test_a_weight_that_nobody_trains() -> None:
    model = create(CONFIG, 0)
    runtime = COMET(warmup=1).attach(model)
    with runtime.context():
        loss = model(batch(0)[0]).sum()
    loss.backward()
    with pytest.raises(InputError, match=r"does not train blocks\.1\.conv\.weight"):
        runtime.observe(torch.optim.SGD(model.head.parameters()))


def test_bounds_of_another_model() -> None:
    state = COMET().attach(create(CONFIG, 0)).state_dict()
    other = create(ConvNetConfig(widths=(8, 8)), 0)
    with pytest.raises(InputError, match="other convolutions"):
        COMET().attach(other).load_state_dict(state)


def test_what_is_not_finite_leaves_bounds_as_they_are() -> None:
    model = create(CONFIG, 0)
    optimizer = optimizer_of(model, "sgd")
    runtime = COMET(warmup=1, every=1).attach(model)
    train(model, optimizer, runtime, range(2))
    bounds = [layer.bound for layer in runtime.layers]
    images, labels = batch(2)
    with runtime.context():
        loss = F.cross_entropy(model(images * float("inf")), labels)
    loss.backward()
    runtime.observe(optimizer)
    runtime.after_step()
    assert [layer.bound for layer in runtime.layers] == bounds


def test_binding() -> None:
    model = create(CONFIG, 0)
    assert COMET().bind(Context(model)).ranks.alone
    assert COMET().bind(ActivationContext(model)).model is model


def test_scaled_losses_are_refused() -> None:
    runtime = COMET().attach(create(CONFIG, 0))
    refuse_scaled_losses(runtime, None)
    with pytest.raises(InputError, match="with fp16 losses are multiplied by a scale"):
        refuse_scaled_losses(runtime, object())

"""Models of a form are trained: in plain loops, after an interruption, on two ranks, by others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modicum.adapters.lora import LoRA
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.linears.base import LinearMethod
from modicum.models.llama import Llama
from modicum.parallel.sharded import Sharded
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.comm.two_ranks import RankFinding, on_two_ranks
from modicum.proofs.contracts.linears.subjects import (
    LinearSubject,
    decoder,
    decoder_config,
    form_of_value,
    linears_check,
    next_token,
    small,
    tokens,
)
from modicum.proofs.contracts.small_training import SmallTraining, assert_resumes, constants_stay
from modicum.proofs.contracts.transformers_loop import hugging_face_llama, train_under_transformers


@linears_check(proves="alone")
def check_learns_in_a_plain_loop(subject: LinearSubject) -> None:
    """The loss falls by a fifth, all that trains moves, and codes stay, with LoRA next to them."""
    model, ids = decoder(small(subject)), tokens(8)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    frozen = not form_of_value(small(subject)).trains
    trained = dict(model.named_parameters())
    if frozen:
        trained = dict(LoRA(rank=4).attach(model).named_parameters())
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    with constants_stay(model):
        for _ in range(30):
            loss = next_token(model, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], f"the loss goes from {losses[0]:.2f} to {losses[-1]:.2f}"
    now = dict(model.named_parameters())
    stuck = [name for name in before if torch.equal(before[name], now[name])]
    assert stuck == (list(before) if frozen else []), f"of {len(before)} tensors {stuck} stay"


@linears_check()
def check_resumes_to_the_bit(subject: LinearSubject) -> None:
    """Stopped after two steps and continued in a new model, training ends in the same bits."""
    value = small(subject)
    if "exact_resume" not in value.traits:
        raise NotApplicable("the method does not claim `exact_resume`")
    if not form_of_value(value).trains:
        raise NotApplicable("weights in this form are not trained")
    assert_resumes(
        lambda: SmallTraining(decoder(value), _loss),
        lambda saved: SmallTraining(decoder(value, seed=1), _loss),
    )


@linears_check(expensive=True)
def check_sharded_over_two_ranks(subject: LinearSubject) -> None:
    """Sharded by FSDP2 a decoder begins with the same bits and learns what one process learns."""
    value = small(subject)
    expected = _alone(value)
    for rank, found in enumerate(on_two_ranks(sharded, value)):
        assert found["begun"] == expected["begun"], f"rank {rank} begins with other weights"
        for step, (one, other) in enumerate(zip(found["losses"], expected["losses"], strict=True)):
            gap = abs(one - other) / other
            assert gap < 1e-4, f"rank {rank}: the loss of step {step} is off by {gap:.2g}"


@linears_check(expensive=True, proves="transformers")
def check_trains_under_transformers(subject: LinearSubject) -> None:
    """`transformers.Trainer` trains the layers, or LoRA next to them, and leaves codes alone."""
    model = hugging_face_llama(tie_word_embeddings=False)
    value = small(subject)
    handle = value.convert(model)
    there = model.state_dict().keys()
    assert handle.state_dict().keys() <= there, "the handle names tensors that are not there"
    if not form_of_value(value).trains:
        LoRA(rank=2).attach(model)
    trained = [name for name, tensor in model.named_parameters() if tensor.requires_grad]
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    train_under_transformers(model, tokens(8), max_steps=3, learning_rate=1e-2)
    now = dict(model.named_parameters())
    moved = [name for name in before if not torch.equal(before[name], now[name])]
    # LoRA's first factor stands until its second has moved, which a few steps do.
    assert set(moved) <= set(trained), "a frozen tensor moved"
    assert len(moved) > len(trained) // 2, f"of {len(trained)} tensors {len(moved)} moved"


def sharded(ranks: Ranks, value: LinearMethod) -> RankFinding:
    """Three updates of a decoder that is sharded over the ranks, and the weights it began with."""
    strategy = Sharded(ranks, Layout.of(ranks.size, ranks.size), reshard_after_forward=True)
    with on_meta():
        model = Llama(decoder_config(value))
    strategy.cut(model, model.blocks, torch.device("cpu"))
    materialise(model, "cpu")
    model.initialise(0)
    strategy.start(model)
    begun = _sums(model)
    optimizer = _optimizer(model)
    losses = []
    for step in range(3):
        ids = tokens(4, 6 + step)
        strategy.before_backward(last=True)
        loss = next_token(model, ids[ranks.rank :: ranks.size])
        loss.backward()
        strategy.after_backward()
        strategy.update(optimizer)
        optimizer.zero_grad()
        losses.append(ranks.sum(loss.item())[0])
    strategy.rest(model)
    return {"begun": begun, "losses": losses}


def _alone(value: LinearMethod) -> dict[str, Any]:
    model = decoder(value)
    begun = _sums(model)
    optimizer = _optimizer(model)
    losses = []
    for step in range(3):
        loss = next_token(model, tokens(4, 6 + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"begun": begun, "losses": losses}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2)


def _sums(model: Llama) -> dict[str, list[float]]:
    """Numbers that distinguish the tensors of its layers in forms from others."""
    found = {}
    for layer in model.config.forms.layers:
        for name, tensor in model.get_submodule(layer).state_dict().items():
            full = whole(tensor.detach()).double()
            found[f"{layer}.{name}"] = [full.sum().item(), full.square().sum().item()]
    return found


def _loss(model: nn.Module, step: int) -> Tensor:
    return next_token(model, tokens(length=4 + step))

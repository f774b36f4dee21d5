"""DeAR updates a weight before it is used, whoever uses it, in which order, or whether at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modicum.comm import DeAR
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.contracts.comm.subjects import furthest, weights
from modicum.proofs.contracts.optim.subjects import llama, loss, numbers, tokens
from modicum.proofs.contracts.transformers_loop import hugging_face_llama

Subject = tuple[nn.Module, Callable[[int], Tensor]]
SMALL = DeAR(layers=1)


def train(model: nn.Module, loss_of: Callable[[int], Tensor], method: DeAR | None) -> Any:
    """Seven steps with DeAR or plainly, at a falling rate, looking at the loss now and then.

    Returns the optimizer, and how the parameters are grouped.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    handle = None if method is None else method.wrap(model, optimizer)
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(7):
        if handle is not None:
            handle.backward(loss_of(step))
            handle.step()
        else:
            loss_of(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        rate.step()
        if step % 3 == 0:
            with torch.inference_mode():
                loss_of(99)
    if handle is None:
        return optimizer, []
    handle.flush()
    strategy: Any = handle.strategy
    return optimizer, [group.parameters for group in strategy.groups]


def attention() -> Subject:
    """PyTorch's attention reads its output projection without calling it."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), block)
    return model, lambda step: (model(numbers(2, 3, 8, name=f"{step}")) * numbers(2, 3, 8)).sum()


class Dropped(nn.Module):
    """A layer that some updates leave out, whose attention reads a weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, hidden: Tensor, *, layer: bool) -> Tensor:
        hidden = self.first(hidden)
        return hidden + self.attention(hidden, hidden, hidden)[0] if layer else hidden


def dropped() -> Subject:
    torch.manual_seed(0)
    model = Dropped()

    def loss_of(step: int) -> Tensor:
        seen = model(numbers(2, 3, 8, name=f"{step}"), layer=step not in (0, 1, 4))
        return (seen * numbers(2, 3, 8)).sum()

    return model, loss_of


def recomputed() -> Subject:
    """Blocks run again in the backward pass; the embedding is tied."""
    model = llama()
    model.recompute = True
    return model, lambda step: loss(model, tokens(seed=step))


def hugging_face() -> Subject:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = hugging_face_llama()
    return model, lambda step: model(tokens(seed=step), labels=tokens(seed=step)).loss


@pytest.mark.parametrize("method", [SMALL, DeAR()], ids=["layer by layer", "all at once"])
@pytest.mark.parametrize("make", [attention, dropped, recomputed, hugging_face])
def test_weights_are_those_of_a_plain_loop_to_the_bit(
    make: Callable[[], Subject], method: DeAR
) -> None:
    ours, theirs = make(), make()
    train(*ours, method)
    train(*theirs, None)
    assert furthest(weights(ours[0]), weights(theirs[0])) == 0


def test_a_stale_weight_that_gets_a_gradient_is_an_error() -> None:
    model, loss_of = attention()
    handle = DeAR().wrap(model, torch.optim.AdamW(model.parameters()))
    handle.backward(loss_of(0))
    handle.step()
    with pytest.raises(RuntimeError, match="used before it was updated"):
        handle.backward(model[0].bias.sum())
    handle.flush()
    handle.backward(model[0].bias.sum())
    handle.step()


def test_a_second_last_backward_pass_is_refused_and_one_after_an_error_is_not() -> None:
    (ours, loss_of), theirs = attention(), attention()
    handle = DeAR().wrap(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    spoiling = ours[0].weight.register_hook(lambda _: 1 // 0)  # when the block has gradients
    with pytest.raises(ZeroDivisionError):
        handle.backward(loss_of(0))
    spoiling.remove()
    handle.backward(loss_of(0))
    for last in (True, False):
        with pytest.raises(InputError, match="give last=False to the passes before"):
            handle.backward(loss_of(1), last=last)
    handle.step()
    handle.backward(loss_of(1), last=False)
    handle.backward(loss_of(2))
    handle.step()
    handle.flush()
    optimizer = torch.optim.SGD(theirs[0].parameters(), lr=0.1)
    for steps in ((0,), (1, 2)):
        for step in steps:
            theirs[1](step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert furthest(weights(ours), weights(theirs[0])) == 0


class Shared(nn.Module):
    """A weight that two reentrant checkpoints use, so that its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x.square().sum()


def test_a_gradient_that_comes_after_its_sum_has_begun_is_refused_by_name() -> None:
    model = Shared()
    handle = SMALL.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match=r"layer\.(weight|bias): .*use_reentrant=False"):
        handle.backward(model(torch.ones(2, 4, requires_grad=True)))


class Routed(nn.Module):
    """Of its layers one is used by rank 0 alone, one in some steps by nobody, one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, rank: int, step: int) -> Tensor:
        x = self.layers[2](torch.ones(2, 5))
        x = self.layers[0](x) if step % 3 == 1 else x
        return (self.layers[1](x) if rank == 0 else x).square().sum()


def routed(ranks: Ranks) -> Any:
    ours, theirs = Routed(), Routed()
    optimizer, groups = train(ours, lambda step: ours(ranks.rank, step), SMALL)
    train(theirs, lambda step: (theirs(0, step) + theirs(1, step)) / 2, None)
    updates = [int(optimizer.state[p]["step"]) for p in ours.parameters() if p in optimizer.state]
    places = {id(layer.weight): place for place, layer in enumerate(ours.layers)}
    order = [places[id(parameters[0])] for parameters in groups]
    return furthest(weights(ours), weights(theirs)), updates, order


@pytest.mark.ranks
def test_layers_of_some_or_no_ranks_are_updated_and_grouped_by_use(pool: Pool) -> None:
    for distance, updates, order in pool.run(routed):
        assert distance <= 1e-6
        assert updates == [2, 2, 7, 7, 7, 7]
        assert order == [2, 1, 0, 3]  # as rank 0 came to them in the first step

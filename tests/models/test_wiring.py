"""Decoders whose branches leave others out, against plain equations in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from tests.models.test_llama import lively, small
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.layers.block_plan import BlockPlan
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.models import Llama, create
from modicum.models.rope import describe
from modicum.parallel.sharded import Sharded

BLOCKS = 4


def block(number: int) -> str:
    return f"model.layers.{number}"


def ladder() -> FormPlan:
    """Each branch reads the stream without the one directly before."""
    every = {block(n): BlockPlan(mixer_skips=[1] * (n > 0), mlp_skips=[1]) for n in range(BLOCKS)}
    return FormPlan(blocks=every)


def shallow(size: int) -> FormPlan:
    """Groups of so many blocks that all read the stream at the group's start."""
    plan = FormPlan()
    for n in range(BLOCKS):
        if back := 2 * (n % size):
            own = {"mixer_skips": [(1, back)], "mlp_skips": [(2, back + 1)]}
            plan = plan.with_block(block(n), **own)
    return plan


def parallel() -> FormPlan:
    """Attention and MLP of a block read the same stream."""
    return FormPlan(blocks={block(n): BlockPlan(mlp_skips=[1]) for n in range(BLOCKS)})


PLANS = {
    "ladder": ladder(),
    "shallow by two": shallow(2),
    "shallow": shallow(BLOCKS),
    "parallel": parallel(),
    "late ladder": ladder().with_block(block(0), mlp_skips=()),
}


def doubled(forms: FormPlan, **changes: Any) -> Llama:
    return lively(small(layers=BLOCKS, forms=forms, **changes)).double()


def tokens(rows: int = 2, length: int = 9) -> Tensor:
    return torch.arange(rows * length).reshape(rows, length) * 7 % 29


class Branches:
    """Attention and MLP of each block as functions of what they read."""

    def __init__(self, model: Llama, ids: Tensor, documents: Tensor | None = None) -> None:
        self.model, self.start = model, model.model.embed_tokens(ids)
        self.sequence = describe(model.config, ids, documents, 0, torch.float64)

    def mixer(self, n: int, x: Tensor) -> Tensor:
        own: Any = self.model.blocks[n]
        mixed: Tensor = own.self_attn(own.input_layernorm(x), None, self.sequence)[0]
        return mixed

    def mlp(self, n: int, x: Tensor) -> Tensor:
        own: Any = self.model.blocks[n]
        added: Tensor = own.mlp(own.post_attention_layernorm(x))
        return added

    def logits(self, x: Tensor) -> Tensor:
        return self.model.logits(self.model.model.norm(x))


def of_ladder(b: Branches, first: int = 0) -> Tensor:
    """The two-stream form of arXiv 2501.06589: p behind attention, q behind the MLP.

    Blocks before the first one are ordinary, and hand both over.
    """
    p = q = b.start
    for n in range(first):
        p = q + b.mixer(n, q)
        q = p + b.mlp(n, p)
    for n in range(first, BLOCKS):
        a = q + b.mixer(n, p)
        p, q = a, a + b.mlp(n, q)
    return q


def of_shallow(b: Branches, size: int) -> Tensor:
    """h + sum of F_l(h) in each group, arXiv 2309.08414."""
    h = b.start
    for first in range(0, BLOCKS, size):
        summed = h
        for n in range(first, first + size):
            mixed = b.mixer(n, h)
            summed = summed + mixed + b.mlp(n, h + mixed)
        h = summed
    return h


def of_parallel(b: Branches) -> Tensor:
    """x + attention(norm(x)) + MLP(norm(x))."""
    x = b.start
    for n in range(BLOCKS):
        x = x + b.mixer(n, x) + b.mlp(n, x)
    return x


EQUATIONS = {
    "ladder": of_ladder,
    "late ladder": lambda b: of_ladder(b, 1),
    "shallow by two": lambda b: of_shallow(b, 2),
    "shallow": lambda b: of_shallow(b, BLOCKS),
    "parallel": of_parallel,
}


def agree(model: Llama, found: Tensor, expected: Tensor) -> None:
    """Outputs and the gradients of all parameters are the same but for rounding."""
    assert (found - expected).abs().max() < 1e-11
    weights = torch.cos(torch.arange(found.numel(), dtype=torch.float64)).view_as(found)
    parameters = list(model.parameters())
    one = torch.autograd.grad((found * weights).sum(), parameters)
    other = torch.autograd.grad((expected * weights).sum(), parameters)
    for a, b in zip(one, other, strict=True):
        assert (a - b).norm() <= 1e-10 * b.norm()


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_wiring_is_its_equation(name: str) -> None:
    model = doubled(PLANS[name])
    branches = Branches(model, tokens())
    agree(model, model(tokens()), branches.logits(EQUATIONS[name](branches)))


@st.composite
def plans(draw: st.DrawFn) -> FormPlan:
    def skips(branch: int) -> list[int]:
        return sorted(draw(st.sets(st.integers(1, branch)))) if branch else []

    plan = FormPlan()
    for n in range(BLOCKS):
        plan = plan.with_block(block(n), mixer_skips=skips(2 * n), mlp_skips=skips(2 * n + 1))
    return plan


@settings(max_examples=20, deadline=None)
@given(plans(), st.booleans(), st.booleans())
def test_any_wiring_reads_the_sum_of_what_it_does_not_leave_out(
    plan: FormPlan, recompute: bool, packed: bool
) -> None:
    model = doubled(plan)
    model.recompute = recompute
    documents = (torch.arange(9) // 4).expand(2, 9) if packed else None
    branches = Branches(model, tokens(), documents)
    skips, added = model.config.skips(), list[Tensor]()
    for branch in range(2 * BLOCKS):
        left = {branch - back for first, last in skips[branch] for back in range(first, last + 1)}
        x = branches.start + sum(out for n, out in enumerate(added) if n not in left)
        run = branches.mlp if branch % 2 else branches.mixer
        added.append(run(branch // 2, x))
    agree(model, model(tokens(), documents), branches.logits(branches.start + sum(added)))


@settings(max_examples=10, deadline=None)
@given(plans(), st.integers(1, 8))
def test_tokens_one_by_one_give_what_all_at_once_do(plan: FormPlan, first: int) -> None:
    model, ids = doubled(plan), tokens()
    states = model.new_states(2, 9)
    parts = []
    for piece in (ids[:, :first], *ids[:, first:].split(1, dim=1)):
        logits, states = model(piece, states=states)
        parts.append(logits)
    assert (torch.cat(parts, 1) - model(ids)).abs().max() < 1e-11


def test_without_a_wiring_blocks_run_as_they_always_did() -> None:
    assert all(each.wires is None for each in create(small(), 0).blocks)
    model = create(small(layers=BLOCKS, forms=PLANS["late ladder"]), 0)
    kinds = [each.wires is None for each in model.blocks]
    assert kinds == [False] * BLOCKS  # the first one keeps what the second one's mixer reads
    model = create(small(layers=BLOCKS, forms=FormPlan().with_block(block(3), mlp_skips=[1])), 0)
    assert [each.wires is None for each in model.blocks] == [True, True, True, False]


def gradients(model: Llama, ids: Tensor) -> dict[str, Tensor]:
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def sharded(ranks: Ranks, name: str, recompute: bool) -> list[dict[str, Tensor]]:
    """Gradients of two passes of a decoder that is sharded over the ranks."""
    strategy = Sharded(ranks, Layout.of(ranks.size, ranks.size), True)
    with on_meta():
        model = Llama(small(layers=BLOCKS, forms=PLANS[name]))
    strategy.cut(model, model.blocks, torch.device("cpu"))
    materialise(model, "cpu")
    model.initialise(0)
    strategy.start(model)
    model.recompute = recompute
    found = []
    for _ in range(2):
        model.zero_grad()
        strategy.before_backward(last=True)
        gradients(model, tokens(4)[ranks.rank :: ranks.size])
        strategy.after_backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({n: whole(grad).clone() for n, grad in grads.items()})
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["ladder", "shallow by two", "shallow"])
def test_sharded_over_two_ranks_gradients_are_those_of_one_process(
    pool: Pool, name: str, recompute: bool
) -> None:
    expected = gradients(create(small(layers=BLOCKS, forms=PLANS[name]), 0), tokens(4))
    for rank in pool.run(sharded, name, recompute, ranks=2):
        for found in rank:
            assert found.keys() == expected.keys()
            for each, gradient in found.items():
                gap = (gradient - expected[each]).norm() / expected[each].norm()
                assert gap < 1e-5, each


def test_what_works_after_a_block_needs_one_stream() -> None:
    from modicum.adapters.blocks import choose_blocks

    model = create(small(layers=BLOCKS, forms=PLANS["ladder"]), 0)
    with pytest.raises(InputError, match="several streams run through this block"):
        choose_blocks(model, ["all-blocks"])
    model = create(small(layers=BLOCKS, forms=PLANS["parallel"]), 0)
    assert len(choose_blocks(model, ["all-blocks"])) == BLOCKS

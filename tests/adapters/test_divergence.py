"""The divergence of two passes is that of the formula, in parts, and keeps nothing but logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modicum.adapters import divergence as divergences
from modicum.adapters.divergence import divergence
from modicum.proofs.contracts.adapters.subjects import numbers


def by_formula(first: Tensor, second: Tensor, weights: Tensor) -> Tensor:
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    each = p.exp() * (p - q.detach()) + q.exp() * (q - p.detach())
    return (each.sum(-1) * weights).sum()


@pytest.mark.parametrize("parts", [1, 7, 100], ids=["all", "parts", "a row"])
def test_it_is_the_formula_s_with_its_gradients(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergences, "_PARTS", parts)
    first, second = (numbers(4, 5, 7, name=name).requires_grad_() for name in ("one", "two"))
    weights = numbers(4, 5, name="weights").abs()
    wide = [each.detach().double().requires_grad_() for each in (first, second)]
    expected, found = by_formula(*wide, weights.double()), divergence(first, second, weights)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    (3 * expected).backward()
    (3 * found).backward()
    for one, other in zip((first, second), wide, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-6)


def test_half_precision_gives_gradients_of_its_own_dtype() -> None:
    first, second = (numbers(6, 9, name=name) for name in ("one", "two"))
    halves = [each.bfloat16().requires_grad_() for each in (first, second)]
    wide = [each.detach().float().requires_grad_() for each in halves]
    weights = torch.ones(6)
    found, expected = divergence(*halves, weights), by_formula(*wide, weights)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for one, other in zip(halves, wide, strict=True):
        assert one.grad.dtype == torch.bfloat16
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=0.01, atol=1e-4)


def test_logits_are_all_that_is_kept() -> None:
    first, second = (numbers(64, 200, name=name).requires_grad_() for name in ("one", "two"))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.untyped_storage().data_ptr()) or tensor, lambda t: t
    ):
        divergence(first, second, torch.ones(64)).backward()
    known = {each.untyped_storage().data_ptr() for each in (first, second)}
    assert known <= set(kept)
    assert len(set(kept) - known) <= 1  # the weights

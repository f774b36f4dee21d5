"""AdamW and SGD: PyTorch's own, whatever name they go by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from modicum.core.contracts.catalog import find, of_value
from modicum.core.errors import InputError
from modicum.core.random import normal_
from modicum.optim import SGD, AdamW


def weights() -> list[nn.Parameter]:
    shapes = ((5, 3), (4,))
    return [nn.Parameter(normal_(torch.empty(s), seed=0, name=f"{s}")) for s in shapes]


@pytest.mark.parametrize(
    ("kind", "theirs", "fields", "names"),
    [
        (AdamW, torch.optim.AdamW, {"betas": (0.8, 0.9), "weight_decay": 0.2}, {}),
        (AdamW, torch.optim.AdamW, {"betas": (0.8, 0.9), "epsilon": 0.1}, {"epsilon": "eps"}),
        (SGD, torch.optim.SGD, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.2}, {}),
        (SGD, torch.optim.SGD, {"momentum": 0.0}, {}),
    ],
)
def test_they_do_what_pytorchs_do(
    kind: Any, theirs: Any, fields: dict[str, Any], names: dict[str, str]
) -> None:
    ours, others = weights(), weights()
    renamed = {"weight_decay": 0.0} | {names.get(key, key): v for key, v in fields.items()}
    value = kind.value(**fields)
    one = value.bind([{"params": ours, "lr": 0.1}])
    other = theirs(others, lr=0.1, **renamed)
    assert isinstance(one, theirs)
    for step in range(5):
        for mine, yours in zip(ours, others, strict=True):
            mine.grad = normal_(torch.empty_like(mine), seed=step, name="gradient")
            yours.grad = mine.grad.clone()
        one.step()
        other.step()
    for mine, yours in zip(ours, others, strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-6, atol=1e-7)
    assert of_value(value) == find(kind.info.name)


def test_the_defaults_are_the_recipes() -> None:
    assert AdamW.value().fields() == {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.0}


def test_sparse_gradients_are_taken_where_nothing_is_kept_of_them() -> None:
    torch.optim.SGD(weights()).step()  # from here on PyTorch's class calls hooks, as ours does
    ours, theirs = weights(), weights()
    optimizer, other = SGD(ours, lr=0.1, momentum=0.0), torch.optim.SGD(theirs, lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        for weight in (*ours, *theirs):
            rows = normal_(torch.empty(weight.shape), seed=1, name="rows")
            rows[1] = 0
            weight.grad = rows.to_sparse(1)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert calls == ["before", "after"]
    other.step()
    for before, mine, yours in zip(weights(), ours, theirs, strict=True):
        assert torch.equal(mine, yours)
        assert torch.equal(mine[1], before[1])
        assert not torch.equal(mine[0], before[0])


@pytest.mark.parametrize("fields", [{"momentum": 0.9}, {"momentum": 0.0, "weight_decay": 0.1}])
def test_sparse_gradients_are_refused_before_another_group_is_updated(
    fields: dict[str, Any],
) -> None:
    ours = weights()
    plain = {"momentum": 0.0, "weight_decay": 0.0}
    optimizer = SGD([{"params": ours[:1], **plain}, {"params": ours[1:], **fields}], lr=0.1)
    for weight in ours:
        weight.grad = torch.ones_like(weight).to_sparse(1)
    with pytest.raises(InputError, match=r"give dense gradients, .*\(4,\)"):
        optimizer.step()
    for before, mine in zip(weights(), ours, strict=True):
        assert torch.equal(mine, before)

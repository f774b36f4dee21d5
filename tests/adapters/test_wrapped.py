"""The order in which the page on loops of one's own attaches, wraps, and makes the optimizer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor

from modicum.core.ranks.ranks import Ranks


def trained(ranks: Ranks) -> list[tuple[Tensor, Tensor | None]]:
    """The page's block for several ranks: the factors after an update, and their gradients."""
    folder = Path(__file__).parents[2] / "docs" / "how-to"
    text = (folder / "use-lora-in-your-own-loop.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```python ranks\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    known: dict[str, Any] = {}
    exec(compile(block, "the page", "exec"), known)
    assert known["outputs"].dtype == torch.bfloat16
    return [(value.detach().clone(), value.grad) for value in known["adapter"].parameters()]


@pytest.mark.ranks
def test_the_order_of_the_page_trains_alike_on_all_ranks(pool: Pool) -> None:
    first, second = pool.run(trained)
    for (value, gradient), (other, _) in zip(first, second, strict=True):
        assert torch.equal(value, other)
        assert value.count_nonzero()
        assert gradient is not None
        assert gradient.dtype == torch.float32

"""Blocks that inductor compiles, C++ compiler and all; the rest is in `test_compile_trial.py`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.trainer.compiled_blocks import compiled_forward

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"  # the tracer looks at what is no leaf
)


class OneKey(nn.Module):
    """Attention of 4 heads of 8 numbers to one key and value that indices pick, as Falcon's is."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], 6, 8)
        picked = (heads[..., :-2, :], heads[..., [-2], :], heads[..., [-1], :])
        query, key, value = (each.transpose(1, 2) for each in picked)
        mixed = F.scaled_dot_product_attention(query, key * 1.5, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


@pytest.mark.expensive
def test_rows_shorter_than_a_vector_are_added_up_right_by_several_threads() -> None:
    block, threads = OneKey(), torch.get_num_threads()
    x = torch.randn(4, 32, 48, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.set_num_threads(2)
    torch.compiler.reset()
    try:
        found, expected = (
            torch.autograd.grad(run(x).square().sum(), x)[0]
            for run in (compiled_forward(block), block)
        )
    finally:
        torch.set_num_threads(threads)
        torch.compiler.reset()
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)

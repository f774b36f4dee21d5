"""Blocks that inductor compiles, C++ compiler and all; the rest is in `test_compile_trial.py`."""

from __future__ import annotations

import subprocess
import sys

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


SUMS_BEYOND_ROWS = """
import torch
import torch.nn.functional as F
from modicum.trainer.compiled_blocks import compiled_forward

class Sums(torch.nn.Module):
    def forward(self, x):
        bent = (x * 0.5) * (torch.erf(x * 0.7) + 1)
        turned = F.pad(bent.permute(3, 2, 1, 0), (0, 0, 0, 58), value=0.5)
        return torch.matmul(F.pad(bent, (0, 0, 0, 0, 0, 58), value=0.5), turned)

x = torch.randn(1, 8, 66, 66, generator=torch.Generator().manual_seed(0))
x = x.contiguous(memory_format=torch.channels_last)
block = Sums()
print(float((compiled_forward(block)(x) - block(x)).abs().max()))
"""


@pytest.mark.expensive
def test_sums_of_a_last_tile_stay_within_the_tensor() -> None:
    """PyTorch's issue 196681, in a process of its own: memory beyond the tensor is written to."""
    done = subprocess.run(
        [sys.executable, "-c", SUMS_BEYOND_ROWS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert float(done.stdout) < 1e-4

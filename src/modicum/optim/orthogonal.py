"""Newton-Schulz iterations: the nearest matrix of orthonormal rows or columns, by products alone.

For G = U S V^T that is U V^T. A step maps the singular values of X by an odd polynomial of degree
five, X <- a X + (b A + c A^2) X with A = X X^T. It leaves U and V as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Steep at zero: five steps bring singular values from [0.01, 1] into [0.68, 1.14], not to 1.
STEEP = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class NewtonSchulz:
    """Five products a step bring all singular values of a matrix near 1.

    A matrix is divided by its Frobenius norm first, so none is above 1. The products are those of
    the smaller side: taller matrices are transposed.

    Args:
        steps: how many.
        coefficients: (a, b, c). Those of the default are steep at zero and do not converge to 1;
            (15/8, -5/4, 3/8) do, and need more steps.
        dtype: of the products; `auto` is bf16 on an accelerator and fp32 on a CPU.
        epsilon: the least norm that is divided by.
        batched: whether matrices of one shape are one batch of products; None: on an accelerator.
            A CPU is as fast without, and a matrix then has the same bits in any company.

    Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024;
    the polynomial after Bernstein and Newhouse, arXiv 2409.20325, section 3.

    >>> matrix = torch.diag(torch.tensor([1.0, 0.5, 0.1]))
    >>> [0.68 < value < 1.14 for value in NewtonSchulz()(matrix).diagonal().tolist()]
    [True, True, True]
    """

    steps: int = 5
    coefficients: tuple[float, float, float] = STEEP
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    epsilon: float = 1e-7
    batched: bool | None = None

    def __call__(self, matrix: Tensor) -> Tensor:
        """The matrix [m, n] with singular values near 1, as a tensor of its own."""
        found = matrix.clone()
        self.apply_([found])
        return found

    def apply_(self, matrices: Sequence[Tensor]) -> None:
        """Bring the singular values of matrices [m, n] of one shape near 1, in place."""
        device = matrices[0].device
        dtype, batched = self._dtype(device), self.batches(device.type)
        rows, columns = matrices[0].shape
        for some in (matrices,) if batched else ([matrix] for matrix in matrices):
            x = torch.empty((len(some), rows, columns), dtype=dtype, device=device)
            for place, matrix in zip(x, some, strict=True):
                place.copy_(matrix)
            flat = x.mT if rows > columns else x
            for place in flat:
                place.div_(place.norm().clamp(min=self.epsilon))
            # Alone it goes through the products of matrices, whose bits may be others.
            flat = self._iterate(flat) if batched else self._iterate(flat[0])[None]
            for matrix, found in zip(some, flat.mT if rows > columns else flat, strict=True):
                matrix.copy_(found)

    def _iterate(self, x: Tensor) -> Tensor:
        """The steps, on a matrix [m, n], m <= n, or a batch of them."""
        a, b, c = self.coefficients
        add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
        for _ in range(self.steps):
            gram = x @ x.mT
            gram = add_product(gram, gram, gram, beta=b, alpha=c)
            x = add_product(x, gram, x, beta=a)
        return x

    def _dtype(self, device: torch.device) -> torch.dtype:
        half = self.dtype == "bf16" or (self.dtype == "auto" and device.type != "cpu")
        return torch.bfloat16 if half else torch.float32

    def flops(self, shape: tuple[int, int]) -> int:
        """Operations of the matrix products that a matrix takes."""
        small, large = min(shape), max(shape)
        return self.steps * (4 * small**2 * large + 2 * small**3)

    def scratch_elements(self, shape: tuple[int, int]) -> int:
        """Elements of fp32 next to a matrix while it is mapped: four of X, as it was and as a step
        reads, sums and makes it, and X X^T."""
        small, large = min(shape), max(shape)
        return 4 * small * large + small**2

    def batches(self, device: str) -> bool:
        """Whether matrices of one shape are one batch of products on such a device."""
        return device != "cpu" if self.batched is None else self.batched

"""The best low-rank factors of a weight, measured in a metric on its input features.

One routine serves plain SVD (no metric), Fisher-weighted SVD (a weight for each input feature), and
the forms that look at a layer's outputs (the second moment of its inputs): they differ in the
metric alone.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.layers.basis_cache import bases_kept_in, kept_svd


def share_rank(in_features: int, out_features: int, share: float = 0.5, multiple: int = 1) -> int:
    """The largest rank at which factors have at most `share` of the weight's elements; 1 at least.

    Args:
        multiple: the rank is a multiple of it, where it is no smaller.

    >>> share_rank(768, 768), share_rank(768, 3072, share=0.8), share_rank(768, 768, 0.5, 128)
    (192, 491, 128)
    """
    rank = int(share * in_features * out_features / (in_features + out_features))
    return max(rank // multiple * multiple, min(rank, multiple), 1)


def svd_bytes(rows: int, columns: int) -> int:
    """Bytes of tensors in `decomposed` of a matrix [rows, columns] at most, where it is kept too.

    The matrix in float64, LAPACK's copy, both sides' vectors and what LAPACK works with.

    >>> svd_bytes(512, 2048) // (8 * 512 * 2048)
    3
    """
    return 8 * (3 * rows * columns + 2 * min(rows, columns) ** 2)


@dataclass(frozen=True)
class Basis:
    """The output directions of a weight in the order of their importance, for factors of any rank.

    Args:
        left: U [out, k], orthonormal columns, float64, k = min(out, in).
        values: S [k], what each direction carries, the largest first.
    """

    left: Tensor
    values: Tensor

    def error(self, rank: int) -> float:
        """The squared error that factors of this rank leave: the sum of S_j^2 for j > rank."""
        return self.values[rank:].square().sum().item()

    def factors(self, weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """(down [r, in], up [out, r]), float64, of which up @ down represents `weight` [out, in].

        The product is U_r U_r^T W. Each direction's two vectors are given one length, so that
        neither factor learns faster than the other; for a plain SVD that is the root of S on both
        sides.

        Raises:
            InputError: the rank is larger than the weight's smaller side.
        """
        if rank > len(self.values):
            known = f"at most {len(self.values)}"
            raise InputError(
                "no weight of this shape needs it", field="rank", value=rank, allowed=known
            )
        left = self.left[:, :rank]
        down = left.mT @ weight.to(left)
        length = down.norm(dim=1).sqrt()
        length = torch.where(length > 0, length, 1.0)
        return down / length[:, None], left * length


def decompose(weight: Tensor, metric: Tensor | None = None) -> Basis:
    """The basis of the best approximations of `weight` [out, in] in a metric M on its input side.

    For every rank r, U_r U_r^T W is the matrix of rank r that minimises
    tr((W - X) M (W - X)^T). With M = R R^T it is found from the SVD of W R = U S V^T; as
    U_r U_r^T W R = U_r S_r V_r^T, nothing is divided by R, and input features that M does not
    count are approximated like all others.

    Args:
        metric: None for the identity; the diagonal of M [in]; or M itself [in, in], symmetric and
            positive semidefinite, such as the second moment of a layer's inputs. The error is then
            that of the layer's outputs.

    Raises:
        InputError: the weight has values that are not finite; the metric has another shape, or is
            negative or not finite somewhere.

    Source: the truncated SVD is the best approximation (Eckart and Young, 1936). Costs
    O(out in min(out, in)) in float64.

    >>> weight = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    >>> decompose(weight).error(1), decompose(weight, torch.tensor([1.0, 4.0])).error(1)
    (4.0, 9.0)
    """
    wide = weight.detach().double()
    if not wide.isfinite().all():
        raise InputError("the weight has values that are not finite")
    if metric is not None:
        wide = _weighted(wide, metric.detach().to(wide))
    left, values, _ = kept_svd(wide)
    return Basis(left, values)


def decomposed(weight: Tensor, metric: Tensor | None, cache: str | Path | None) -> Basis:
    """`decompose`, or what it gave before for the same numbers, as the folder `cache` keeps it."""
    with nullcontext() if cache is None else bases_kept_in(cache):
        return decompose(weight, metric)


def _weighted(weight: Tensor, metric: Tensor) -> Tensor:
    """W R, where R R^T is the metric."""
    ins = weight.shape[1]
    if metric.shape not in ((ins,), (ins, ins)):
        raise InputError(
            f"a metric on {ins} input features has as many entries, or as many rows and columns",
            value=tuple(metric.shape),
        )
    if not metric.isfinite().all():
        raise InputError("the metric is not finite", field="metric")
    if metric.ndim == 1:
        low, scale = metric.min(), None
    else:
        values, scale = torch.linalg.eigh(metric)
        low = values[0] + 1e-9 * values[-1].abs()  # rounding may take a zero below itself
        metric = values.clamp(min=0)
    if low < 0:
        raise InputError("the metric is negative in some direction", value=low.item())
    return (weight if scale is None else weight @ scale) * metric.sqrt()

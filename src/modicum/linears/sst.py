"""sst: a weight held as its full SVD; all singular values train, and some vectors in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from modicum.core.contracts.method import Against, Info, PositiveInt, Seed
from modicum.core.contracts.parameters import ParameterMetadata, describe_parameter
from modicum.core.contracts.row_meanings import Sources, move_state_rows
from modicum.core.contracts.run_hooks import RunHook
from modicum.core.contracts.search import IntegerRange, SearchTable
from modicum.core.layers.form_layer import FormLayer, TensorShapes
from modicum.core.random import uniform_
from modicum.core.ranks.ranks import peer_errors
from modicum.core.ranks.sharding import is_sharded, laid_out_like, own_part, whole
from modicum.linears.base import FormContext, LinearMethod

FLOOR = 1e-6  # of the largest singular value: as likely is a vector whose value is zero


def unit(rows: Tensor) -> None:
    """Give every row [r, n] the length 1, in place; a row of zeros stays."""
    rows.div_(rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny))


def not_negative(values: Tensor) -> None:
    """Set what is below zero to zero, in place."""
    values.clamp_(min=0)


class _Spectral(torch.autograd.Function):
    """y = ((x V^T) * sigma) U; vectors get the gradients of their directions, without sigma."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, sigma: Tensor, *vectors: Tensor) -> Tensor:
        left, right, resting_left, resting_right = vectors
        rank = len(left)
        inner = torch.cat([inputs @ right.T, inputs @ resting_right.T], 1)  # [n, k]
        scaled = inner * sigma
        ctx.save_for_backward(inputs, inner, sigma, *vectors)
        return (scaled[:, :rank] @ left).add_(scaled[:, rank:] @ resting_left)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, inner, sigma, left, right, resting_left, resting_right = ctx.saved_tensors
        rank, (to_inputs, to_sigma, to_left, to_right, *_) = len(left), ctx.needs_input_grad
        outer = torch.cat([gradient @ left.T, gradient @ resting_left.T], 1)  # [n, k]
        values = (outer * inner).sum(0) if to_sigma else None
        lefts = inner[:, :rank].T @ gradient if to_left else None
        rights = outer[:, :rank].T @ inputs if to_right else None
        found = None
        if to_inputs:
            outer.mul_(sigma)
            found = (outer[:, :rank] @ right).add_(outer[:, rank:] @ resting_right)
        return found, values, lefts, rights, None, None


class SSTLinear(FormLayer):
    """y = U diag(sigma) V^T x + b with k = min(in, out) singular values, of which r are active.

    Active are the first r: their vectors are trained, with the gradient of their direction, which
    is that of the loss without the factor sigma. Sigma is trained for all k.

    Attributes:
        left, right: the active vectors as rows: of U [r, out], and of V [r, in].
        sigma: [k], the active ones' first.
        resting_left, resting_right: the other vectors, [k - r, out] and [k - r, in]; not trained.
        bias: [out], or None.

    >>> layer = SSTLinear(6, 4, bias=False, rank=2)
    >>> layer.to_dense().shape, sum(parameter.numel() for parameter in layer.parameters())
    (torch.Size([4, 6]), 24)
    """

    begins_dense = True
    left: nn.Parameter
    right: nn.Parameter
    sigma: nn.Parameter
    resting_left: Tensor
    resting_right: Tensor

    def __init__(self, *sizes: Any, rank: int = 64, **where: Any) -> None:
        super().__init__(*sizes, rank=rank, **where)
        self.describe(ParameterMetadata())

    @property
    def rank(self) -> int:
        """How many vectors of each side are active."""
        return len(self.left)

    @classmethod
    def shapes(cls, in_features: int, out_features: int, rank: int = 64, **_: Any) -> TensorShapes:
        """Of what is trained."""
        values = min(in_features, out_features)
        rank = min(rank, values)
        return {"left": (rank, out_features), "right": (rank, in_features), "sigma": (values,)}

    @classmethod
    def resting(cls, in_features: int, out_features: int, rank: int = 64, **_: Any) -> TensorShapes:
        """Of the vectors that are not active."""
        count = max(0, min(in_features, out_features) - rank)
        return {"resting_left": (count, out_features), "resting_right": (count, in_features)}

    @classmethod
    def learned(cls, in_features: int, out_features: int, rank: int = 64, **_: Any) -> int:
        """Elements of the active vectors."""
        return min(rank, in_features, out_features) * (in_features + out_features)

    @classmethod
    def between(cls, in_features: int, out_features: int, **_: Any) -> int:
        """The products with all of V, before sigma."""
        return min(in_features, out_features)

    @classmethod
    def final(cls, in_features: int, out_features: int, **_: Any) -> int:
        """What is kept is so only when the layer's last product is there."""
        return 0

    def arguments(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def describe(self, like: ParameterMetadata) -> None:
        """Vectors keep the length 1 and sigma its sign, after each step, and none decays."""
        super().describe(like)
        plain = replace(like, weight_decay_multiplier=0.0)
        for vectors in (self.left, self.right):
            describe_parameter(vectors, replace(plain, settle=unit))
        describe_parameter(self.sigma, replace(plain, settle=not_negative))

    def fitted(self, weight: Tensor) -> Mapping[str, Tensor]:
        """The SVD of `weight` [out, in], in float64, the largest singular values active."""
        left, values, right = torch.linalg.svd(weight.detach().double(), full_matrices=False)
        return self.split(left.T, values, right)

    def split(self, left: Tensor, values: Tensor, right: Tensor) -> Mapping[str, Tensor]:
        """This layer's tensors, by name, of all vectors as rows and all values, active ones first.

        Args:
            left, values, right: [k, out], [k] and [k, in].
        """
        active, resting = slice(self.rank), slice(self.rank, None)
        return {
            "left": left[active],
            "right": right[active],
            "sigma": values,
            "resting_left": left[resting],
            "resting_right": right[resting],
        }

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [..., in] to [..., out]."""
        flat = inputs.reshape(-1, self.in_features)
        tensors: tuple[Tensor, ...] = (self.sigma, self.left, self.right)
        tensors = (*tensors, self.resting_left, self.resting_right)
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            flat, tensors = flat.to(dtype), tuple(tensor.to(dtype) for tensor in tensors)
        out: Tensor = _Spectral.apply(flat, *tensors)
        out = out if self.bias is None else out + self.bias.to(out.dtype)
        return out.reshape(*inputs.shape[:-1], self.out_features)

    def to_dense(self) -> Tensor:
        """The weight [out, in], multiplied in fp32 or wider.

        Where vectors are sharded, every rank calls this, and it is sharded by rows.
        """
        wide = torch.promote_types(self.left.dtype, torch.float32)
        left = torch.cat([whole(self.left), self.resting_left]).to(wide)
        right = torch.cat([whole(self.right), self.resting_right]).to(wide)
        weight = ((left.T * whole(self.sigma).to(wide)) @ right).to(self.left.dtype)
        return laid_out_like(weight, self.left) if is_sharded(self.left) else weight


def drawn(values: Tensor, count: int, *, seed: int, name: str, step: int) -> list[int]:
    """`count` places, ascending, drawn without replacement with probabilities as their values.

    One after the other, each among those that are left, as largest sums of a logarithm and Gumbel's
    noise are. Where all values are zero all places are as likely.

    >>> drawn(torch.tensor([0.0, 5.0, 0.0, 5.0]), 2, seed=0, name="layer", step=200)
    [1, 3]
    """
    values = values.detach().double().cpu()
    noise = uniform_(torch.empty(len(values)).double(), 0.0, 1.0, seed=seed, name=name, step=step)
    likely = values + (FLOOR * values.max() or 1.0)
    order = (likely.log() - (-noise.log()).log()).sort(descending=True, stable=True).indices
    return sorted(order[:count].tolist())


def places(chosen: Sequence[int], rank: int, count: int) -> list[int]:
    """Which old place each place takes, so that `chosen` are active: others swap with these.

    >>> places([1, 4], rank=2, count=5)
    [4, 1, 2, 3, 0]
    """
    found = list(range(count))
    leave = [place for place in range(rank) if place not in chosen]
    enter = [place for place in chosen if place >= rank]
    for one, other in zip(leave, enter, strict=True):
        found[one], found[other] = other, one
    return found


class SSTRounds(RunHook):
    """Swaps active vectors every `interval` updates, and decomposes weights anew each round.

    It keeps nothing: what it does follows from the step, the seed and the layer's tensors. A loop
    of one's own calls `after_optimizer(step, optimizer)`, with steps from 1, after each update.
    """

    def __init__(self, model: nn.Module, method: SST) -> None:
        self.method = method
        self.layers = {
            name.replace("_orig_mod.", ""): layer
            for name, layer in model.named_modules()
            if isinstance(layer, SSTLinear)
        }

    def before_update(self, step: int) -> None:
        """An update after which vectors are swapped is made at once."""
        self.reads_gradients = self.writes_weights = step % self.method.interval == 0

    @torch.no_grad()
    def after_optimizer(self, step: int, optimizer: torch.optim.Optimizer | None) -> None:
        """Swap where it is time, one layer at a time; every rank calls this."""
        if step % self.method.interval or optimizer is None:
            return
        trained: dict[str, Tensor] = {}
        for group in optimizer.param_groups:
            names = group.get("names") or group.get("param_names") or ()
            trained |= dict(zip(names, group["params"], strict=False))
        for name, layer in self.layers.items():
            own = ((leaf, f"{name}.{leaf}") for leaf in ("left", "right", "sigma"))
            found = {leaf: trained.get(full, getattr(layer, leaf)) for leaf, full in own}
            self._turn(name, layer, step, optimizer, found)

    def _turn(
        self,
        name: str,
        layer: SSTLinear,
        step: int,
        optimizer: torch.optim.Optimizer,
        trained: Mapping[str, Tensor],
    ) -> None:
        """Choose the vectors of one layer that are active from here on."""
        left = torch.cat([whole(trained["left"]), layer.resting_left])
        right = torch.cat([whole(trained["right"]), layer.resting_right])
        values, rank = whole(trained["sigma"]).clone(), layer.rank
        anew = step // self.method.interval % -(-len(values) // rank) == 0
        if anew:
            weight = (left.double().T * values) @ right.double()
            left, values, right = _same_everywhere(weight)
        chosen = drawn(values, rank, seed=self.method.seed, name=name, step=step)
        order = places(chosen, rank, len(values))
        for leaf, full in layer.split(left[order], values[order], right[order]).items():
            part, before = own_part(trained.get(leaf, getattr(layer, leaf)))
            part.copy_(full[before : before + len(part)])
        fresh: Sources = [None] * len(values)
        stayed = [place if place == row else None for row, place in enumerate(order[:rank])]
        for leaf in ("left", "right"):
            move_state_rows(optimizer, trained[leaf], fresh[:rank] if anew else stayed)
        move_state_rows(optimizer, trained["sigma"], fresh if anew else order)


def _same_everywhere(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors of U as rows, values, and V^T of an SVD; on all ranks the first one's.

    Signs and order may differ between hosts.
    """
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    found = left.T.contiguous(), values, right.contiguous()
    if dist.is_available() and dist.is_initialized():
        with peer_errors():
            for each in found:
                dist.broadcast(each, 0)
    return found


class SST(LinearMethod):
    """Each weight as its full SVD: all singular values train, and r of the vectors at a time.

    With k the smaller side, optimizer state and gradients are those of r (in + out) + k numbers,
    and weights of all ranks change, as every `interval` updates other vectors are active, drawn
    with probabilities as their singular values. A round of k / r swaps ends with another SVD, which
    makes vectors orthogonal again. What an optimizer keeps of vectors that become active is zero.

    It saves state and gradients, not weights: U and V are (in + out) / max(in, out) times the
    dense weight, so a run exports the dense weights alone, and those that rest are on every rank,
    also under FSDP2. A step takes more work than a dense one. Prefer it for new models where state
    is what does not fit; of a trained model `LoRA` adapts less and costs less. First active are the
    largest r; swaps need `run_hook`, which the trainer calls, `transformers.Trainer` by
    `SST(...).run_hook(model).callback()`.

    Args:
        rank: r, of layers whose smaller side is as large; else that side, so that all is active.
        interval: updates between swaps.
        seed: of the draws, next to step and layer.
        targets, exclude: see `LinearMethod`.

    Source: Zhao et al., "Sparse Spectral Training and Inference on Euclidean and Hyperbolic Neural
    Networks", ICML 2025, arXiv 2405.15481, section 4. Interval, and a round's length as k / r, are
    not the authors' code's; there is no warm-up of the rate after a swap.

    >>> import torch
    >>> from modicum.linears import SST
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> sst = SST(rank=2, interval=3, targets=("0",))
    >>> formed = sst.convert(model)
    >>> optimizer, rounds = torch.optim.AdamW(model.parameters(), lr=1e-2), sst.run_hook(model)
    >>> for step in range(1, 11):
    ...     model(torch.randn(8, 16)).square().mean().backward()
    ...     optimizer.step()
    ...     rounds.after_optimizer(step, optimizer)
    ...     optimizer.zero_grad()
    >>> formed.merge()
    >>> type(model[0]).__name__
    'Linear'
    """

    info = Info(
        name="sst",
        title="SST: a full SVD, of whose vectors some are trained in turn",
        room="linears",
        paper="Sparse Spectral Training and Inference on Euclidean and Hyperbolic Neural Networks, "
        "arXiv 2405.15481",
        claim="most of the gap between low-rank adapters and full training is closed, with an "
        "optimizer's state of their size",
        traits=(
            "holds_trained_forms",
            "mergeable",
            "corrects_gradients",
            "exact_resume",
            "compiles",
        ),
        excludes=(
            (
                "needs_no_gradients",
                "its vectors are kept at length 1 by an optimizer's steps, and here are none; "
                "leave the section linear out",
            ),
        ),
        evidence="reconstructed",
        claim_verdict="does not hold",
        against=Against("better", "LoRA of as much state"),
        reason="at rank 1 and width 128 it closes 0.38 of LoRA's gap to full training, where "
        "half was asked; its loss is 3.9 % below LoRA's at as much state",
        run_on_gpu=True,
        tiny={"rank": 2, "interval": 3},
    )
    search = SearchTable({"rank": IntegerRange(4, 256, 64, log=True)}, size="rank")
    layer = SSTLinear

    rank: PositiveInt = 64
    interval: PositiveInt = 200
    seed: Seed = 0

    def arguments(self, in_features: int, out_features: int) -> Mapping[str, Any]:
        return {"rank": min(self.rank, in_features, out_features)}

    def run_hook(self, bound: FormContext | nn.Module) -> SSTRounds:
        """What swaps the vectors of a model's layers, wherever it is trained."""
        return SSTRounds(bound.model if isinstance(bound, FormContext) else bound, self)

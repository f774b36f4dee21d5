"""AdamW with both moments in 8 bits: a quarter of its state, in blocks along rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from modicum.core.contracts.ledger import Entry, Ledger, OptimizerQuery, TrainedParameter
from modicum.core.contracts.method import (
    Against,
    Betas,
    Info,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
)
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.search import SearchChoice, SearchTable
from modicum.core.ranks.sharding import cut_alike, is_sharded, own_part
from modicum.optim.coded_rows import (
    blocks_of,
    chunk_rows,
    decode,
    encode,
    is_coded,
    kept_bytes,
    width_of,
)
from modicum.optim.copies import CopiedOptimizer
from modicum.optim.kept import StateShape
from modicum.optim.ledger import gradients
from modicum.optim.parts import COUNTER
from modicum.optim.row_steps import wide
from modicum.optim.saved_dtypes import load_as_saved
from modicum.optim.with_gradients import with_gradients

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # and whether they have a sign
# Copies of a chunk at the worst moment, in quarters of fp32: both moments, and what coding one of
# them takes: magnitudes, scaled values, codes, borders, and a comparison.
_QUARTERS = 6 * 4 + 1


class AdamW8bit(CopiedOptimizer):
    """AdamW whose moments are codes of 8 bits: 2.03 bytes an element instead of 8.

    Of a matrix both moments are kept as codes on a dynamic map, with a scale for each block of 256
    elements of a row. Vectors, and what has fewer than `smallest` elements, have fp32 moments. All
    arithmetic is fp32, of a chunk of rows at a time. A code is the same whoever holds its row, so
    sharded parameters (FSDP2, ZeRO) are updated as unsharded ones are, and a run resumes to the bit
    with any number of ranks.

    Prefer it where AdamW's moments are what does not fit; it is slower on a CPU, where codes are
    looked up one by one. Weights in bf16 are rounded to the nearest: small updates are lost, so
    keep trained weights in fp32, as the trainer does.

    Args:
        lr: the learning rate of groups that name none.
        betas: (beta1, beta2), the decay of the first and the second moment.
        epsilon: is added to the root of the second moment.
        weight_decay: of groups that name none; each step takes lr weight_decay W off W.
        smallest: elements of the smallest parameter whose moments are coded.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861,
    sections 2 and 3. Different here: blocks do not cross rows, and a second moment never becomes
    zero by rounding, which would leave a step without bound.

    >>> from modicum.optim import AdamW8bit
    >>> layer = torch.nn.Linear(256, 64)
    >>> optimizer = AdamW8bit(layer.parameters(), lr=1e-2)
    >>> layer(torch.ones(256)).sum().backward()
    >>> optimizer.step()
    >>> state = optimizer.state[layer.weight]
    >>> state["exp_avg"].dtype, tuple(state["exp_avg_scale"].shape)
    (torch.uint8, (64, 1))
    """

    info = Info(
        name="adamw8bit",
        title="AdamW with 8-bit moments",
        room="optim",
        paper="8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861",
        claim="a quarter of the state of 32-bit Adam, at its performance, without a change of "
        "hyper-parameters",
        traits=("exact_resume", "compiles"),
        evidence="against paper",
        claim_verdict="holds",
        against=Against("equal", "even levels in the same blocks"),
        reason="state is 75 % less than AdamW's, and at AdamW's best learning rate the loss is "
        "within 0.2 % of its, less than seeds spread; even levels in blocks do as well here",
        run_on_gpu=True,
        slot="optimizer",
        tiny={"weight_decay": 0.1, "smallest": 64},
    )
    search = SearchTable({"betas": SearchChoice(((0.9, 0.95), (0.9, 0.999)), (0.9, 0.95))})

    def __init__(
        self,
        params: ParamsT,
        lr: PositiveFloat = 1e-3,
        *,
        betas: Betas = (0.9, 0.95),
        epsilon: PositiveFloat = 1e-8,
        weight_decay: NonNegativeFloat = 0.0,
        smallest: PositiveInt = 4096,
    ) -> None:
        self.method = self.value(
            betas=betas, epsilon=epsilon, weight_decay=weight_decay, smallest=smallest
        )
        self.remake()
        defaults = {"lr": lr, "betas": betas, "eps": epsilon, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def remake(self) -> None:
        """Know from which size on moments are coded."""
        self.smallest = int(self.method.fields()["smallest"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Raises:
            InputError: a gradient is sparse, or a parameter complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, group in with_gradients(self.param_groups):
            self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        state, coded = self._state(parameter), is_coded(parameter.shape, self.smallest)
        state["step"] += 1
        assert parameter.grad is not None
        weight, gradient = own_part(parameter)[0], own_part(parameter.grad)[0]
        held = {name: own_part(state[name])[0] for name in state if name != "step"}
        if not coded:
            moments = {name: held[name] for name in MOMENTS}
            _step(weight, gradient, moments, group, int(state["step"]))
            return
        width, each = width_of(parameter.shape), chunk_rows(parameter.shape, weight.device.type)
        for start in range(0, len(weight), each):
            rows = slice(start, start + each)
            codes = {name: held[name][rows].view(-1, width) for name in MOMENTS}
            scales = {name: held[f"{name}_scale"][rows] for name in MOMENTS}
            piece = weight[rows]
            moments = {
                name: decode(codes[name], scales[name], signed=signed).reshape(piece.shape)
                for name, signed in MOMENTS.items()
            }
            _step(piece, gradient[rows], moments, group, int(state["step"]))
            for name, signed in MOMENTS.items():
                new, scale = encode(moments.pop(name).view(-1, width), signed=signed)
                codes[name].copy_(new)
                scales[name].copy_(scale)

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What is kept of a parameter: zeros where it is new, laid out as the parameter is."""
        state: dict[str, Any] = self.state[parameter]
        coded = is_coded(parameter.shape, self.smallest)
        if "step" not in state:
            state["step"] = torch.zeros(())
            for name in MOMENTS:
                dtype = torch.uint8 if coded else torch.float32
                state[name] = torch.zeros_like(
                    parameter, dtype=dtype, memory_format=torch.contiguous_format
                )
        if not coded:
            return state
        (part, before), blocks = own_part(parameter), blocks_of(parameter.shape)
        for name in (f"{name}_scale" for name in MOMENTS):
            scale = state.get(name)
            if scale is None:
                scale = torch.zeros(len(part), blocks, device=part.device)
            elif is_sharded(parameter) and not is_sharded(scale):
                # A checkpoint that is taken up gives all rows.
                scale = scale[before : before + len(part)].clone()
            else:
                continue
            state[name] = cut_alike(scale, parameter, blocks)
        return state

    def rowed(self, parameter: Tensor) -> list[str]:
        """Blocks of codes lie within a row each, so that scales have rows too."""
        return [f"{name}_scale" for name in MOMENTS]

    def keeps_alike(self, parameter: Tensor, shape: Sequence[int]) -> bool:
        """One that is too small for codes has fp32 moments."""
        return is_coded(parameter.shape, self.smallest) == is_coded(shape, self.smallest)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; tensors keep the dtypes in which they were saved.

        Raises:
            InputError: it is of another optimizer, or of other fields; nothing is changed by then.
        """
        load_as_saved(self, state_dict, self._kept)

    def _kept(self, parameter: Tensor) -> dict[str, StateShape]:
        """What is kept of a parameter next to the count of its steps."""
        shape, coded = tuple(parameter.shape), is_coded(parameter.shape, self.smallest)
        dtype = torch.uint8 if coded else torch.float32
        kept: dict[str, StateShape] = dict.fromkeys(MOMENTS, (shape, dtype))
        if coded:
            scale = (shape[0], blocks_of(shape))
            kept |= {f"{name}_scale": (scale, torch.float32) for name in MOMENTS}
        return kept

    @staticmethod
    def spends(value: OptimizerMethod, at: OptimizerQuery) -> Ledger:
        """Codes and scales of the rows that a rank holds, and copies of a chunk of rows."""
        smallest = value.fields()["smallest"]
        kept = sum(COUNTER + 2 * _moment(p, at.shards, smallest) for p in at.parameters)
        device = "cpu" if at.batch is None else at.batch.device
        spent = (_scratch(p, at.shards, smallest, device) for p in at.parameters)
        scratch = max(spent, default=0)
        return gradients(at) + Ledger.of(
            Entry("optimizer", kept, what="8-bit moments"),
            Entry("workspace", scratch, ("step",), "of a chunk's update"),
        )


def _step(
    weight: Tensor,
    gradient: Tensor,
    moments: Mapping[str, Tensor],
    group: Mapping[str, Any],
    age: int,
) -> None:
    """AdamW's update of weight and moments, in place and in fp32; a weight in fp64 stays so."""
    (first, second), rate = group["betas"], group["lr"]
    mean, square, gradient = moments["exp_avg"], moments["exp_avg_sq"], gradient.float()
    mean.mul_(first).add_(gradient, alpha=1 - first)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    root = square.sqrt().div_(math.sqrt(1 - second**age)).add_(group["eps"])
    update = torch.div(mean, root, out=root)
    new = wide(weight).mul_(1 - rate * group["weight_decay"])
    new.sub_(update, alpha=rate / (1 - first**age))
    if new.data_ptr() != weight.data_ptr():
        weight.copy_(new)


def _moment(parameter: TrainedParameter, shards: int, smallest: int) -> int:
    coded = is_coded(parameter.shape, smallest)
    return kept_bytes(parameter.shape, parameter.rows(0, shards), coded=coded)


def _scratch(parameter: TrainedParameter, shards: int, smallest: int, device: str) -> int:
    """Bytes of fp32 copies in a parameter's update."""
    rows = parameter.rows(0, shards)
    if not is_coded(parameter.shape, smallest):
        # The update; where weights are in bf16, weight and gradient too.
        copies = 3 if parameter.element_bytes < 4 else 1
        return 4 * copies * rows * width_of(parameter.shape)
    width = blocks_of(parameter.shape) * min(256, width_of(parameter.shape))
    each = chunk_rows(parameter.shape, device)
    # The codes of the chunk before are let go of last. Of a chunk there are three scales a block.
    quarters = _QUARTERS + 4 * (rows > each)
    return min(rows, each) * (quarters * max(width, 1) + 12 * blocks_of(parameter.shape))

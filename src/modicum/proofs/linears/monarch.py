"""The proof of Monarch layers: fast products, and better than other forms of as many parameters.

Products are timed on one thread in turns, 256 rows, at several widths. Quality is that of a
character model of Python's standard library (`text_bench.py`), its projections Monarch with four
blocks, dense, low-rank factors of as many elements, or blocks along the diagonal alone, from random
weights with the same batches; each at the best of its learning rates.

Reduced: the paper trains vision transformers and GPT-2 on GPUs, twice as fast at equal quality.
Here the decoder is far below the widths at which the products are faster; so speed and quality are
shown apart, and not in one run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from modicum.core.layers.form_plan import LayerForm
from modicum.core.layers.linear_forms import DENSE, form_of, make_linear
from modicum.core.random import normal_
from modicum.linears.monarch import Monarch
from modicum.models.llama import Llama
from modicum.optim import AdamW
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.meters import in_turns
from modicum.proofs.linears.formed_text import FormedArm, FormedSize, best_arm, formed_sweep
from modicum.proofs.optim.text_bench import Plain, Started

RATES = (4e-3, 8e-3, 1.6e-2)
# In the quick run an arm has one rate, the best of it and of twice and half of it; the full one
# sweeps.
QUICK_RATES = {"Monarch": 1.6e-2, "dense": 4e-3, "low-rank": 8e-3, "diagonal": 8e-3}
QUICK = FormedSize(width=64, layers=2, mlp_width=172, tokens=64, rows=8, steps=200)
FULL = FormedSize(width=128, layers=2, mlp_width=344, tokens=64, rows=8, steps=1000)
ROWS, WIDTHS, WIDE = 256, (64, 128, 256, 512, 1024, 2048), 2048


class DiagonalBlocks(nn.Module):
    """y = x W^T, W [out, in] with blocks along its diagonal alone, which divide both sides."""

    def __init__(self, ins: int, outs: int, blocks: int) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.empty(blocks, ins // blocks, outs // blocks))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [..., in] to [..., out]."""
        parts = inputs.unflatten(-1, (len(self.kept), -1))
        return torch.einsum("...bc,bcr->...br", parts, self.kept).flatten(-2)


@dataclass(frozen=True)
class Diagonal:
    """Projections of a dense decoder with blocks along the diagonal in their place.

    Args:
        blocks: in each.
    """

    blocks: int

    def start(self, model: Llama, rate: float) -> Started:
        """Replace the projections, whose entries are as large on average, and train all."""
        for name, layer in list(model.named_modules()):
            if name.endswith("_proj") and form_of(layer) is DENSE:
                weight = layer.get_parameter("weight")
                made = DiagonalBlocks(weight.shape[1], weight.shape[0], self.blocks)
                std = weight.detach().std().item() * self.blocks**0.5
                normal_(made.kept, seed=0, name=name, std=std)
                model.set_submodule(name, made)
        return Plain(AdamW.value()).start(model, rate)


def prove(run: ProofRun) -> None:
    """Time the products, and train the decoder with each form."""
    run.seeds = (0, 1, 2) if run.full else (0,)
    _speed(run)
    dense = FULL if run.full else QUICK
    form, steps = run.contender(
        (Monarch(blocks=4), dense.steps),
        null=(Monarch(blocks=1, rank=1), dense.steps // 2),
        null_is="one part of rank 1, in half of the steps",
        planted=(Monarch(blocks=3), dense.steps),
    )
    mine, like = replace(dense.taking(form), steps=steps), dense.taking(Monarch(blocks=4))
    sweep = formed_sweep(run)
    arms = {
        "Monarch": FormedArm(mine),
        "dense": FormedArm(dense),
        "low-rank": FormedArm(like.low_rank()),
        "diagonal": FormedArm(dense, Diagonal(2)),
    }
    best = {
        name: best_arm(run, sweep, name, arm, RATES, QUICK_RATES, baseline=arm.size is not mine)
        for name, arm in arms.items()
    }
    losses = {name: each.each("loss") for name, each in best.items()}
    for rival in ("dense", "low-rank", "diagonal"):
        run.figure(
            f"held-out loss (nats), over that of {rival} layers",
            method=best["Monarch"].mean("loss"),
            baseline=best[rival].mean("loss"),
        )
    sizes = {name: sum(size.elements.values()) for name, size in (("mine", mine), ("like", like))}
    low = sum(like.low_rank().elements.values())
    run.figure(
        "elements of the projections, over low-rank ones", method=sizes["mine"], baseline=low
    )
    over = ratios(losses["Monarch"], losses["dense"])
    loss = sum(over) / len(over)
    run.at_most("loss, of the dense decoder's", loss, 1.02, seeds=over)
    better = min(("low-rank", "diagonal"), key=lambda name: best[name].mean("loss"))
    over = ratios(losses["Monarch"], losses[better])
    loss = sum(over) / len(over)
    run.at_most("loss, of the better of low-rank and block-diagonal layers", loss, 1.0, seeds=over)
    over = ratios(losses["Monarch"], losses["low-rank"])
    run.against("low-rank factors of as many parameters", "held-out loss at equal steps", over)


def _speed(run: ProofRun) -> None:
    """Time products of Monarch layers and of dense ones."""
    monarch = {blocks: LayerForm("monarch", {"blocks": blocks}) for blocks in (4, 16)}
    timed = run.contender(
        monarch,
        null=dict.fromkeys(monarch, LayerForm()),
        null_is="a dense product instead",
        planted=monarch,
    )
    for blocks, form in timed.items():
        gains = {width: _gain(width, form, 20 if run.full else 7) for width in WIDTHS}
        faster = [w for w in WIDTHS if all(gains[x] > 1 for x in WIDTHS if x >= w)]
        run.figure(
            f"width from which {blocks} blocks take less time than dense (0: none)",
            method=faster[0] if faster else 0,
            baseline=WIDE,
            claimed="about 1024",
        )
        run.figure(
            f"times as fast as dense, {blocks} blocks, {WIDE} wide", method=gains[WIDE], baseline=1
        )
    run.at_least(f"time of a dense product, of 16 blocks' at {WIDE}", gains[WIDE], 3.0)


@torch.no_grad()
def _gain(width: int, form: LayerForm, turns: int) -> float:
    """How many times as fast the product of a form is, forward, as a dense one."""
    x = normal_(torch.empty(ROWS, width), seed=0, name="x")
    layers = {}
    for name, made in (("dense", LayerForm()), ("form", form)):
        layers[name] = make_linear(made, width, width, False)
        for parameter in layers[name].parameters():
            normal_(parameter, seed=0, name=name)
    repeats = max(1, 512 // width)

    def step(name: str) -> None:
        for _ in range(repeats):
            layers[name](x)

    taken = in_turns({name: partial(step, name) for name in layers}, turns)
    return taken["dense"].fastest / taken["form"].fastest

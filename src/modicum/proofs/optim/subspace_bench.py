"""What proofs of subspaces share: what a new one costs, what it has of real gradients, their text.

Gradients are those of a character model that AdamW has trained for a while. A basis is judged by
the energy of the r columns that the same rule selects in it, so that a random basis has the
advantage of selection too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.random import normal_
from modicum.models import create
from modicum.optim import AdamW
from modicum.optim.dct import dct_basis
from modicum.optim.projectors import Projector
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.meters import in_turns
from modicum.proofs.bench.sweep import Sweep
from modicum.proofs.optim.text_bench import Text, TextArm, TextResult, TextSize
from modicum.proofs.optim.text_bench import loss as loss_of

QUICK = TextSize(width=96, layers=1, mlp_width=256, tokens=32, rows=8, steps=120)
# That of GaLore's proof, whose baselines are trained once for both.
FULL = TextSize(width=128, layers=2, mlp_width=344, tokens=64, rows=8, steps=900)
_SEED = 20  # of random bases

BasisOf = Callable[[int], Tensor]


def cosines(width: int) -> Tensor:
    """The columns of the DCT basis."""
    return dct_basis(width, torch.device("cpu")).mT


def random_basis(width: int, draw: int = 0) -> Tensor:
    """Columns of a random orthogonal matrix [width, width]."""
    start = normal_(torch.empty(width, width), seed=_SEED + draw, name=f"basis {width}")
    return torch.linalg.qr(start).Q


def gradients(size: TextSize, seed: int, *, steps: int = 60) -> list[Tensor]:
    """The gradients of a decoder's matrices, the smaller dimension last, after a short training."""
    text, model = Text(size, seed), create(size.model, seed=seed)
    optimizer = AdamW(optimizer_groups(model, learning_rate=2e-3, weight_decay=0.0))
    for step in range(steps + 1):
        optimizer.zero_grad()
        loss_of(model, text.batch(f"step {step}", size.rows, text.halves[0])).backward()
        if step < steps:
            optimizer.step()
    found = [p.grad for n, p in model.named_parameters() if p.ndim == 2 and "proj" in n]
    return [
        grad if grad.shape[0] >= grad.shape[1] else grad.mT for grad in found if grad is not None
    ]


def energy(found: Sequence[Tensor], basis_of: BasisOf, part: int) -> float:
    """The share of energy in the n // part columns of a basis that have the largest sums."""
    inside = total = 0.0
    for gradient in found:
        turned = gradient @ basis_of(gradient.shape[1])
        rank = gradient.shape[1] // part
        chosen = turned.abs().sum(0).topk(rank).indices
        inside += turned[:, chosen].square().sum().item()
        total += gradient.square().sum().item()
    return inside / total


def best_energy(found: Sequence[Tensor], part: int) -> float:
    """The same of the leading singular vectors, of which no subspace has more."""
    inside = total = 0.0
    for gradient in found:
        values = torch.linalg.svdvals(gradient).square()
        inside += values[: gradient.shape[1] // part].sum().item()
        total += values.sum().item()
    return inside / total


def refresh_speed(
    run: ProofRun, ours: Projector, theirs: Projector, name: str, width: int, repeats: int
) -> float:
    """How many times as long as ours theirs takes for a new subspace of a square gradient."""
    matrix = normal_(torch.empty(width, width), seed=0, name="gradient")
    times = in_turns(
        {
            "ours": lambda: ours.refresh(matrix, 0, 0),
            "theirs": lambda: theirs.refresh(matrix, 0, 0),
        },
        repeats,
    )
    figure = run.figure(
        f"seconds of a new subspace, width {width}, over {name}",
        method=times["ours"].median,
        baseline=times["theirs"].median,
    )
    return 1 / figure.ratio


def text_sweep(run: ProofRun, quick: TextSize = QUICK) -> Sweep[TextArm, TextResult]:
    """Trainings on text by arm, rate and seed; the rate is chosen at the first seed."""
    size = FULL if run.full else quick

    def trained(arm: TextArm, rate: float, seed: int) -> TextResult:
        return Text(size, seed).train(arm, rate)

    return Sweep(
        run,
        trained,
        lambda result: result.loss,
        chosen_by="first",
        shared={"bench": "text", "size": size},
        kind=TextResult,
    )

"""Digits as sequences of 32 pairs of pixels: a small attention is adapted to turned ones.

One layer of four heads of width 4 reads the pairs with their places, the mean goes to a linear
classifier. It learns upright digits, and then LoRA on its projections learns digits that are turned
by 90 degrees, with exact attention or another instead. Queries and keys are normalized and scores
divided by the width, so that Gamma and scores are at most 1 whatever is learned; without that
training drives scores to 80, far above the threshold, and the diagnosis says so.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.lora import LoRA
from modicum.core.random import derive_seed
from modicum.proofs.adapters.attention_bench import Attend, fused
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.digits import digits

WIDTH, HEADS, PAIRS, CLASSES = 16, 4, 32, 10
TRAINED, BATCH = 1297, 32
STEPS, ADAPTING_STEPS = 300, 200
RATE, ADAPTING_RATE = 1e-2, 3e-2


class PixelAttention(nn.Module):
    """Pixels [B, 64] to logits [B, 10]; `attend` may be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.pixel, self.place = nn.Linear(2, WIDTH), nn.Embedding(PAIRS, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.classify = nn.Linear(WIDTH, CLASSES)
        self.attend: Attend = fused

    def forward(self, pixels: Tensor) -> Tensor:
        """Read the pairs, mix them once, classify the mean."""
        x = self.pixel(pixels.unflatten(-1, (PAIRS, 2))) * self.place.weight
        q, k, v = (
            part(x).unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = (F.rms_norm(one, (WIDTH // HEADS,)) for one in (q, k))
        mixed = self.attend(q / (WIDTH // HEADS), k, v).transpose(1, 2).flatten(-2)
        return self.classify(F.gelu(x + self.o(mixed)).mean(1))


class TurnedDigitsBench:
    """The data, the network that knows upright digits, and adaptations to turned ones."""

    def __init__(self, run: ProofRun, seed: int) -> None:
        images, labels = digits(run)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        self.labels, self.seed = labels[order], seed
        self.upright = images[order].flatten(1)
        self.turned = images[order].rot90(1, (1, 2)).flatten(1)
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(seed, "pixel attention"))
            self.base = PixelAttention()
        self._train(self.base, self.upright, list(self.base.parameters()), STEPS, RATE)

    def accuracy(self, attend: Attend) -> float:
        """Adapt with this attention; the share of turned test images that it gets right."""
        model = copy.deepcopy(self.base)
        model.attend = attend
        adapter = LoRA(rank=2, targets=("q", "k", "v", "o")).attach(model, seed=self.seed)
        trained = [*adapter.parameters()]
        self._train(model, self.turned, trained, ADAPTING_STEPS, ADAPTING_RATE)
        with torch.no_grad():
            found = model(self.turned[TRAINED:]).argmax(-1) == self.labels[TRAINED:]
        return float(found.float().mean())

    def _train(
        self, model: nn.Module, images: Tensor, trained: Sequence[Tensor], steps: int, rate: float
    ) -> None:
        optimizer = torch.optim.Adam(trained, lr=rate)
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(steps):
            rows = torch.randint(TRAINED, (BATCH,), generator=generator)
            loss = F.cross_entropy(model(images[rows]), self.labels[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

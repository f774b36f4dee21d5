"""The testbed on which optimizers are compared: a character model of Python's standard library.

The text is the source of some of its modules, of whatever version runs this, in printable ASCII;
the last tenth is held out. All contenders get the same batches, a warm-up over a tenth of the
steps, a cosine to a tenth of the rate, clipping at 1 and the same first weights; each is judged at
the best of its own learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters import LoRA
from modicum.core.contracts.parameters import trainable
from modicum.core.machine.memory import bytes_by_kind
from modicum.core.random import derive_seed
from modicum.models import ModelConfig, create
from modicum.models.llama import Llama
from modicum.optim import AdamW

MODULES = (
    "argparse", "ast", "calendar", "configparser", "dataclasses", "datetime", "difflib", "doctest",
    "enum", "fractions", "inspect", "ipaddress", "locale", "mailbox", "optparse", "pickle", "pydoc",
    "smtplib", "socket", "statistics", "subprocess", "tarfile", "threading", "traceback", "typing",
    "turtle", "uuid", "zipfile",
)  # fmt: skip
SYMBOLS = 96  # the printable characters of ASCII, and the end of a line
WARM_UP, LAST_RATE, CLIP = 0.1, 0.1, 1.0


@dataclass(frozen=True)
class TextSize:
    """How large the experiment is: the decoder, the batch, the steps."""

    width: int
    layers: int
    mlp_width: int
    tokens: int
    rows: int
    steps: int

    @property
    def model(self) -> ModelConfig:
        """The decoder over characters."""
        return ModelConfig(
            vocabulary_size=SYMBOLS,
            width=self.width,
            layers=self.layers,
            heads=max(1, self.width // 32),
            mlp_width=self.mlp_width,
            context=self.tokens,
        )


@dataclass(frozen=True)
class TextResult:
    """What a training run ended with: the held-out loss in nats, and bytes of optimizer state.

    Args:
        losses: of each seed, where `loss` is their mean.
    """

    learning_rate: float
    loss: float
    state_bytes: int
    losses: tuple[float, ...] = ()


class Loop:
    """Updates by one or several optimizers, whose groups' rates follow one schedule."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, list(optimizers)

    def update(self, step: int, factor: float) -> None:
        """Clip, and step with `factor` times the groups' own rates."""
        nn.utils.clip_grad_norm_([p for _, p in trainable(self.model)], CLIP)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * group["base_learning_rate"]
            optimizer.step()
            optimizer.zero_grad()


class AdaptedLoop(Loop):
    """AdamW on LoRA's factors and, by an optimizer of its own, on what LoRA does not adapt."""

    def __init__(self, model: Llama, rate: float, rank: int, every: int) -> None:
        super().__init__(model, [])
        self.rate, self.rank, self.every = rate, rank, every
        self.adapter = LoRA(rank=rank).attach(model)
        layers = {f"{site}.weight" for site in self.adapter.sites}
        self.rest = [p for name, p in model.named_parameters() if name not in layers]
        factors = {id(parameter) for parameter in self.adapter.parameters()}
        self.rest = [p for p in self.rest if id(p) not in factors]
        self.optimizers = [self._adam(self.rest), self._adam(list(self.adapter.parameters()))]

    def _adam(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        for parameter in parameters:
            parameter.requires_grad_(True)
        group = {"params": parameters, "lr": self.rate, "base_learning_rate": self.rate}
        return AdamW.value(betas=(0.9, 0.999)).bind([group])

    def update(self, step: int, factor: float) -> None:
        """As in `Loop`; a new pair of factors warms up over ten steps."""
        age = step % self.every
        if step and not age:
            self.adapter.merge()
            self.adapter.detach()
            self.adapter = LoRA(rank=self.rank).attach(self.model, seed=step)
            for parameter in self.rest:
                parameter.requires_grad_(True)
            self.optimizers[1] = self._adam(list(self.adapter.parameters()))
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            return
        for group in self.optimizers[1].param_groups:
            group["base_learning_rate"] = self.rate * min(1.0, (age + 1) / 10 if step > age else 1)
        super().update(step, factor)


TextContender = Callable[[Llama, float], Loop]


class Text:
    """The task: text, batches, and runs of it."""

    def __init__(self, size: TextSize, seed: int = 0) -> None:
        self.size, self.seed = size, seed

    @cached_property
    def halves(self) -> tuple[Tensor, Tensor]:
        """What is trained on, and what is held out: symbols, int64 [characters]."""
        parts = []
        for name in MODULES:
            spec = find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            parts.append(Path(spec.origin).read_bytes())
        codes = torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8).long()
        kept = codes[(codes == ord("\n")) | ((codes >= 32) & (codes < 127))]
        symbols = torch.where(kept == ord("\n"), SYMBOLS - 1, kept - 32)
        cut = len(symbols) * 9 // 10
        return symbols[:cut], symbols[cut:]

    def batch(self, name: str, rows: int, text: Tensor) -> Tensor:
        """Rows of the text from places that depend on the name: [rows, tokens + 1]."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, name))
        length = self.size.tokens + 1
        places = torch.randint(len(text) - length, (rows,), generator=generator)
        return text[places[:, None] + torch.arange(length)]

    def train(self, contender: TextContender, learning_rate: float) -> TextResult:
        """A model from the same first weights, trained by a contender."""
        model = create(self.size.model, seed=self.seed)
        loop = contender(model, learning_rate)
        for step in range(self.size.steps):
            rows = self.batch(f"step {step}", self.size.rows, self.halves[0])
            loss(model, rows).backward()
            loop.update(step, schedule(step, self.size.steps))
        state = sum(bytes_by_kind(model, each)["optimizer"] for each in loop.optimizers)
        return TextResult(learning_rate, self.held_out(model), state)

    @torch.no_grad()
    def held_out(self, model: Llama) -> float:
        """The mean loss on 256 held-out rows, in nats a character."""
        rows = self.batch("held out", 256, self.halves[1]).split(64)
        return sum(loss(model, part).item() for part in rows) / len(rows)


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    """The mean cross-entropy of the next character."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def schedule(step: int, steps: int) -> float:
    """The factor on the learning rate: warm-up, then a cosine to a tenth."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))

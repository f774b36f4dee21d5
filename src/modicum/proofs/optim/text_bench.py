"""The testbed on which optimizers are compared: a character model of Python's standard library.

The text is the source of some of its modules, of whatever version runs this, in printable ASCII;
the last tenth is held out. All contenders get the same batches, a warm-up over a tenth of the
steps, a cosine to a tenth of the rate, clipping at 1 and the same first weights; each is judged at
the best of its own learning rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters import LoRA
from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.contracts.run_hooks import RunHook
from modicum.core.machine.memory import bytes_by_kind
from modicum.core.random import derive_seed
from modicum.models import ModelConfig, create
from modicum.models.llama import Llama
from modicum.optim import AdamW
from modicum.proofs.bench.training import RateSchedule, train

MODULES = (
    "argparse", "ast", "calendar", "configparser", "dataclasses", "datetime", "difflib", "doctest",
    "enum", "fractions", "inspect", "ipaddress", "locale", "mailbox", "optparse", "pickle", "pydoc",
    "smtplib", "socket", "statistics", "subprocess", "tarfile", "threading", "traceback", "typing",
    "turtle", "uuid", "zipfile",
)  # fmt: skip
SYMBOLS = 96  # the printable characters of ASCII, and the end of a line
CLIP = 1.0
SCHEDULE = RateSchedule(0.1, "cosine", last=0.1, delayed=True)


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
    """What a training run ended with: the held-out loss in nats, and bytes of optimizer state."""

    loss: float
    state_bytes: int


class TextArm(Protocol):
    """A way to train the model; hashable, and `repr` says all that decides what comes of it."""

    def start(self, model: Llama, rate: float) -> Started:
        """Optimizers for the model at a learning rate."""
        ...


@dataclass
class Started:
    """An arm at work.

    Args:
        optimizers: are stepped; a group's own rate is its `base_learning_rate`.
        before_update: is called with the step when gradients are there.
        hook: takes part in the run.
    """

    optimizers: list[torch.optim.Optimizer]
    before_update: Callable[[int], None] | None = None
    hook: RunHook | None = None


@dataclass(frozen=True)
class Plain:
    """Every weight trained by one optimizer, matrices at a part of the learning rate."""

    method: OptimizerMethod
    matrices: float = 1.0

    def start(self, model: Llama, rate: float) -> Started:
        """Optimizers for the model at a learning rate."""
        groups = optimizer_groups(model, learning_rate=rate, weight_decay=0.0)
        for group in groups:
            group["base_learning_rate"] = rate * (self.matrices if group["matrix"] else 1.0)
        return Started([self.method.bind(groups)])


@dataclass(frozen=True)
class Adapted:
    """Linear layers trained by LoRA of a rank, merged and begun anew every so many steps.

    All else is trained as it is: from random weights nothing can stay frozen. A new pair of factors
    warms up over ten steps.
    """

    rank: int
    every: int

    def start(self, model: Llama, rate: float) -> Started:
        """Optimizers for the model at a learning rate: of LoRA's factors, and of all else."""
        adapter = LoRA(rank=self.rank).attach(model)
        layers = {f"{site}.weight" for site in adapter.sites}
        factors = {id(parameter) for parameter in adapter.parameters()}
        other = [p for name, p in model.named_parameters() if name not in layers]
        other = [p for p in other if id(p) not in factors]
        started = Started([_adam(other, rate), _adam(list(adapter.parameters()), rate)])

        def renew(step: int) -> None:
            nonlocal adapter
            age = step % self.every
            if step and not age:
                # What was just learned is merged; the gradients were those of the old factors.
                adapter.merge()
                adapter.detach()
                adapter = LoRA(rank=self.rank).attach(model, seed=step)
                for parameter in other:
                    parameter.requires_grad_(True)
                started.optimizers[1] = _adam(list(adapter.parameters()), rate)
                for optimizer in started.optimizers:
                    optimizer.zero_grad()
            elif step > age:
                for group in started.optimizers[1].param_groups:
                    group["lr"] *= min(1.0, (age + 1) / 10)

        started.before_update = renew
        return started


def _adam(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    for parameter in parameters:
        parameter.requires_grad_(True)
    group = {"params": parameters, "lr": rate, "base_learning_rate": rate}
    return AdamW.value(betas=(0.9, 0.999)).bind([group])


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
        symbols = symbols_of(b"\n".join(parts))
        cut = len(symbols) * 9 // 10
        return symbols[:cut], symbols[cut:]

    def batch(self, name: str, rows: int, text: Tensor) -> Tensor:
        """Rows of the text from places that depend on the name: [rows, tokens + 1]."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, name))
        length = self.size.tokens + 1
        places = torch.randint(len(text) - length, (rows,), generator=generator)
        return text[places[:, None] + torch.arange(length)]

    def train(self, arm: TextArm, learning_rate: float) -> TextResult:
        """A model from the same first weights, trained by an arm."""
        model = create(self.size.model, seed=self.seed)
        started = arm.start(model, learning_rate)

        def loss_of(step: int) -> Tensor:
            return loss(model, self.batch(f"step {step}", self.size.rows, self.halves[0]))

        train(
            started.optimizers,
            loss_of,
            self.size.steps,
            schedule=SCHEDULE,
            clip=CLIP,
            before_update=started.before_update,
            hooks=RunHooks({"method": started.hook}),
        )
        state = sum(bytes_by_kind(model, each)["optimizer"] for each in started.optimizers)
        return TextResult(self.held_out(model), state)

    @torch.no_grad()
    def held_out(self, model: Llama) -> float:
        """The mean loss on 256 held-out rows, in nats a character."""
        rows = self.batch("held out", 256, self.halves[1]).split(64)
        return sum(loss(model, part).item() for part in rows) / len(rows)


def symbols_of(text: bytes) -> Tensor:
    """The printable characters of ASCII of a text, and its ends of lines, as numbers.

    >>> symbols_of(b" !\\t\\n").tolist()
    [0, 1, 95]
    """
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    kept = codes[(codes == ord("\n")) | ((codes >= 32) & (codes < 127))]
    return torch.where(kept == ord("\n"), SYMBOLS - 1, kept - 32)


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    """The mean cross-entropy of the next character."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

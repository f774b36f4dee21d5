"""The contenders of `optimizers.py`: our methods at a 30 M-parameter decoder's shapes, and peers.

A peer that is not installed, or that does not start here, is not run, and the reason is kept.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.contracts.catalog import catalog
from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.parameters import matrices, optimizer_groups, trained_shapes
from modicum.models import ModelConfig, create
from modicum.optim.two_point import TwoPoint

RATE, DECAY, RANK, WHOLE = 1e-5, 0.1, 128, 1 << 16
FULL: dict[str, Any] = {
    "width": 512,
    "layers": 8,
    "heads": 8,
    "mlp_width": 1376,
    "vocabulary_size": 8192,
}
TINY: dict[str, Any] = {
    "width": 64,
    "layers": 2,
    "heads": 2,
    "mlp_width": 160,
    "vocabulary_size": 64,
}


class Subject:
    """A decoder with gradients that never change, whatever a step does with them."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        config = ModelConfig(context=64, tied_embeddings=True, **sizes)
        self.model, self.heads = create(config, seed=0), sizes["heads"]
        self.width = sizes["width"]
        generator = torch.Generator().manual_seed(0)
        self.gradients = [
            1e-2 * torch.randn(p.shape, generator=generator) for p in self.model.parameters()
        ]

    @property
    def groups(self) -> list[dict[str, object]]:
        """Parameter groups as recipes make them."""
        return optimizer_groups(self.model, learning_rate=RATE, weight_decay=DECAY)

    def sides(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The matrices, and all else."""
        chosen, named = matrices(self.model), dict(self.model.named_parameters())
        return (
            [p for n, p in named.items() if n in chosen],
            [p for n, p in named.items() if n not in chosen],
        )

    def stepper(self, step: Callable[[], object]) -> Callable[[], float]:
        """A step on fresh gradients, which gives its seconds."""

        def run() -> float:
            self.refresh()
            begun = time.perf_counter()
            step()
            return time.perf_counter() - begun

        return run

    def refresh(self) -> None:
        """Put the gradients in place."""
        for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)


@dataclass(frozen=True)
class Stepping:
    """What is timed, and whose state is counted."""

    step: Callable[[], object]
    optimizers: tuple[Any, ...] = ()

    @classmethod
    def of(cls, *optimizers: Any) -> Stepping:
        """Optimizers of which each steps some of the parameters."""

        def step() -> None:
            for optimizer in optimizers:
                optimizer.step()

        return cls(step, optimizers)

    @property
    def state_bytes(self) -> int:
        """Bytes of all tensors in the state, in whatever they are kept."""
        found: dict[int, int] = {}
        for optimizer in self.optimizers:
            for tensor in _tensors(dict(optimizer.state), set()):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        return sum(found.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The plain tensors in dictionaries, lists, subclasses of tensors and objects, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
            return
        value = [getattr(value, name) for name in flatten()[0]]
    elif isinstance(value, Mapping):
        value = list(value.values())
    elif not isinstance(value, list | tuple):
        value = list(vars(value).values()) if hasattr(value, "__dict__") else []
    for each in value:
        if not isinstance(each, nn.Parameter):
            yield from _tensors(each, seen)


PeerMaker = Callable[[Subject], Stepping]


@dataclass(frozen=True)
class Contest:
    """A method of ours, and who does the same.

    Args:
        fields: of ours, where equal settings are not its defaults.
        peers: by label, what makes them.
        most: the bar of a step's time over the fastest peer's.
        not_run: peers that can never run here, with the reason.
    """

    peers: Mapping[str, PeerMaker] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    most: float = 1.1
    not_run: Mapping[str, str] = field(default_factory=dict)


def value_of(name: str, fields: Mapping[str, Any]) -> OptimizerMethod:
    """A method's value at these fields, with the decay of all contenders where it has one."""
    kind = catalog()[name].load()
    decay = {"weight_decay": DECAY} if "weight_decay" in kind.model_fields else {}
    value = kind(**decay, **fields)
    assert isinstance(value, OptimizerMethod)
    return value


def ours(name: str, contest: Contest, subject: Subject) -> tuple[Stepping, dict[str, int]]:
    """Our stepping, and what its ledger says of state and of scratch memory."""
    if name == "distzo2":
        return two_points(subject), {"state": 0, "scratch": 0}
    value = value_of(name, contest.fields)
    said = value.ledger(OptimizerQuery(trained_shapes(subject.model)))
    bytes_said = {"state": said.bytes("optimizer"), "scratch": said.bytes("workspace", "step")}
    return Stepping.of(value.bind(subject.groups)), bytes_said


def two_points(subject: Subject) -> Stepping:
    """An update from two losses, but for the forward passes."""
    training = TwoPoint(dict(subject.model.named_parameters()), seed=0)
    return Stepping(lambda: training.update(1, RATE, lambda: 0.0))


def mezo(subject: Subject) -> Stepping:
    """MeZO's loop as its authors write it: numbers of PyTorch's generator, in order, four times."""
    parameters = list(subject.model.parameters())

    @torch.no_grad()
    def step() -> None:
        for scale in (1e-3, -2e-3, 1e-3, -RATE * 0.0):
            torch.manual_seed(0)
            for parameter in parameters:
                z = torch.normal(0.0, 1.0, size=parameter.shape, dtype=parameter.dtype)
                parameter.data = parameter.data + scale * z

    return Stepping(step)


def _fused(subject: Subject) -> Stepping:
    parameters = list(subject.model.parameters())
    adamw = torch.optim.AdamW(parameters, RATE, betas=(0.9, 0.95), weight_decay=DECAY, fused=True)
    return Stepping.of(adamw)


def _muon(subject: Subject) -> Stepping:
    inside, outside = subject.sides()
    muon = torch.optim.Muon(inside, RATE, momentum=0.95, nesterov=True, weight_decay=DECAY)
    adamw = torch.optim.AdamW(outside, RATE, betas=(0.8, 0.98), weight_decay=DECAY, fused=True)
    return Stepping.of(muon, adamw)


def _nadam(subject: Subject) -> Stepping:
    parameters = list(subject.model.parameters())
    options: dict[str, Any] = {"decoupled_weight_decay": True, "foreach": True}
    return Stepping.of(torch.optim.NAdam(parameters, RATE, weight_decay=DECAY, **options))


def _nesterov(subject: Subject) -> Stepping:
    inside, outside = subject.sides()
    options: dict[str, Any] = {"momentum": 0.95, "nesterov": True, "weight_decay": DECAY}
    sgd = torch.optim.SGD(inside, RATE, fused=True, **options)
    adamw = torch.optim.AdamW(outside, RATE, betas=(0.8, 0.95), weight_decay=DECAY, fused=True)
    return Stepping.of(sgd, adamw)


def _peer(library: str, name: str, **options: Any) -> PeerMaker:
    """An optimizer of a library over all parameters."""

    def make(subject: Subject) -> Stepping:
        found: Any = importlib.import_module(library)
        for part in name.split("."):
            found = getattr(found, part)
        return Stepping.of(found(list(subject.model.parameters()), lr=RATE, **options))

    return make


def _heavyball(name: str, **options: Any) -> PeerMaker:
    """One of heavyball's, eager as all others here are."""

    def make(subject: Subject) -> Stepping:
        library: Any = importlib.import_module("heavyball")
        library.utils.compile_mode = None
        return _peer("heavyball", name, weight_decay=DECAY, **options)(subject)

    return make


def _with_good_paths(make: PeerMaker) -> PeerMaker:
    """One whose products of many factors PyTorch orders well only where opt_einsum is installed.

    From the left, as without it, they hold outer products of two matrices: seconds a step.
    """

    def made(subject: Subject) -> Stepping:
        if not torch.backends.opt_einsum.is_available():
            raise ImportError("No module named 'opt_einsum', without which its steps take seconds")
        return make(subject)

    return made


def _low_rank(library: str, name: str, **options: Any) -> PeerMaker:
    """GaLore's kind: a group of matrices with a rank, and all else."""

    def make(subject: Subject) -> Stepping:
        inside, outside = subject.sides()
        kind = getattr(importlib.import_module(library), name)
        projected = {"params": inside, "rank": RANK, "update_proj_gap": WHOLE, **options}
        return Stepping.of(kind([{"params": outside}, projected], lr=RATE, weight_decay=DECAY))

    return make


def _adam_mini(subject: Subject) -> Stepping:
    library: Any = importlib.import_module("pytorch_optimizer")
    options = {"num_embeds": subject.width, "num_heads": subject.heads, "weight_decay": DECAY}
    return Stepping.of(library.AdamMini(subject.model, lr=RATE, betas=(0.9, 0.95), **options))


_SGD_BAR = 1.2  # AuON's own, over momentum alone
_GALORE = _low_rank("galore_torch", "GaLoreAdamW", scale=0.25, proj_type="std")
_APOLLO = _low_rank(
    "apollo_torch", "APOLLOAdamW", proj="random", scale_type="channel", scale=1.0, proj_type="std"
)
_DASLAB = {"ista-daslab-optimizers": "imports its CUDA kernels; its equations stand in a test"}
_BF16 = {"product_dtype": "bf16"}  # as these peers have them, whatever the device
_ONE_REFRESH = {"rank": RANK, "update_gap": WHOLE}
CONTESTS: dict[str, Contest] = {
    "adamw": Contest({"torch AdamW, fused": _fused}),
    "adamw8bit": Contest(
        {
            "torchao AdamW8bit": _peer("torchao.optim", "AdamW8bit", weight_decay=DECAY),
            "bitsandbytes AdamW8bit": _peer("bitsandbytes.optim", "AdamW8bit", weight_decay=DECAY),
        }
    ),
    "lion": Contest({"pytorch_optimizer Lion": _peer("pytorch_optimizer", "Lion")}),
    "nadamw": Contest({"torch NAdam": _nadam}),
    "cautious": Contest({"heavyball AdamW, cautious": _heavyball("AdamW", caution=True)}),
    "mars": Contest({"pytorch_optimizer MARS": _peer("pytorch_optimizer", "MARS")}),
    "adam_mini": Contest({"pytorch_optimizer AdamMini": _adam_mini}),
    "muon": Contest({"torch Muon": _muon}, _BF16),
    "scion": Contest({"pytorch_optimizer SCION": _peer("pytorch_optimizer", "SCION")}, _BF16),
    "auon": Contest({"torch SGD, momentum": _nesterov}, most=_SGD_BAR),
    "soap": Contest(
        {
            "pytorch_optimizer SOAP": _peer(
                "pytorch_optimizer",
                "SOAP",
                precondition_frequency=1,
                max_precondition_dim=4096,
            ),
            "heavyball SOAP": _heavyball("SOAP", precondition_frequency=1),
        },
        {"block_size": 4096},
    ),
    "kron": Contest(
        {
            "pytorch_optimizer Kron": _with_good_paths(_peer("pytorch_optimizer", "Kron")),
            "heavyball PSGDKron": _with_good_paths(_heavyball("PSGDKron")),
        },
        {"block_size": 4096},
    ),
    "galore": Contest(
        {
            "galore-torch (transformers' GaLore)": _GALORE,
            "apollo-torch (transformers' APOLLO)": _APOLLO,
        },
        _ONE_REFRESH,
    ),
    "frugal": Contest({"torch AdamW, fused": _fused}),
    "dct_adamw": Contest({"galore-torch": _GALORE}, _ONE_REFRESH, not_run=_DASLAB),
    "trion": Contest({"torch Muon": _muon}, {"rank": RANK, **_BF16}, not_run=_DASLAB),
    "distzo2": Contest({"MeZO's loop": mezo}),
}

"""What MKOR's pass adds to a training step, next to kfac-pytorch's that is refreshed as often.

Part of `optimizers.py`. A pass is more than a call after the backward pass: hooks take up inputs
and gradients of outputs. So complete steps of the same perceptrons are timed, with each pass and
with none, and what none takes in that round is subtracted.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from common import interleaved, paired_ratio, spread
from torch import nn

from modicum.optim import MKOR
from modicum.optim.transform import TransformContext

EVERY, ROWS = 10, 1024  # updates from one refresh to the next, and rows of a batch
BARE = "no pass"
Pass = tuple[Callable[[], object], Callable[[], int]]  # a call after the backward pass; its bytes


class Training:
    """Perceptrons of a decoder's shapes on a batch that never changes, with a pass.

    Args:
        sizes: `width`, `mlp_width` and `layers`.
        made: makes the pass of a model.
    """

    def __init__(self, sizes: Mapping[str, Any], made: Callable[[nn.Module], Pass]) -> None:
        width, inner = sizes["width"], sizes["mlp_width"]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            parts = [
                part
                for _ in range(sizes["layers"])
                for part in (nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, width))
            ]
            self.model = nn.Sequential(*parts)
            self.batch = torch.randn(ROWS, width)
        self.apply, self.bytes = made(self.model)

    def seconds(self) -> float:
        """A step's seconds, in the mean from one refresh to the next."""
        begun = time.perf_counter()
        for _ in range(EVERY):
            self.model(self.batch).square().mean().backward()
            self.apply()
            self.model.zero_grad()
        return (time.perf_counter() - begun) / EVERY


def bare(model: nn.Module) -> Pass:
    """Nothing."""
    return lambda: None, lambda: 0


def mkor(**fields: Any) -> Callable[[nn.Module], Pass]:
    """Ours."""

    def made(model: nn.Module) -> Pass:
        runtime = MKOR(every=EVERY, **fields).bind(TransformContext(model))
        return runtime.apply, lambda: sum(t.numel() * t.element_size() for t in runtime.held())

    return made


def kfac(method: str) -> Callable[[nn.Module], Pass]:
    """kfac-pytorch's, by inverses or by decompositions."""

    def made(model: nn.Module) -> Pass:
        library: Any = importlib.import_module("kfac.preconditioner")  # PyPI's `kfac` is another
        often = {"factor_update_steps": EVERY, "inv_update_steps": EVERY}
        one = library.KFACPreconditioner(model, compute_method=method, **often)
        return one.step, lambda: one.memory_usage()["total"]

    return made


PASSES = {
    BARE: bare,
    "ours": mkor(),
    "ours, factors in fp32": mkor(factors="full"),
    "kfac-pytorch, inverses": kfac("inverse"),
    "kfac-pytorch, decompositions": kfac("eigen"),
}


def passes(sizes: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Seconds that each pass adds to a step, over the fastest peer's, and bytes that it keeps."""
    started: dict[str, Training] = {}
    absent: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peers, about themselves
        for label, made in PASSES.items():
            try:
                started[label] = Training(sizes, made)
            except ImportError as error:
                absent[label] = f"{type(error).__name__}: {error}"
        found = interleaved({k: each.seconds for k, each in started.items()}, rounds=rounds)
    none = found.pop(BARE)
    added = {k: [a - b for a, b in zip(v, none, strict=True)] for k, v in found.items()}
    row: dict[str, Any] = {
        "step": spread(none),
        "seconds": {label: spread(values) for label, values in added.items()},
        "state": {label: started[label].bytes() for label in added},
        "not_run_here": absent,
    }
    if peers := [label for label in added if not label.startswith("ours")]:
        row["fastest"] = min(peers, key=lambda label: row["seconds"][label]["median"])
        row["over_fastest"] = paired_ratio(added["ours"], added[row["fastest"]])
    return row

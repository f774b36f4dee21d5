"""dense: the weight as a matrix, which is `nn.Linear` itself."""

from __future__ import annotations

from torch import nn

from modicum.core.contracts.method import Against, Info
from modicum.core.layers.dense_layers import all_layers
from modicum.core.layers.form_plan import FormPlan
from modicum.linears.base import LinearMethod


class Dense(LinearMethod):
    """Layers as they are: a weight [out, in], trained or frozen, and what other forms represent.

    Prefer it where weights fit. In a recipe it is what is left out: `linear: {method: dense}` says
    the same as no section.

    Args:
        targets, exclude: see `LinearMethod`.

    >>> import torch
    >>> from modicum.linears import Dense
    >>> Dense().plan(torch.nn.Sequential(torch.nn.Linear(4, 2))).plain
    True
    """

    info = Info(
        name="dense",
        title="Dense: the weight as a matrix",
        room="linears",
        paper="none: the map y = x W^T + b",
        claim="what other forms are measured against",
        traits=("mergeable", "exact_resume", "compiles"),
        evidence="verified against code",
        against=Against("baseline"),
        run_on_gpu=True,
    )

    def plan(self, model: nn.Module, within: FormPlan | None = None) -> FormPlan:
        # Of a model that was compressed, no layer may be dense any more.
        return super().plan(model, within) if all_layers(model) else within or FormPlan()

    def left_out(self, model: nn.Module) -> dict[str, str]:
        return {}

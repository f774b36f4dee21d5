"""Layers that begin in a form and are dense from some update on."""

from __future__ import annotations

from torch import nn

from modicum.core.contracts.run_hooks import RunHook
from modicum.core.contracts.surgery import Surgery
from modicum.core.layers.form_layer import FormLayer


class DenseLater(RunHook):
    """Asks a trainer to make layers dense after an update: they compute what they did before.

    Nothing is kept: a model that has no such layers any more is past that update. Moments of the
    dense weights begin at zero. In a loop of one's own it is `FormedModel.merge`, and an optimizer
    that is made anew.

    Args:
        model: that is trained.
        kind: the class of the layers.
        after: the number of the update, from 1.
    """

    def __init__(self, model: nn.Module, kind: type[FormLayer], after: int) -> None:
        self.after = after
        self.layers = tuple(
            name.replace("_orig_mod.", "")
            for name, layer in model.named_modules()
            if isinstance(layer, kind)
        )

    def surgery(self, step: int) -> Surgery | None:
        """All layers at once, after the one update."""
        if step != self.after or not self.layers:
            return None
        return Surgery(f"makes {len(self.layers)} layers dense", dense=self.layers)

"""How important an adapter's factors are, followed over updates: what layers can be ranked by.

Of each number its product with its gradient says how much the loss would change without it. That
varies from batch to batch, so it has a running mean, and a running distance from that mean; their
product is large where a number matters and is not yet settled. All of it lies as factors lie: a
rank that has a part of a factor has that part of what is known of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from modicum.adapters.steps import AdapterSteps
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import is_sharded, laid_like, laid_out_like, own_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MEAN, _SPREAD = "mean", "spread"


class ImportanceSteps(AdapterSteps):
    """Follows the importance of some factors; a subclass uses `scores` in `after_optimizer`.

    Gradients are those of the update that was made, so a loop of one's own calls `update` before it
    sets them to zero. Checkpoints have both running numbers of every factor.

    Attributes:
        watched: the names of the factors, in each layer.
        forgetting: how much of what is known an update replaces.

    Source: Zhang et al., "AdaLoRA", arXiv 2303.10512, equations 8 to 10.
    """

    reads_gradients = True
    watched: ClassVar[tuple[str, ...]]
    forgetting: ClassVar[float] = 0.15

    def __init__(self, *given: Any) -> None:
        self._known: dict[str, dict[str, Tensor]] = {}  # by site.factor
        self._like: dict[str, DTensor] = {}  # sharded factors, as which that is laid out
        super().__init__(*given)

    @torch.no_grad()
    def after_optimizer(self, step: int, optimizer: Any) -> None:
        """Take up what this update's gradients say.

        Raises:
            InputError: there are none.
        """
        super().after_optimizer(step, optimizer)
        factors = self._factors(optimizer)
        if all(factor.grad is None for factor in factors.values()):
            problem = "no factor has a gradient; call `update` after the optimizer's step and "
            raise InputError(f"{problem}before gradients are set to zero")
        for name, factor in factors.items():
            part = own_part(factor.detach())[0].float()
            known = self._known_of(name, factor, part)
            size = torch.zeros_like(part)
            if factor.grad is not None:
                size = (part * own_part(factor.grad)[0]).abs().nan_to_num(0.0, 0.0, 0.0)
            known[_MEAN].lerp_(size, self.forgetting)
            known[_SPREAD].lerp_((size - known[_MEAN]).abs(), self.forgetting)

    def scores(self) -> dict[str, float]:
        """By site: the importance of each watched factor's numbers, in the mean, summed.

        All ranks ask at once, and are given the same.
        """
        found: dict[str, Tensor] = {}
        for site, layer in self.attached.layers():
            found[site] = torch.zeros((), dtype=torch.float64)
            for factor in self.watched:
                known = self._known[f"{site}.{factor}"]
                total = (known[_MEAN] * known[_SPREAD]).double().sum().cpu()
                found[site] += total / layer.get_parameter(factor).numel()
        # Where each rank has all of it, the sums are as many times as large for every site.
        sums = self._summed(torch.stack(list(found.values())))
        return dict(zip(found, sums.tolist(), strict=True))

    def _factors(self, optimizer: Any) -> dict[str, Tensor]:
        """The watched factors by `site.factor`: as the optimizer has them, where it says."""
        held: dict[str, Tensor] = {}
        for group in () if optimizer is None else optimizer.param_groups:
            held.update(zip(group.get("names", ()), group["params"], strict=False))
        return {
            name: held.get(self.attached.model_name(name), own)
            for name, own in self.attached.named_parameters()
            if name.rpartition(".")[2] in self.watched
        }

    def _known_of(self, name: str, factor: Tensor, part: Tensor) -> dict[str, Tensor]:
        """The running numbers of this rank's part; what was loaded is there in full at first."""
        known = self._known.setdefault(
            name, {what: torch.zeros_like(part) for what in (_MEAN, _SPREAD)}
        )
        if is_sharded(factor):
            if known[_MEAN].shape != part.shape:
                known |= {
                    what: own_part(laid_out_like(value.to(part.device), factor))[0].clone()
                    for what, value in known.items()
                }
            self._like[name] = factor
        known |= {what: value.to(part.device) for what, value in known.items()}
        self._known[name] = known
        return known

    def state_dict(self) -> dict[str, Any]:
        """How many updates were made, and what is known of the factors."""
        state = super().state_dict()
        for name, known in self._known.items():
            like = self._like.get(name)
            for what, value in known.items():
                state[f"{name} {what}"] = value if like is None else laid_like(value, like)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be after as many updates, and know what was known then."""
        super().load_state_dict(state)
        self._known, self._like = {}, {}
        for key, value in state.items():
            name, _, what = key.rpartition(" ")
            if what in (_MEAN, _SPREAD):
                self._known.setdefault(name, {})[what] = value.detach().clone()

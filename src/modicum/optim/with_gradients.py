"""Which parameters an optimizer steps: those that have a gradient, real and dense.

`TorchStep` asks that of an optimizer of PyTorch's, and that the state it takes up is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from modicum.core.contracts.optimizers import Valued
from modicum.core.errors import InputError
from modicum.optim.kept import StateShape
from modicum.optim.saved_dtypes import check_saved


def with_gradients(
    groups: Sequence[dict[str, Any]], *, takes_complex: bool = False
) -> list[tuple[nn.Parameter, dict[str, Any]]]:
    """Each parameter that has a gradient, with its group, in order.

    Args:
        takes_complex: whether complex parameters are taken.

    Raises:
        InputError: a gradient is sparse, or a parameter complex; nothing is changed by then.
    """
    found = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
    for parameter, _ in found:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise InputError(
                "sparse gradients are not taken, as what is kept of them is dense; have the layer "
                "give dense gradients, as nn.Embedding(sparse=False) does",
                value=tuple(parameter.shape),
            )
        if parameter.dtype.is_complex and not takes_complex:
            raise InputError(
                "complex parameters are not taken, as updates are of real numbers and would lose "
                "the imaginary part; train torch.view_as_real of it as the parameter",
                value=tuple(parameter.shape),
            )
    return found


class TorchStep(Valued):
    """Put before an optimizer of PyTorch's: its step, unless a gradient is one it does not take.

    PyTorch looks at a group when the groups before it are updated already, and keeps a sparse
    momentum of some parameters where all others have a dense one. Nor does it look at what it takes
    up: codes of another optimizer would become moments.

    Attributes:
        keeps: the names of what it keeps of a parameter, each of its shape and dtype.
    """

    keeps: ClassVar[tuple[str, ...]]
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def takes_sparse(self, group: Mapping[str, Any]) -> bool:
        """Whether sparse gradients of a group are taken, as dense ones are."""
        return False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Raises:
            InputError: a gradient is sparse and not taken; nothing is changed by then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        dense = [group for group in self.param_groups if not self.takes_sparse(group)]
        with_gradients(dense, takes_complex=True)
        step: Any = super().step  # type: ignore[misc]
        if getattr(step, "hooked", False):  # hooks of a step were called before this one
            step.__wrapped__(self)
        else:
            step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave.

        Raises:
            InputError: it is of another optimizer; nothing is changed by then.
        """
        # PyTorch itself sets the flags of a group that an older version saved.
        given = self.defaults.items()
        needed = [key for key, one in given if one is not None and not isinstance(one, bool)]
        check_saved(self.param_groups, needed, state_dict, self._kept)
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def _kept(self, parameter: Tensor) -> dict[str, StateShape]:
        return dict.fromkeys(self.keeps, (tuple(parameter.shape), parameter.dtype))

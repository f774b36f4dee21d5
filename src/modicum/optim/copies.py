"""Optimizers whose copies know what they are to do, and which take up no other's state.

PyTorch copies and pickles an optimizer's defaults, groups and state, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modicum.core.contracts.optimizers import OptimizerMethod, Valued
from modicum.optim.kept import StateShape
from modicum.optim.saved_dtypes import check_saved

_FIELDS = "fields"


class CopiedOptimizer(Valued, torch.optim.Optimizer):
    """An optimizer of which a copy has the method too, and what follows from it.

    A model is copied with its optimizer, as in the example: else the copy trains parameters that
    are no model's.

    Attributes:
        method: its value, which a class makes before PyTorch's `__init__`.

    >>> import copy
    >>> from modicum.optim import Lion
    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = Lion(layer.parameters(), betas=(0.8, 0.9))
    >>> layer, optimizer = copy.deepcopy((layer, optimizer))
    >>> optimizer.method.fields()["betas"]
    (0.8, 0.9)
    """

    method: OptimizerMethod

    def __getstate__(self) -> dict[str, Any]:
        # The fields alone, since no module has the value's class.
        return {**super().__getstate__(), _FIELDS: self.method.fields()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # PyTorch's `load_state_dict` calls this too, without the fields.
        super().__setstate__({key: value for key, value in state.items() if key != _FIELDS})
        if _FIELDS in state:
            self.method = self.value(**state[_FIELDS])
            self.remake()

    def remake(self) -> None:
        """Make what follows from the method and the groups, of a copy that has these."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave.

        Raises:
            InputError: it is of another optimizer; nothing is changed by then.
        """
        check_saved(self.param_groups, self.defaults, state_dict, self._kept)
        super().load_state_dict(dict(state_dict))

    def _kept(self, parameter: Tensor) -> Mapping[str, StateShape]:
        """What is kept of a parameter next to the count of its steps."""
        raise NotImplementedError(f"{type(self).__name__} defines no _kept()")

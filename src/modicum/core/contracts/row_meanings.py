"""Rows of a trained parameter that mean something else from here on, of the same shape.

What an optimizer keeps of a row belongs to what the row was: it goes with that to another place, or
is forgotten. State that has no rows, such as a projection or the factors of blocks, says nothing of
what the parameter is now, so it begins anew, all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.ranks.sharding import own_part, whole

Sources = Sequence[int | None]
"""For each row the one that it was, each once at most; None: it is new."""


@runtime_checkable
class RowedState(Protocol):
    """An optimizer with state that has the parameter's rows, but not its shape."""

    def rowed(self, parameter: Tensor) -> Collection[str]:
        """Names of the tensors, of any shape, whose row i is about row i of the parameter.

        Zeros are what a new row has. Tensors of the parameter's own shape are known without it.
        """

    def keeps_alike(self, parameter: Tensor, shape: Sequence[int]) -> bool:
        """Whether the parameter would have state of the same kinds if it had this shape."""


@torch.no_grad()
def move_state_rows(optimizer: torch.optim.Optimizer, parameter: Tensor, sources: Sources) -> bool:
    """Have an optimizer's state follow the rows of a parameter, in place; zeros for new rows.

    No update is deferred (`StepProgram.flush`), and the caller moves the weights. Where the
    parameter is sharded every rank calls this alike; nothing is sent unless rows move. Counts of
    updates stay, but where all rows are new, or state has no rows, the parameter is new.

    Args:
        parameter: one of the optimizer's, a master where those are trained.

    Returns:
        Whether what was kept of the rows that are not new is there still.

    Raises:
        InputError: the sources do not fit the parameter's rows.

    >>> layer = torch.nn.Linear(2, 3, bias=False)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    >>> layer.weight.grad = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    >>> optimizer.step()
    >>> move_state_rows(optimizer, layer.weight, [2, None, 0])
    True
    >>> optimizer.state[layer.weight]["momentum_buffer"].tolist()
    [[3.0, 3.0], [0.0, 0.0], [1.0, 1.0]]
    """
    _check(parameter, sources)
    state = optimizer.state.get(parameter)
    if not state or list(sources) == list(range(len(sources))):
        return True
    names = set(optimizer.rowed(parameter)) if isinstance(optimizer, RowedState) else set()
    names |= {n for n, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape}
    rest = [v for n, v in state.items() if isinstance(v, Tensor) and n not in names]
    if not any(s is not None for s in sources) or any(v.numel() > 1 for v in rest):
        del optimizer.state[parameter]
        return False
    for name in sorted(names & state.keys()):
        move_rows(state[name], sources)
    return True


@torch.no_grad()
def move_rows(tensor: Tensor, sources: Sources) -> None:
    """Move the rows of a tensor in place; zeros for new rows.

    Where it is sharded every rank calls this alike, and it is gathered if rows move.
    """
    part, before = own_part(tensor)
    own = sources[before : before + len(part)]
    if any(source not in (None, row) for row, source in enumerate(sources)):
        part.copy_(whole(tensor)[[source or 0 for source in own]])
    if new := [row for row, source in enumerate(own) if source is None]:
        part[new] = 0


def _check(parameter: Tensor, sources: Sources) -> None:
    rows = parameter.shape[0] if parameter.ndim else 0
    old = [source for source in sources if source is not None]
    if len(sources) != rows or len(set(old)) < len(old) or not set(old) <= set(range(rows)):
        raise InputError(
            f"says for each of {rows} rows which one it was, each once at most, or None",
            field="sources",
            value=list(sources),
        )

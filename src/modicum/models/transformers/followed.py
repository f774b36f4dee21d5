"""How a rule of transformers puts files' tensors together, seen by following it.

A rule is code: it stacks experts, concatenates gates, transposes. It is run on tensors without
memory, and what it calls says which element comes from where. So rules need not be known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from modicum.models.tensor_pieces import TensorPiece

Pieces = tuple[TensorPiece, ...]
_DIMS = {"dim", "dim0", "dim1"}


class Following(TorchFunctionMode):
    """Where it is entered, knows of what pieces of `parts` tensors are made.

    It follows stacks, concatenations, transposes and splits. After anything else it knows nothing.

    Args:
        parts: tensors on the meta device, contiguous.

    >>> import torch
    >>> parts = [torch.empty(2, 3, device="meta") for _ in range(2)]
    >>> with Following(parts) as following:
    ...     made = torch.stack(parts).transpose(1, 2)
    >>> [(piece.part, piece.place) for piece in following.pieces(made)]
    [(0, (0, 0, 0)), (1, (1, 0, 0))]
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        super().__init__()
        # With the tensors themselves, so that no other takes the number of one that is gone.
        self._known: dict[int, tuple[Tensor, Pieces]] = {}
        self._follows = True
        for number, part in enumerate(parts):
            self._know(part, (TensorPiece.full(number, part),))

    def pieces(self, tensor: Tensor) -> Pieces | None:
        """Of what a tensor is made; None: that is not known."""
        known = self._known.get(id(tensor))
        if not self._follows or known is None or tensor.dim() == 0:
            return None
        held = sum(piece.view.numel() for piece in known[1])
        return known[1] if held == tensor.numel() else None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        made = func(*args, **kwargs)
        given, results = list(_tensors([*args, *kwargs.values()])), list(_tensors([made]))
        follow = _FOLLOWED.get(getattr(func, "__name__", ""))
        known = all(id(tensor) in self._known for tensor in given)
        if follow is not None and args and known and kwargs.keys() <= _DIMS:
            sources = [self._known[id(tensor)] for tensor in given]
            for result, pieces in zip(results, follow(sources, results, args, kwargs), strict=True):
                self._know(result, pieces)
        elif results or (given and made is None):  # else a shape was asked for, or a mode was set
            self._follows = False
        return made

    def _know(self, tensor: Tensor, pieces: Iterable[TensorPiece]) -> None:
        self._known[id(tensor)] = tensor, tuple(piece for piece in pieces if piece.view.numel())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _dim(tensor: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], at: int = 1) -> int:
    """The dimension that a function was called with, in its argument number `at`."""
    given = kwargs.get("dim", args[at] if len(args) > at else 0)
    return int(given) % tensor.dim()


def _stacked(sources: Any, results: Any, args: Any, kwargs: Any) -> Iterator[Pieces]:
    dim = _dim(results[0], args, kwargs)
    yield tuple(
        TensorPiece(
            piece.part,
            piece.view.unsqueeze(dim),
            (*piece.place[:dim], number, *piece.place[dim:]),
        )
        for number, (_, pieces) in enumerate(sources)
        for piece in pieces
    )


def _joined(sources: Any, results: Any, args: Any, kwargs: Any) -> Iterator[Pieces]:
    dim, before = _dim(results[0], args, kwargs), 0
    found: list[TensorPiece] = []
    for tensor, pieces in sources:
        for piece in pieces:
            place = list(piece.place)
            place[dim] += before
            found.append(TensorPiece(piece.part, piece.view, tuple(place)))
        before += tensor.shape[dim] if pieces else 0
    yield tuple(found)


def _transposed(sources: Any, results: Any, args: Any, kwargs: Any) -> Iterator[Pieces]:
    [(tensor, pieces)] = sources
    named = (kwargs.get("dim0"), kwargs.get("dim1"))
    one, other = (int(dim) % tensor.dim() for dim in (*args[1:], *named) if dim is not None)
    order = list(range(tensor.dim()))
    order[one], order[other] = other, one
    yield tuple(
        TensorPiece(piece.part, piece.view.permute(order), tuple(piece.place[dim] for dim in order))
        for piece in pieces
    )


def _split(sources: Any, results: Any, args: Any, kwargs: Any) -> Iterator[Pieces]:
    [(tensor, pieces)] = sources
    dim, before = _dim(tensor, args, kwargs, at=2), 0
    for result in results:
        yield _among(pieces, dim, before, result.shape[dim])
        before += result.shape[dim]


def _unbound(sources: Any, results: Any, args: Any, kwargs: Any) -> Iterator[Pieces]:
    [(tensor, pieces)] = sources
    dim = _dim(tensor, args, kwargs)
    for number in range(len(results)):
        yield _without(_among(pieces, dim, number, 1), dim)


def _squeezed(sources: Any, results: Any, args: Any, kwargs: Any) -> Iterator[Pieces]:
    [(tensor, pieces)] = sources
    if not isinstance(kwargs.get("dim", args[-1]), int):  # all dimensions of size 1, or several
        yield ()
    elif results[0].dim() == tensor.dim():
        yield pieces
    else:
        yield _without(pieces, _dim(tensor, args, kwargs))


def _same(sources: Any, results: Any, args: Any, kwargs: Any) -> Iterator[Pieces]:
    yield sources[0][1]


def _among(pieces: Pieces, dim: int, start: int, length: int) -> Pieces:
    """What of pieces is among `length` of a dimension, which are numbered anew."""
    found = [own for piece in pieces if (own := piece.within(dim, start, length)) is not None]
    moved = []
    for piece in found:
        place = list(piece.place)
        place[dim] -= start
        moved.append(TensorPiece(piece.part, piece.view, tuple(place)))
    return tuple(moved)


def _without(pieces: Pieces, dim: int) -> Pieces:
    return tuple(
        TensorPiece(piece.part, piece.view.squeeze(dim), piece.place[:dim] + piece.place[dim + 1 :])
        for piece in pieces
    )


_FOLLOWED: dict[str, Callable[..., Iterator[Pieces]]] = {
    "stack": _stacked,
    "cat": _joined,
    "transpose": _transposed,
    "chunk": _split,
    "split": _split,
    "unbind": _unbound,
    "squeeze": _squeezed,
    "contiguous": _same,
}

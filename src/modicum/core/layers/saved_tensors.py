"""What autograd saves for the backward pass, by storage identity, and what of it must be kept.

Tensors share storages: a ReLU's output is the next convolution's input, and both operations save
it. Making one of the two smaller frees nothing while the other is there. Here everything that is
saved under one identity (storage, place in it, shape, strides, version) is kept once, as exactly
as the most demanding of the operations that saved it needs: pooling needs a shape, a ReLU where its
output was positive, a convolution's weight gradient values that may be a little off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from modicum.core.codecs.bit_packing import pack_bits, unpack_bits
from modicum.core.codecs.error_bounded import ErrorBoundedCodec, contiguous_strides
from modicum.core.layers.torch_calls import Call, Calls
from modicum.core.torch_private import base_of, storage_address, version_of


@dataclass(frozen=True)
class Shares:
    """What a policy on saved tensors makes of their bytes, as a ledger is asked.

    Args:
        values: the part that is left of a tensor whose values may be a little off.
        signs: the part that is left of one of which only the signs are needed.
        storing, restoring: bytes that making it smaller, and the way back, take for each element
            while they are done.
        piece: elements that are worked on together, however large the tensor is.
    """

    values: float = 1.0
    signs: float = 1.0
    storing: int = 0
    restoring: int = 0
    piece: int = 0

    def workspace(self, elements: int, *, restore: bool = False) -> int:
        """Extra bytes while a tensor of so many elements is made smaller, or restored."""
        return (self.restoring if restore else self.storing) * min(elements, self.piece)


class Need(IntEnum):
    """What an operation's backward pass asks of a tensor that it saved; each includes the last."""

    SHAPE = 0
    SIGNS = 1
    VALUES = 2
    EXACT = 3


_POOLS = {F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d}
_POOLS |= {torch.max_pool3d}
_RELUS = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}


class Kept:
    """One saved tensor, in the form in which it is kept."""

    def __init__(self, tensor: Tensor, codec: ErrorBoundedCodec) -> None:
        storage = tensor.untyped_storage()
        self.storage, self.plain_bytes = StorageWeakRef(storage), storage.nbytes()
        self.shape, self.strides, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.device = tensor.device
        self.need: Need | None = None
        self._codec = codec
        self._exact: Tensor | None = None
        self._version = version_of(tensor)
        self._record: Any = None
        self._bound = 0.0
        self._bits: Tensor | None = None

    def serve(self, need: Need, tensor: Tensor, bound: float | None) -> None:
        """Keep enough of `tensor` for this need too, its values at most `bound` off."""
        kept = -1 if self.need is None else self.need
        enough = need < Need.VALUES or kept == Need.EXACT or self._bound <= (bound or 0.0)
        if need <= kept and enough:
            return
        if need == Need.EXACT:
            # Without its history: an output would hold the node that holds it.
            self._exact, self._record, self._bits = tensor.detach(), None, None
        elif need == Need.VALUES:
            assert bound is not None
            self._record, self._bits = self._codec.compress(tensor, bound), None
            self._bound = bound
        elif need == Need.SIGNS:
            self._bits = pack_bits(tensor.detach() != 0)
        self.need = need

    @property
    def exact(self) -> bool:
        """Whether it is kept as it was, and so keeps its full storage."""
        return self._exact is not None

    @property
    def nbytes(self) -> int:
        """Bytes that are held in the storage's place; nothing where that is kept itself."""
        if self._record is not None:
            return int(self._record.nbytes)
        return 0 if self._bits is None else self._bits.nbytes

    def restore(self, need: Need) -> Tensor:
        """The tensor, as well as the need asks; the same however often it is asked.

        Raises:
            RuntimeError: it was kept as it was, and has been changed in place since.
        """
        if self._exact is not None:
            if version_of(self._exact) != self._version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: {self.dtype} {list(self.shape)} is at version "
                    f"{version_of(self._exact)}; expected version {self._version} instead"
                )
            return self._exact
        if need == Need.SHAPE:
            return self._empty()
        if need == Need.SIGNS:
            return self._laid_out(self._signs())
        restored: Tensor = self._codec.decompress(self._record)
        return restored

    def _signs(self) -> Tensor:
        if self._bits is None:
            return self._codec.nonzero(self._record)
        return unpack_bits(self._bits, self.shape.numel()).view(self.shape)

    def _laid_out(self, mask: Tensor) -> Tensor:
        if mask.stride() == self.strides:
            return mask.to(self.dtype)
        ones = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return ones.copy_(mask)

    def _empty(self) -> Tensor:
        """A tensor of this shape; one element's memory where strides say nothing."""
        if self.strides == contiguous_strides(self.shape):
            return torch.empty(1, dtype=self.dtype, device=self.device).expand(self.shape)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class SavedHandle:
    """What autograd holds in a saved tensor's place; when it lets go, so does all that is kept."""

    kept: Kept
    need: Need


class SavedTensors:
    """Keeps what is saved within `context()`.

    Args:
        codec: makes values smaller.
        bound: the error that the values of a saved tensor may have, by the call that saves it; None
            where they must stay exact.
        done: is called after every call of a torch function within the context, with the call and
            what it returned.

    >>> from modicum.core.codecs.dual_quantization import DualQuantization
    >>> layer = nn.Conv2d(1, 1, 3)
    >>> def bound(call, tensor):
    ...     return 0.1 if call.function is torch.conv2d and tensor.grad_fn else None
    >>> saved = SavedTensors(nn.Sequential(layer), DualQuantization(), bound)
    >>> with saved.context():
    ...     loss = layer(torch.relu(torch.randn(1, 1, 32, 32, requires_grad=True))).sum()
    >>> saved.held_bytes < saved.plain_bytes / 3
    True
    >>> loss.backward()
    >>> saved.held_bytes
    0
    """

    def __init__(
        self,
        model: nn.Module,
        codec: ErrorBoundedCodec,
        bound: Callable[[Call, Tensor], float | None],
        done: Callable[[Call, Any], None] = lambda call, output: None,
    ) -> None:
        self._model, self._codec, self._bound = model, codec, bound
        self._calls = Calls(done)
        self._live: WeakValueDictionary[tuple[Any, ...], Kept] = WeakValueDictionary()
        self._persistent: set[int] = set()
        self._inside = False
        self._full: dict[Need, tuple[int, int]] | None = None

    @contextmanager
    def context(self) -> Iterator[None]:
        """Keep what is saved in here; where gradients are off, or inside of itself, do nothing."""
        if self._inside or not torch.is_grad_enabled():
            yield
            return
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self._persistent = {storage_address(tensor) for tensor in tensors}
        self._inside = True
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        try:
            with hooks, self._calls:
                yield
        finally:
            self._inside = False
            self._full = self.full()

    @property
    def held_bytes(self) -> int:
        """Bytes that are kept now, storages that are kept as they are once."""
        return sum(held for held, _ in self.by_need().values())

    @property
    def plain_bytes(self) -> int:
        """Bytes that autograd alone would keep now: of every storage, once."""
        return sum(plain for _, plain in self.by_need().values())

    def full(self) -> dict[Need, tuple[int, int]]:
        """`by_need` as it was before the last backward pass began; now, if none has since."""
        return self.by_need() if self._full is None else self._full

    def by_need(self) -> dict[Need, tuple[int, int]]:
        """Bytes held now and bytes that autograd alone would keep, by what the storage must be."""
        needs: dict[int, Need] = {}
        held: dict[int, int] = {}
        plain: dict[int, int] = {}
        for each in self._live.values():
            key = each.storage.cdata
            needs[key] = max(needs.get(key, Need.SHAPE), each.need or Need.SHAPE)
            held[key] = held.get(key, 0) + each.nbytes
            plain[key] = each.plain_bytes
        found = {}
        for need in Need:
            keys = [key for key, found in needs.items() if found == need]
            whole = need == Need.EXACT
            found[need] = (
                sum(held[key] + (plain[key] if whole else 0) for key in keys),
                sum(plain[key] for key in keys),
            )
        return found

    def _pack(self, tensor: Tensor) -> Tensor | SavedHandle:
        if self._is_persistent(tensor):
            return tensor
        self._full = None
        key = (
            storage_address(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(),
            tensor.dtype, version_of(tensor),
        )  # fmt: skip
        kept = self._live.get(key)
        if kept is None:
            # While it lives, its weak reference keeps the storage's address from being reused.
            kept = self._live[key] = Kept(tensor, self._codec)
        need, bound = self._asked(tensor)
        kept.serve(need, tensor, bound)
        return SavedHandle(kept, need)

    def _unpack(self, saved: Tensor | SavedHandle) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._full = self.full()
        return saved.kept.restore(saved.need)

    def _asked(self, tensor: Tensor) -> tuple[Need, float | None]:
        """What the call that is under way needs of a tensor that it saves."""
        call = self._calls.current
        if call is None or not tensor.is_floating_point():
            return Need.EXACT, None
        if call.function in _RELUS:
            return Need.SIGNS, None
        if call.function in _POOLS:
            return Need.SHAPE, None  # its indices are integers
        bound = self._bound(call, tensor)
        return (Need.EXACT if bound is None else Need.VALUES), bound

    def _is_persistent(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, a buffer or a part of one, which the model keeps anyway."""
        own = isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter)
        return own or storage_address(tensor) in self._persistent

"""What a save takes from the run before training continues: a copy of this rank's tensors.

The copy is the file that will be written, byte for byte, in one block of memory that is kept from
save to save: the system gives memory page by page at its first use, which costs more than the copy.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from modicum.checkpoint.tensor_file import PAGE, FileLayout
from modicum.checkpoint.tensor_slices import DTYPES, TensorSlice


class Staging:
    """Host memory for one file; pinned where tensors come from an accelerator."""

    def __init__(self, layout: FileLayout, *, pinned: bool = False) -> None:
        self._pinned = pinned
        if pinned:
            self._block = torch.empty(layout.size, dtype=torch.uint8, pin_memory=True)
        else:
            memory = mmap.mmap(-1, layout.size + -layout.size % PAGE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._block = torch.frombuffer(memory, dtype=torch.uint8)
        header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        self._block[: len(header)].copy_(header)
        self._slots = {
            piece: self._block[start : start + piece.nbytes]
            .view(DTYPES[piece.dtype])
            .view(piece.sizes)
            for piece, start in layout.places.items()
        }
        self.content = self._block.numpy().data[: layout.size]

    def take(self, tensors: dict[TensorSlice, Tensor]) -> None:
        """Copy the tensors; when this returns they may change."""
        with torch.no_grad():
            for piece, slot in self._slots.items():
                slot.copy_(tensors[piece], non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream().synchronize()

"""What the decoder's last norm, output layer and embedding keep and compute, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from modicum.core.machine.kernels import ProductScratch
from modicum.models.ledger_block import DecoderBlock
from modicum.models.ledger_parts import DecoderPart


class Head(DecoderPart):
    """The bytes and work of the last norm, the output layer and the embedding."""

    @property
    def logits(self) -> int:
        """Bytes of a score for each position and token, in fp32."""
        return self.tensor(4 * self.shape.positions * self.config.vocabulary_size)

    @property
    def computed(self) -> int:
        """The same in the precision in which they are computed."""
        each = self.shape.compute_bytes * self.config.vocabulary_size
        return self.tensor(self.shape.positions * each)

    @property
    def table(self) -> int:
        """Elements of the output layer's weight, and of the embedding's."""
        return self.config.vocabulary_size * self.config.width

    @property
    def saved(self) -> int:
        """Bytes that autograd keeps, logits aside."""
        each, width = self.norm * self.flows, self.config.width
        each += self.each(self.shape.compute_bytes * width) * self.inputs("") + self.sums(width, "")
        return each * self.shape.positions + self.adapters

    @property
    def norm_undone(self) -> int:
        """Bytes of what the last norm's backward pass makes next to its input."""
        each = self.norm_input if self.fused_norms else 6 * self.each(4 * self.config.width)
        return each * self.shape.positions * self.flows

    @property
    def casts(self) -> int:
        return self.tensor(2 * self.table) if self.half else 0

    @property
    def accumulates(self) -> bool:
        """Whether gradients of a micro-batch meet those of the ones before it."""
        return self.shape.micro_batches > 1

    @property
    def gradient_made(self) -> int:
        """Bytes of the output weight's gradient when it is made."""
        return self.gradient_of(self.table, self.product.weight)

    @property
    def product(self) -> ProductScratch:
        """What the output layer's products work in."""
        return self.scratch(self.config.width, self.config.vocabulary_size)

    @property
    def gradient_held(self) -> int:
        """Bytes of it that wait: tied, for the embedding's part, else for the step."""
        waits = self.trained and (self.config.tied_embeddings or not self.accumulates)
        return self.tensor(4 * self.table) if waits else 0

    def gradients_to_come(self, blocks: Sequence[DecoderBlock]) -> int:
        """Bytes of the gradients that are not there yet when the last of these blocks' are made.

        Args:
            blocks: the first ones of the decoder.
        """
        tied = self.config.tied_embeddings
        if not self.trained:
            return 0
        if self.accumulates:
            return -self.gradient_held
        sizes = [self.tensor(4 * size) for block in blocks for size in block.linears.values()]
        return sum(sizes) + (0 if tied else self.tensor(4 * self.table))

    @property
    def embedding_work(self) -> int:
        """Bytes at the end of the backward pass beyond the gradients that stay."""
        if not self.trained:
            return 0
        # Tied, the head's gradient and the embedding's are summed: in fp32 into a third tensor,
        # because the head's lies transposed.
        extra = self.accumulates + (self.config.tied_embeddings and 2 - self.half)
        return self.tensor(4 * self.table) * extra + self.stream

    @property
    def forward(self) -> int:
        return 2 * self.shape.positions * self.table

    @property
    def backward(self) -> int:
        return self.forward * (self.flows + self.trained)

"""What exchanges that code their numbers spend: bytes on the wire, and the scratch of coding.

That of numbers which are sent as they are is `ShardExchange.ledger`.
"""

from __future__ import annotations

from collections.abc import Mapping

from modicum.core.codecs.elements import (
    Cast,
    ElementCodec,
    GroupQuantizer,
    drawing_bytes,
    transforming_bytes,
)
from modicum.core.contracts.ledger import CodedNumbers, Entry, Ledger, Wire
from modicum.core.ranks.exchange import LOCAL, NODE, SHARD, ExchangeQuery, Nodes, ShardExchange


def narrow_ledger(at: ExchangeQuery, element_bytes: int) -> Ledger:
    """The ledger of gradients that travel in so many bytes an element, and of weights as they are.

    They are rounded into one buffer, and received into another.
    """
    plain, others = ShardExchange.ledger(at), at.ranks - 1
    most, calls = at.ranks * max(at.rows, default=0), len(at.rows)
    sent = element_bytes * at.reductions * others * sum(at.rows)
    if not at.gathers:  # one after the other, where FSDP2 asks for them
        wait = Entry("workspace", 2 * element_bytes * most, ("backward",), "on the wire")
        wait = wait.in_tensors(2 * [element_bytes * most])
        return Ledger.of(wait, Wire("all_to_all", sent, SHARD, at.reductions * calls))
    last = at.last_sent(2 * element_bytes, 0)
    wait = at.stepping(last, at.weights, "gradients or weights on the wire")
    return Ledger.of(
        at.sending(2 * element_bytes, 0, "on the wire"),
        at.in_buffers(wait, at.copy_bytes),
        Wire("all_to_all", sent, SHARD, at.reductions * calls),
        *(wire for wire in plain.wire if wire.collective == "all_gather"),
    )


def coded_ledger(
    at: ExchangeQuery,
    nodes: Nodes,
    *,
    gradients: Mapping[str, ElementCodec],
    weights: ElementCodec | None,
    block: int = 1,
    transforms: bool = False,
) -> Ledger:
    """Bytes that a rank sends in an update when numbers are coded, and the scratch of coding.

    Args:
        gradients: the codec of each hop, in the order in which gradients take them.
        weights: that of weights; None where they are sent as they are.
        block: gradient rows are filled up to a multiple of it.
        transforms: whether gradients are transformed before they are coded, and their sums back.
    """
    sizes, most = {LOCAL: nodes.local, NODE: nodes.count}, max(at.rows, default=0)
    widths = [-(-width // block) * block for width in at.rows]
    wires, left, row = [], at.ranks, at.reductions * sum(widths)
    mixed = (at.ranks + 1) * row if transforms else 0
    for axis, code in gradients.items():
        coding = _coding(code, left * row, left * row, mixed)  # one's own share among them
        mixed = 0
        left //= sizes[axis]  # rows that each peer is sent
        sent = at.reductions * (sizes[axis] - 1) * left * sum(map(code.nbytes, widths))
        wires.append(Wire("all_to_all", sent, axis, at.reductions * len(at.rows), coding))
    code, own = weights or Cast(8 * at.copy_bytes), sum(at.rows)
    coding = _coding(weights, own, at.ranks * own)
    sent = (at.ranks - 1) * sum(map(code.nbytes, at.rows))
    # What is coded is there in fp32, filled up, and divided by scales, to which draws are added.
    differing = 12 * most + drawing_bytes(most)

    def scratch(width: int) -> int:
        """There in addition to the gradients: these filled up or transformed, both for a while."""
        elements = at.ranks * width
        if block == 1:  # no hop has groups: what is received
            return 4 * elements if gradients else 0
        return 8 * elements + max(transforming_bytes(elements), drawing_bytes(elements))

    during, after = scratch(max(at.rows[:-1], default=0)), scratch(at.rows[-1] if at.rows else 0)
    refreshing = differing if weights else at.weights
    return Ledger.of(
        *wires,
        Wire("all_gather", sent, SHARD, len(at.rows), coding),
        Entry("workspace", during, ("backward",), "gradients being coded"),
        at.stepping(after, refreshing, "gradients or weights being coded"),
    )


def _coding(
    code: ElementCodec | None, encoded: int, decoded: int, transformed: int = 0
) -> CodedNumbers | None:
    """What a codec does with so many numbers; None: it casts them, which takes little."""
    if not isinstance(code, GroupQuantizer):
        return None
    return CodedNumbers(code.bits, encoded, decoded, transformed)

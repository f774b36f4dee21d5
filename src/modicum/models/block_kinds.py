"""Which blocks of a model are alike, for its ledger: `core.layers.block_kinds`."""

from modicum.core.layers.block_kinds import BlockList, block_lists, shortened

__all__ = ["BlockList", "block_lists", "shortened"]

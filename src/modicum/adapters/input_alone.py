"""Adapters that keep of a layer its input alone, and make all else anew in the backward pass."""

from __future__ import annotations

from modicum.adapters.base import Adapter, AdapterQuery
from modicum.adapters.sites import Site


class InputAlone(Adapter):
    """What such an adapter keeps: the layer's input as it was given, and of dropout a mask's bits.

    Layers that read one tensor keep it once.
    """

    drops_by_bits = True

    def saves_input(self, site: Site) -> bool:
        return True

    def saved_elements(self, site: Site) -> int:
        return 0

    def matrices_kept(self, at: AdapterQuery) -> int:
        return 0

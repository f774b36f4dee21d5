"""Adapters that train entries of the frozen weight itself, kept next to it as a patch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modicum.adapters import base_weights
from modicum.adapters.adapter_layer import AdapterLayer
from modicum.adapters.base import Adapter, AdapterQuery
from modicum.adapters.names import plain_name
from modicum.adapters.patch_places import Places, check_indices
from modicum.adapters.patching import Patched
from modicum.adapters.sites import Site
from modicum.adapters.widths import linear_only
from modicum.core.contracts.ledger import Entry, Ledger, Work
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import form_of
from modicum.core.ranks.sharding import whole

VALUES, INDICES = "values", "indices"
_LIMIT = 2**31  # of what an int32 can count


class PatchingLayer(AdapterLayer):
    """y = (W + S) x + b, where S is zero but at the places that the method has. Subclasses give
    `places`.

    Its method's `factors` have `values`, what is added there, and its `frozen` tensors `indices`,
    int32. The values alone are trained and have gradients and state. W + S stands in the layer's
    weight while a product uses it, and W at all other times: see `patching`.
    """

    values: Tensor
    indices: Tensor

    @abstractmethod
    def places(self) -> Places:
        """Which entries of the weight it has."""

    def check_base(self, base: nn.Module) -> None:
        if not base_weights.is_plain(base):
            form = form_of(base)
            kind = "" if form is None else f" ({form.name})"
            raise InputError(
                f"its weight is held in a form that has no entries of its own{kind}, and a patch "
                "is written into a dense one; leave the section linear out, or exclude the layer",
                value=self.site.name,
            )
        if any(getattr(module, "rewrites", False) for module in base.modules()):
            raise InputError(
                "another adapter has taken a part out of the weight, and a patch is of the weight "
                "as the model's file has it; merge or detach that one first",
                value=self.site.name,
            )

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        return base(inputs)  # the layer itself computes with the patch

    def used_values(self) -> Tensor:
        """What is added at its places."""
        return self.values if self.weighting == 1 else self.weighting * self.values

    @torch.no_grad()
    def delta(self) -> Tensor:
        values = base_weights.at_least_fp32(whole(self.values.detach()))
        change = values.new_zeros(self.site.out_features, self.site.in_features)
        change[self.places().rows_and_columns()] = values
        return change

    def check_state(self, indices: Tensor | None) -> None:
        """Make sure that indices of a state can be computed with.

        Raises:
            InputError: one lies outside of the weight, is there twice, or they are not ascending.
        """
        if indices is not None and not indices.is_meta:
            limit = self.patching.index_limit(self.site)
            check_indices(indices, limit, field=INDICES, name=self.site.name)

    @property
    def patching(self) -> Patching:
        """Its method."""
        assert isinstance(self.method, Patching)
        return self.method

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *others: Any
    ) -> None:
        try:
            self.check_state(state_dict.get(f"{prefix}{INDICES}"))
        except InputError as error:
            errors: list[str] = others[-1]
            errors.append(str(error))
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *others)


class Patching(Adapter):
    """An adapter of `PatchingLayer`s: what their ledger is, and where they cannot be."""

    def index_limit(self, site: Site) -> int:
        """How many places an index may mean: entries, by default."""
        return site.elements

    def gathered(self, site: Site) -> int:
        """Of how many of a site's inputs the gradient of the values is made: all, by default."""
        return site.in_features

    def check_site(self, site: Site) -> None:
        """Make sure that a site's weight can have a patch; `factors` calls it.

        Raises:
            InputError: it is an embedding or too large to count, or dropout is asked for.
        """
        linear_only(site, "a patch is of a linear layer's weight, and this is an embedding")
        if self.dropout:
            raise InputError(
                "the change is written into the weight, so it has no input of its own to drop; "
                "set it to 0",
                field="dropout",
                value=self.dropout,
            )
        if site.elements >= _LIMIT:
            problem = "its weight has more entries than 32 bits can count; exclude it"
            raise InputError(problem, value=site.name)

    def check_kept(self, sites: Sequence[Site], state: Mapping[str, Tensor]) -> None:
        for site in sites:
            indices = state.get(f"{plain_name(site.name)}.{INDICES}")
            if indices is not None:
                limit = self.index_limit(site)
                check_indices(indices, limit, field=INDICES, name=site.name)

    def saved_elements(self, site: Site) -> int:
        return 0 if self.needs_input else self.gathered(site)

    def matrices_kept(self, at: AdapterQuery) -> int:
        return 0  # values are added in their own dtype

    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        product = 2 * at.shape.positions * self.gathered(at.site) * at.site.out_features
        return (Work(product, phase="backward"),)

    def shared_ledger(self, sites: Sequence[Site]) -> Ledger:
        # One layer at a time makes the gradient of which its entries are taken.
        made = max(4 * self.gathered(site) * site.out_features for site in sites)
        spent = Entry("workspace", made, ("backward",), "a gradient that entries are taken of")
        return super().shared_ledger(sites) + Ledger.of(spent)


def with_patches(
    layer: nn.Module, run: Callable[..., Any], patches: Iterable[PatchingLayer]
) -> Callable[[Tensor], Tensor]:
    """A layer's forward `run` with patches in its weight."""
    listed = list(patches)
    product = Patched(layer, run, tuple(patch.places() for patch in listed))
    return lambda inputs: product(inputs, [patch.used_values() for patch in listed])

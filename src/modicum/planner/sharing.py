"""The ledger of a model and its adapters, on one process and where several ranks share the work.

Brings together what `models` knows of the decoder's bytes and `parallel` of the ranks' exchanges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from modicum.adapters.base import Adapter, Placement
from modicum.adapters.sites import Site
from modicum.core.layout import Layout
from modicum.core.ledger import Ledger, Shape
from modicum.models.config import ModelConfig
from modicum.models.ledger import Adapted, optimizer_ledger
from modicum.models.ledger import ledger as model_ledger
from modicum.models.ledger_parts import parts as model_parts
from modicum.parallel.ledger import Group, Parts, Shapes, replicated, sharded
from modicum.recipe import ParallelSection


@dataclass(frozen=True)
class Model:
    """A decoder, its adapter and the layers that wear it if any, and how it runs a micro-batch."""

    config: ModelConfig
    adapter: tuple[Adapter, list[Site]] | None
    shape: Shape
    recompute: bool

    def ledger(self) -> Ledger:
        """What one process spends: model, adapters, gradients, optimizer."""
        model = model_ledger(
            self.config, self.shape, adapted=self.adapted, recompute=self.recompute
        )
        if self.adapter is None:
            trained, rest = self.config.parameter_count(), []
        else:
            adapter, sites = self.adapter
            trained, rest = sum(adapter.trained(site) for site in sites), self._beside_saved
        return Ledger.sum([model, *rest, optimizer_ledger(trained, self.shape)])

    @cached_property
    def _adapter_ledgers(self) -> dict[Site, Ledger]:
        """The ledger of the adapter at each kind of site; sites that differ in name are alike."""
        assert self.adapter is not None
        adapter, sites = self.adapter
        alike = {replace(site, name="") for site in sites}
        return {site: adapter.ledger(Placement(site, self.shape)) for site in alike}

    @cached_property
    def adapted(self) -> Adapted | None:
        """What adapters keep for the backward pass, which is the model's to add up.

        It knows which blocks have run, and which are run again.
        """
        if self.adapter is None:
            return None
        adapter, sites = self.adapter
        kept = {site: each.bytes("activation") for site, each in self._adapter_ledgers.items()}
        return Adapted(
            sites={site.name: kept[replace(site, name="")] for site in sites},
            inputs=frozenset(site.name for site in sites if adapter.saves_input(site)),
        )

    @property
    def _beside_saved(self) -> list[Ledger]:
        """The rest of the adapters' ledgers, one a site."""
        assert self.adapter is not None
        rest = {
            site: each.map_entries(lambda entry: None if entry.kind == "activation" else entry)
            for site, each in self._adapter_ledgers.items()
        }
        return [rest[replace(site, name="")] for site in self.adapter[1]]

    def slack(self, ledger: Ledger) -> int:
        """How far the begin of the blocks' backward passes is below the worst of phase `loss`."""
        blocks, head = model_parts(self.config, self.shape, self.adapted)
        last = blocks[-1]
        there = last.work + head.gradient_held - head.saved - head.casts
        if self.recompute:
            there += last.saved + last.casts
        return ledger.bytes("workspace", "loss") - max(there, 0)

    def parts(self, layout: Layout) -> Parts:
        """The parameters, each block's together."""
        prefixes = [f"model.layers.{layer}." for layer in range(self.config.layers)]
        weights: dict[str, list[tuple[int, ...]]] = {prefix: [] for prefix in ["", *prefixes]}
        factors: dict[str, list[tuple[int, ...]]] = {prefix: [] for prefix in weights}

        def home(name: str) -> str:
            """The block that a layer is in, or none."""
            start = ".".join(name.split(".")[:3]) + "."
            return start if start in weights else ""

        for name, size in self.config.parameter_shapes().items():
            weights[home(name)].append(size)
        adapter, sites = self.adapter or (None, ())
        for site in sites:
            assert adapter is not None
            factors[home(site.name)] += [f.shape for f in adapter.factors(site).values()]

        def group(prefix: str) -> Group:
            held: Shapes = tuple(weights[prefix])
            if adapter is None:
                return Group(trained=held)
            return Group(tuple(factors[prefix]), held, self.shape.weight_bytes)

        return Parts(group(""), tuple(group(prefix) for prefix in prefixes), layout)


def shared(model: Model, ledger: Ledger, parts: Parts, section: ParallelSection) -> Ledger:
    """A rank's ledger where ranks share the work.

    Args:
        ledger: of one process that does what a rank does.
        parts: what a rank holds.
    """
    layout = parts.layout
    if layout.shards == 1:
        head = parts.root.trained[1:]
        order = [*parts.root.trained[:1], *(s for b in parts.blocks for s in b.trained), *head]
        sizes = [math.prod(shape) for shape in order]
        late = 4 * max(sizes[:1], default=0) + parts.block_gradients
        slack = model.slack(ledger)
        return replicated(ledger, sizes, section.bucket, layout.replicas, late=late, slack=slack)
    # A micro-batch's gradients are cut before the next one's are made; its tokens wait till then.
    once = replace(model, shape=replace(model.shape, micro_batches=1))
    alone = once.ledger()
    slack = once.slack(alone)
    buffers = ledger.map_entries(lambda entry: entry if entry.kind == "buffer" else None)
    rest = alone.map_entries(lambda entry: None if entry.kind == "buffer" else entry)
    return sharded(
        replace(rest, entries=rest.entries + buffers.entries),
        parts,
        micro_batches=model.shape.micro_batches,
        reshard_after_forward=section.reshard_after_forward,
        slack=slack,
    )

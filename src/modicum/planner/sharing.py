"""The ledger of a model and its adapters, on one process and where several ranks share the work.

Brings together what `models` knows of the decoder's bytes and `parallel` of the ranks' exchanges.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from modicum.adapters.base import NOT_TRAINED, Adapter, AdapterQuery
from modicum.adapters.sites import Site
from modicum.adapters.travel import Travel
from modicum.adapters.widths import narrow_layers
from modicum.comm.base import MatrixMethod, Schedule, ScheduleQuery
from modicum.core.contracts.ledger import (
    ALWAYS,
    Entry,
    Ledger,
    ModelQuery,
    TrainedParameter,
)
from modicum.core.layers.saved_tensors import Shares
from modicum.core.ranks.environment import ranks_on_a_host
from modicum.core.ranks.exchange import ExchangeQuery, ShardExchange
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixQuery
from modicum.models.ledger import AdapterActivations
from modicum.parallel import exchange_ledger
from modicum.parallel.exchange_ledger import ExchangeLedger
from modicum.parallel.ledger import GatheredGroups, Group, replicated, sharded
from modicum.planner.traced import Traces
from modicum.recipe import Recipe
from modicum.tasks.base import Task


@dataclass(frozen=True)
class Structure:
    """What of a model is trained, its layers of experts, the adapter, its layers, its use."""

    trained: tuple[TrainedParameter, ...]
    adapter: Adapter | None = None
    sites: tuple[Site, ...] = ()
    experts: tuple[int, int] | None = None
    """Over how many experts a layer chooses, and how many it chooses."""
    travel: Travel | None = None
    """Where the adapter can be used outside of modicum."""
    freezes: bool = False
    """Whether without an adapter some of the model is not trained."""
    larger_forms: Mapping[str, float] = field(default_factory=dict)
    """Layers whose form takes more bytes than a dense weight, with how many times as many."""
    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By section of the recipe the matrices that its `targets` leave out, with the reasons."""

    @cached_property
    def trainable(self) -> int:
        """Trained elements."""
        return sum(math.prod(parameter.shape) for parameter in self.trained)

    @cached_property
    def narrow(self) -> dict[str, int]:
        """Layers narrower than the adapter's rank, with the largest rank that fits them."""
        return {} if self.adapter is None else narrow_layers(self.adapter, self.sites)

    def built(self, positions: int) -> dict[str, tuple[bool, bool]]:
        """By site whether the adapter's change is built, where the adapter chooses that."""
        if self.adapter is None:
            return {}
        found = {site.name: self.adapter.built_at(site, positions) for site in self.sites}
        return {name: built for name, built in found.items() if built is not None}

    @property
    def beyond_arithmetic(self) -> bool:
        """Whether traces know what is kept, and arithmetic does not.

        Some layers of a model are frozen without an adapter, which keep no inputs; or an adapter
        has copies of parameters, or is on modules in blocks.
        """
        inner = (site.kind == "block" and not site.suffix.isdigit() for site in self.sites)
        return self.freezes or (
            self.adapter is not None and (bool(self.adapter.also) or any(inner))
        )

    @cached_property
    def kind_of(self) -> dict[Site, Site]:
        """By site the first one like it: of the same shape, with an adapter of the same tensors.

        A method may give layers of one shape other sizes, by their names or by what data said.
        """
        if self.adapter is None:
            return {}
        first: dict[Any, Site] = {}
        return {site: first.setdefault(_kind(self.adapter, site), site) for site in self.sites}

    @cached_property
    def kinds(self) -> dict[Site, int]:
        """How many layers there are of each kind."""
        return Counter(self.kind_of.values())


@dataclass(frozen=True)
class Model:
    """A task's model, what of it is trained, and how it runs a micro-batch."""

    task: Task[Any, Any, Any]
    config: Any
    structure: Structure
    shape: ModelQuery
    recompute: bool
    shares: Shares | None = None
    """What a policy on saved activations leaves of them."""
    backward: bool = True
    """Whether gradients are computed."""
    traces: Traces | None = None
    """What replaces the task's arithmetic."""

    def ledger(self) -> Ledger:
        """What one process spends on the model and its adapters, gradients not counted."""
        if self.traces is not None:
            spent = self.traces.ledger(self.shape, recompute=self.recompute)
        else:
            assert self.by_arithmetic is not None
            spent = Ledger.sum([self.by_arithmetic, *self._beside_saved])
        return spent if self.backward else spent.without_backward()

    @cached_property
    def by_arithmetic(self) -> Ledger | None:
        """The task's own ledger of the model, with what adapters keep in it; None: it has none."""
        return self.task.ledger(
            self.config,
            self.shape,
            adapted=self.adapted,
            recompute=self.recompute,
            shares=self.shares,
        )

    @cached_property
    def _adapter_ledgers(self) -> dict[Site, Ledger]:
        """The ledger of the adapter at each kind of site."""
        adapter = self.structure.adapter
        if adapter is None:
            return {}
        return {
            site: adapter.ledger(AdapterQuery(site, self.shape)) for site in self.structure.kinds
        }

    @cached_property
    def adapted(self) -> AdapterActivations | None:
        """What adapters keep for the backward pass, which is the model's to add up.

        It knows which blocks have run, and which are run again.
        """
        adapter, sites = self.structure.adapter, self.structure.sites
        if adapter is None:
            return None
        kept = {site: each.bytes("activation") for site, each in self._adapter_ledgers.items()}
        at_sites = {site: kept[self.structure.kind_of[site]] for site in sites}
        return AdapterActivations.of(adapter, at_sites)

    @property
    def _beside_saved(self) -> list[Ledger]:
        """The rest of the adapters' ledgers: one a site, and what sites share."""
        adapter = self.structure.adapter
        if adapter is None:
            return []
        rest = [
            each.map_entries(lambda entry: None if entry.kind == "activation" else entry)
            for site, each in self._adapter_ledgers.items()
            for _ in range(self.structure.kinds[site])
        ]
        return [*rest, adapter.shared_ledger(self.structure.sites), self._run_again]

    @property
    def _run_again(self) -> Ledger:
        """The work of adapters in blocks that run again in the backward pass."""
        blocks = tuple(self.config.block_prefixes()) if self.recompute else ()
        again = [
            replace(work, phase="backward")
            for site in self.structure.sites
            if f"{site.name}.".startswith(blocks)
            for work in self._adapter_ledgers[self.structure.kind_of[site]].work
            if work.phase == "forward"
        ]
        return Ledger.of(*again)

    def slack(self) -> int:
        """How far the begin of the blocks' backward passes is below the worst of phase `loss`."""
        if self.traces is not None:
            return self.traces.slack(self.shape, recompute=self.recompute)
        return self.task.slack(
            self.config, self.shape, adapted=self.adapted, recompute=self.recompute
        )

    def released(self) -> list[int]:
        """For each trained parameter, bytes that blocks have let go of when its gradient comes.

        Those before the one that it is in, in the order of the backward pass; of a parameter that
        stands before all blocks, all of them.
        """
        if self.traces is not None:
            kept = self.traces.kept_by_block(self.shape, recompute=self.recompute)
        else:
            task, adapted = self.task, self.adapted
            kept = list(
                task.kept_by_block(
                    self.config, self.shape, adapted=adapted, recompute=self.recompute
                )
            )
        prefixes = tuple(self.config.block_prefixes())
        if len(kept) != len(prefixes):
            return [0] * len(self.structure.trained)
        gone = [sum(kept[block + 1 :]) for block in range(len(kept))]
        found, before = list[int](), sum(kept)
        for parameter in self.structure.trained:
            block = next((n for n, p in enumerate(prefixes) if parameter.name.startswith(p)), None)
            before = before if block is None else 0
            found.append(before if block is None else gone[block])
        return found

    def parts(self, layout: Layout) -> GatheredGroups:
        """The parameters, each block's together."""
        prefixes = self.config.block_prefixes()
        trained: dict[str, list[tuple[int, ...]]] = {prefix: [] for prefix in ["", *prefixes]}
        frozen: dict[str, list[tuple[int, int]]] = {prefix: [] for prefix in trained}

        def home(name: str) -> str:
            """The block that a parameter is in, or none."""
            return next((prefix for prefix in prefixes if name.startswith(prefix)), "")

        for parameter in self.structure.trained:
            trained[home(parameter.name)].append(parameter.shape)
        if self.structure.adapter is not None or self.structure.freezes:
            taken = {one.name.rpartition(".")[0] for one in self.structure.trained}
            for name, rows in self.task.held(self.config, self.shape.weight_bytes).items():
                path, _, leaf = name.rpartition(".")
                if leaf == "bias" or path not in taken:
                    frozen[home(name)] += rows

        def group(prefix: str) -> Group:
            return Group(tuple(trained[prefix]), tuple(frozen[prefix]))

        return GatheredGroups(group(""), tuple(group(prefix) for prefix in prefixes), layout)


def _kind(adapter: Adapter, site: Site) -> tuple[Any, ...]:
    """What two sites have in common whose adapters spend the same."""
    tensors = (adapter.factors(site), adapter.frozen(site), adapter.derived(site))
    shape = replace(site, name="", names=(), prepared={})
    return shape, tuple((n, f.shape, f.dtype) for named in tensors for n, f in named.items())


def shared(model: Model, ledger: Ledger, parts: GatheredGroups, recipe: Recipe) -> Ledger:
    """A rank's ledger where ranks share the work.

    Args:
        ledger: of one process that does what a rank does.
        parts: what a rank holds.
    """
    layout, section, comm = parts.layout, recipe.parallel, recipe.method("comm")
    if isinstance(comm, Schedule):
        layers, micro_batches = _by_layer(model.structure), model.shape.micro_batches
        saved = ledger.bytes("activation", "forward")
        at = ScheduleQuery(layers, layout.ranks, micro_batches=micro_batches, saved=saved)
        return ledger + comm.ledger(at)
    exchange: ExchangeLedger = ShardExchange.ledger if comm is None else comm.ledger
    trained = model.structure.trained
    if isinstance(comm, MatrixMethod):
        if layout.shards == 1:
            return exchange_ledger.replicated_matrices(
                ledger,
                trained,
                ranks=layout.ranks,
                bucket_bytes=section.bucket,
                slack=model.slack(),
                released=model.released(),
                accumulates=model.shape.micro_batches > 1,
                exchange=comm.ledger,
            )
        exchange = _on_masters(comm, trained, section.bucket)
    if layout.copies:
        return exchange_ledger.zero(
            ledger,
            trained,
            ranks=layout.shards,
            ranks_per_node=min(ranks_on_a_host(layout.ranks), layout.shards),
            bucket_bytes=section.bucket,
            micro_batches=model.shape.micro_batches,
            slack=model.slack(),
            exchange=exchange,
        )
    if layout.shards == 1:
        head = parts.root.trained[1:]
        order = [*parts.root.trained[:1], *(s for b in parts.blocks for s in b.trained), *head]
        sizes = [math.prod(shape) for shape in order]
        late = 4 * max(sizes[:1], default=0) + parts.block_gradients
        slack = model.slack()
        return replicated(ledger, sizes, section.bucket, layout.replicas, late=late, slack=slack)
    cut = _cut(model, ledger, parts, reshard_after_forward=section.reshard_after_forward)
    if comm is None:
        return cut
    if isinstance(comm, MatrixMethod):
        micro_batches = model.shape.micro_batches
        if comm.sums_matrices_on_rows or layout.replicas > 1:
            return exchange_ledger.matrices_on_sharded(
                cut, parts, micro_batches=micro_batches, exchange=comm.ledger
            )
        return exchange_ledger.summed_on_sharded(
            cut, parts, micro_batches=micro_batches, exchange=exchange
        )
    return exchange_ledger.on_sharded(
        cut,
        parts,
        micro_batches=model.shape.micro_batches,
        ranks_per_node=min(ranks_on_a_host(layout.ranks), layout.shards),
        exchange=exchange,
    )


def _on_masters(
    comm: MatrixMethod, trained: Sequence[TrainedParameter], bucket_bytes: int
) -> ExchangeLedger:
    """The ledger of what a method sends where each rank owns rows of the sums of gradients."""
    of_matrices = exchange_ledger.with_matrices(trained, bucket_bytes, comm.ledger)

    def spent(at: ExchangeQuery) -> Ledger:
        of_rows = comm.ledger_of_rows(at)
        return of_matrices(at) if of_rows is None else of_rows

    return spent


def owed_bytes(recipe: Recipe, structure: Structure, layout: Layout) -> int:
    """Bytes that an exchange of matrices keeps between updates, which a checkpoint holds too."""
    comm = recipe.method("comm")
    if not isinstance(comm, MatrixMethod) or layout.ranks == 1:
        return 0
    shapes = exchange_ledger.exchanged([parameter.shape for parameter in structure.trained], layout)
    at = MatrixQuery((tuple(shapes),), layout.ranks)
    there = (e for e in comm.ledger(at).entries if e.kind == "buffer" and e.phases == ALWAYS)
    return sum(entry.bytes for entry in there)


def coding_flops(recipe: Recipe, structure: Structure, layout: Layout) -> int:
    """Operations by which an exchange of matrices makes what it sends, and sums of that."""
    comm = recipe.method("comm")
    if not isinstance(comm, MatrixMethod) or layout.ranks == 1:
        return 0
    shapes = [parameter.shape for parameter in structure.trained]
    return comm.coding_flops(exchange_ledger.exchanged(shapes, layout))


def sent_dense(recipe: Recipe, structure: Structure, layout: Layout) -> dict[str, int]:
    """Trained tensors that an exchange of matrices sends as they are, with their elements."""
    comm = recipe.method("comm")
    if not isinstance(comm, MatrixMethod):
        return {}
    sizes = {parameter.name: math.prod(parameter.shape) for parameter in structure.trained}
    each = exchange_ledger.exchanged([p.shape for p in structure.trained], layout)
    shapes = dict(zip(sizes, each, strict=True))
    return {name: sizes[name] for name in comm.dense(shapes)}


def _cut(
    model: Model, ledger: Ledger, parts: GatheredGroups, *, reshard_after_forward: bool
) -> Ledger:
    # A micro-batch's gradients are sharded before the next one's are made; its tokens wait.
    once = replace(model, shape=replace(model.shape, micro_batches=1))
    alone = once.ledger()
    buffers = ledger.map_entries(lambda entry: entry if entry.kind == "buffer" else None)
    rest = alone.map_entries(lambda entry: None if entry.kind == "buffer" else entry)
    spent = sharded(
        replace(rest, entries=rest.entries + buffers.entries),
        parts,
        micro_batches=model.shape.micro_batches,
        reshard_after_forward=reshard_after_forward,
        recompute=model.recompute,
        slack=once.slack(),
    )
    adapter, sites = model.structure.adapter, model.structure.sites
    if adapter is None:
        return spent
    # Buffers, which FSDP2 leaves as they are.
    return spent + Ledger.of(Entry("weight", adapter.frozen_total(sites), what=NOT_TRAINED))


def _by_layer(structure: Structure) -> tuple[tuple[int, ...], ...]:
    """Elements of the trained parameters of each layer that holds some."""
    layers: dict[str, list[int]] = {}
    for parameter in structure.trained:
        owner = parameter.name.rpartition(".")[0]
        layers.setdefault(owner, []).append(math.prod(parameter.shape))
    return tuple(map(tuple, layers.values()))

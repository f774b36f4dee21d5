"""MoS: all layers of one kind build their LoRA matrices from one pool of vector shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from modicum.adapters.base import Adapter, AdapterQuery, Factor
from modicum.adapters.factors import SharedFactors
from modicum.adapters.fused import in_autocast
from modicum.adapters.kinds import peers, pool_names
from modicum.adapters.lora import LoRA
from modicum.adapters.lora_layer import LoRALayer
from modicum.adapters.names import plain_name
from modicum.adapters.sites import Site
from modicum.adapters.widths import check_divides, linear_only
from modicum.core.contracts.method import Against, Info, PositiveFloat, PositiveInt
from modicum.core.contracts.search import IntegerRange, SearchTable
from modicum.core.errors import InputError
from modicum.core.random import bits
from modicum.core.ranks.sharding import whole


class MoSLayer(LoRALayer):
    """LoRA with A = pool_A[index_A] as [r, in] and B = (pool_B[index_B] as [r, out])^T."""

    method: MoS
    index_A: Tensor
    index_B: Tensor

    def __init__(
        self,
        method: Adapter,
        site: Site,
        shared: SharedFactors,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(method, site, shared, device)
        # What a forward pass reads is alike in all blocks, so one compiled form serves them all.
        self.pool_A, self.pool_B = pool_names(site)

    def initialise(self, *, seed: int, device: torch.device | str) -> None:
        """Choose the shards: a function of the seed, the kind of layer, the layer, A or B."""
        super().initialise(seed=seed, device=device)
        for factor in "AB":
            index = self.method.index(self.site, self.shared.sites, factor, seed=seed)
            self.get_buffer(f"index_{factor}").copy_(index)

    def matrices(self) -> tuple[Tensor, Tensor]:
        a, b = self.built(getattr(self.shared, self.pool_A), getattr(self.shared, self.pool_B))
        return in_autocast(a), in_autocast(b)

    def as_lora(self) -> tuple[Tensor, Tensor, float]:
        pools = (whole(self.shared.get_parameter(name)) for name in (self.pool_A, self.pool_B))
        return *self.built(*pools), self.method.scale

    def built(self, pool_A: Tensor, pool_B: Tensor) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r] from the pools [rows, in / l] and [rows, out / l]."""
        rank = self.method.rank
        a = pool_A.index_select(0, self.index_A).view(rank, self.site.in_features)
        return a, pool_B.index_select(0, self.index_B).view(rank, self.site.out_features).T


class MoS(LoRA):
    """LoRA of rank r at the size of one of rank e: layers of one kind share a pool of shards.

    Prefer it where very many adapters are stored or served: forward, merge and serving are LoRA's,
    the tensors fewer. For a single adapter whose size does not matter, LoRA is simpler.

    Layers of one kind are those of one last name (`q_proj`; numbers are no names) and one shape, N
    of them, [m, n]. Their pools PA [e N l, n / l] and PB [e N l, m / l] are trained, e N (m + n)
    numbers. A layer's row of A joins l shards. What it takes is fixed by the seed: (r - p) l shards
    at random from the public ones, other ones for A than for B, and p l private ones that no other
    layer uses, the same for A and B. PA starts uniform in (-1/sqrt(n), 1/sqrt(n)) and PB zero.

    The indices are kept in the state (8 r l bytes a layer), so it does not depend on the seed that
    another attached adapter was given. The release's optional random scaling of ranks, which is off
    there, is left out.

    Args:
        rank: r, the inner width of each layer's product.
        equivalent_rank: e, the rank of the LoRA that has as many parameters.
        private_rank: p, of the r rows of a layer those that are its own; p <= e <= r, and e = r
            where p = e, since no shard is public then.
        shards: l, the parts of a row; in and out must be multiples of it.
        alpha: s = alpha / rank; None means s = 1.
        dropout, targets, exclude: see `Adapter`; embeddings cannot be targets.

    Raises:
        InputError: ranks that do not go together, or a layer that l does not divide.

    Source: Wang et al., "MoS: Unleashing Parameter Efficiency of Low-Rank Adaptation with Mixture
    of Shards", ICLR 2025, arXiv 2410.00938, section 3; the authors' code.

    >>> import torch
    >>> from modicum.adapters import MoS
    >>> layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    >>> model = torch.nn.Sequential(*layers)
    >>> adapter = MoS(rank=4, equivalent_rank=1, private_rank=0).attach(model)
    >>> {name: tuple(pool.shape) for name, pool in adapter.named_parameters()}
    {'shared.layer_16x16_A': (16, 4), 'shared.layer_16x16_B': (16, 4)}
    >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    >>> inputs = torch.randn(64, 16)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """

    info = Info(
        name="mos",
        title="MoS: LoRA matrices built from one pool of vector shards",
        room="adapters",
        paper="MoS: Unleashing Parameter Efficiency of Low-Rank Adaptation with Mixture of Shards, "
        "arXiv 2410.00938",
        claim="about 8 times fewer parameters than LoRA at equal quality on LLaMA-2-7B and 13B",
        traits=("adapts_base", "mergeable", "is_lora", "exact_resume", "compiles"),
        evidence="verified against code",
        claim_verdict="in part",
        against=Against("worse", "the same rows for all layers"),
        reason="as good as LoRA of twice the parameters; but the same rows for all layers, without "
        "its choice of shards, are better still",
        run_on_gpu=True,
        tiny={"rank": 2, "shards": 1},
    )
    search = SearchTable(
        {
            "equivalent_rank": IntegerRange(2, 8, 2, log=True),
            "rank": IntegerRange(2, 64, 8, log=True),
        },
        size="equivalent_rank",
    )
    layer = MoSLayer

    equivalent_rank: PositiveInt = 2
    private_rank: NonNegativeInt = 1
    shards: PositiveInt = 4
    alpha: PositiveFloat | None = 16.0

    def model_post_init(self, context: Any) -> None:
        """Check what fields must be to each other."""
        r, e, p = self.rank, self.equivalent_rank, self.private_rank
        if not p <= e <= r:
            problem = "private_rank must be at most equivalent_rank, and that at most rank"
            raise InputError(problem, field="equivalent_rank", value=e)
        if p == e < r:
            problem = "without public shards (private_rank = equivalent_rank) rank must be the same"
            raise InputError(problem, field="rank", value=r, allowed=str(e))

    def factors(self, site: Site) -> Mapping[str, Factor]:
        linear_only(site, "MoS adapts linear layers, and this is an embedding")
        widths = {"inputs": site.in_features, "outputs": site.out_features}
        named = {f"the {side} of {site.name}": width for side, width in widths.items()}
        check_divides("shards", self.shards, named)
        return {}

    def frozen(self, site: Site) -> Mapping[str, Factor]:
        taken = Factor((self.rank * self.shards,), dtype=torch.int32)
        return {"index_A": taken, "index_B": taken}

    def shared(self, sites: Sequence[Site]) -> Mapping[str, Factor]:
        pools: dict[str, Factor] = {}
        for site in sites:
            count = len(peers(site, sites))
            public = (self.equivalent_rank - self.private_rank) * count
            if self.rank - self.private_rank > public:
                raise InputError(
                    f"above what a pool has for {site.name}: {public} public rows, as there are "
                    f"{count} layers of its kind, and {self.private_rank} private ones",
                    field="rank",
                    value=self.rank,
                )
            rows = self.equivalent_rank * count * self.shards
            n, m = site.in_features, site.out_features
            of_a, of_b = pool_names(site)
            pools[of_a] = Factor((rows, n // self.shards), bound=1.0 / math.sqrt(n))
            pools[of_b] = Factor((rows, m // self.shards))
        return pools

    def check_kept(self, sites: Sequence[Site], state: Mapping[str, Tensor]) -> None:
        pools = self.shared(sites)
        for site in sites:
            for pool in pool_names(site):
                name = f"{plain_name(site.name)}.index_{pool[-1]}"
                index, rows = state[name], pools[pool].shape[0]
                if index.min() < 0 or index.max() >= rows or len(index.unique()) < len(index):
                    problem = f"has indices that repeat, or are none of {rows} rows"
                    raise InputError(problem, field=name)

    def index(self, site: Site, sites: Sequence[Site], factor: str, *, seed: int) -> Tensor:
        """The rows of a pool that a layer takes, in their order: int64 [r l]."""
        alike = peers(site, sites)
        private = self.private_rank * self.shards
        public = (self.equivalent_rank - self.private_rank) * len(alike) * self.shards
        words = bits(public, seed=seed, name=f"mos/{site.name}/{factor}")
        chosen = words.argsort(stable=True)[: (self.rank - self.private_rank) * self.shards]
        first = public + alike.index(site) * private
        return torch.cat([chosen, torch.arange(first, first + private)])

    def matrices_kept(self, at: AdapterQuery) -> int:
        return self.rank * (at.site.in_features + at.site.out_features)

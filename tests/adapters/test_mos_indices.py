"""Which shards each layer of MoS takes, and which sizes do not fit a model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modicum.adapters import MoS
from modicum.adapters.sites import Site
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import llama


def sites(count: int) -> list[Site]:
    return [Site(f"blocks.{i}.up", "linear", 8, 12) for i in range(count)]


@given(
    count=st.integers(1, 6),
    e=st.integers(1, 4),
    more=st.integers(0, 8),
    p=st.integers(0, 4),
    shards=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 9),
)
def test_indices(count: int, e: int, more: int, p: int, shards: int, seed: int) -> None:
    p = min(p, e)
    r = e if p == e else max(e, p + min(more, (e - p) * count))
    value = MoS(rank=r, equivalent_rank=e, private_rank=p, shards=shards)
    public = (e - p) * count * shards
    private: list[int] = []
    for site in sites(count):
        of = {factor: value.index(site, sites(count), factor, seed=seed) for factor in "AB"}
        for index in of.values():
            assert len(index) == len(index.unique()) == r * shards
            assert (index[: (r - p) * shards] < public).all()
        own = of["A"][(r - p) * shards :]
        assert torch.equal(own, of["B"][(r - p) * shards :])  # private pairs stay together
        private += own.tolist()
    assert private == list(range(public, e * count * shards))  # each is one layer's


def test_indices_are_a_function_of_seed_layer_and_factor() -> None:
    value, all_sites = MoS(rank=6, equivalent_rank=2, private_rank=0), sites(8)

    def chosen() -> list[tuple[int, ...]]:
        each = [(site, factor, s) for site in all_sites for factor in "AB" for s in (0, 1)]
        return [tuple(value.index(i, all_sites, f, seed=s).tolist()) for i, f, s in each]

    first = chosen()
    assert len(set(first)) == 32
    torch.manual_seed(7)
    assert chosen() == first


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rank": 2, "equivalent_rank": 3}, "private_rank must be at most equivalent_rank"),
        ({"private_rank": 3}, "private_rank must be at most equivalent_rank"),
        ({"private_rank": 2, "rank": 3}, "without public shards"),
        ({"shards": 3}, r"shards: does not divide the inputs of .*q_proj \(16\), the outputs"),
        ({"rank": 9}, r"rank: above what a pool has for .*: 2 public rows, as there are 2 layers"),
        ({"targets": ("embed_tokens",)}, "this is an embedding"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_model_left_alone(
    fields: dict[str, object], match: str
) -> None:
    model = llama()
    with pytest.raises(InputError, match=match):
        MoS(**({"rank": 2, "equivalent_rank": 2, "private_rank": 1} | fields)).attach(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("adapt" in name for name, _ in model.named_modules())

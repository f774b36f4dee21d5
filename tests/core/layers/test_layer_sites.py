"""One survey finds the layers of a model for all rooms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from modicum.adapters.sites import all_sites
from modicum.core.layers.dense_layers import all_layers
from modicum.core.layers.layer_sites import Site, other_users, survey
from modicum.linears import NF4Linear


class Doubled(nn.Linear):
    """A linear layer with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return 2 * super().forward(x)


class Named(nn.Linear):
    """A linear layer with another name."""


def model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "table": nn.Embedding(9, 4),
            "short": nn.Embedding(9, 4, max_norm=1.0),
            "kernel": nn.Conv1d(4, 6, 3),
            "dense": nn.Linear(4, 6).double(),
            "named": Named(4, 6),
            "codes": NF4Linear(4, 6),
            "doubled": Doubled(4, 6),
            "normed": parametrizations.weight_norm(nn.Linear(4, 6)),
            "lazy": nn.LazyLinear(3),
            "mixer": nn.MultiheadAttention(4, 2),
            "norm": nn.LayerNorm(4),
        }
    )


def test_every_room_gets_the_layers_that_it_can_change() -> None:
    found = survey(model())
    assert found.every["kernel"] == Site("kernel", "convolution", 4, 6, names=("kernel",))
    assert found.every["table"] == Site("table", "embedding", 9, 4, True, names=("table",))
    assert found.every["dense"].dtype == torch.float64
    assert sorted(found.refused) == ["doubled", "lazy", "mixer.out_proj", "normed", "short"]
    assert found.linear == ["dense", "named", "codes"]
    assert list(survey(model(), ["convolution"]).every) == ["kernel"]
    assert [site.name for site in all_sites(model())] == ["table", "dense", "named", "codes"]
    # A subclass may use its weight in a way of its own, and codes are no matrix.
    assert list(all_layers(model())) == ["dense"]


def test_who_else_uses_a_weight_is_known_by_all_names() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    shared = nn.ModuleDict({"one": block, "two": block, "three": nn.Linear(4, 4)})
    sites = survey(shared).every
    assert sites["one.0"].names == ("one.0", "two.0")
    assert {s.name: names for s, names in other_users(shared, sites.values())} == {
        "one.0": ["two.0"],
        "three": [],
    }
    shared["three"].weight = block[0].weight
    assert {s.name: names for s, names in other_users(shared, sites.values())} == {
        "one.0": ["two.0", "three"],
        "three": ["one.0", "two.0"],
    }

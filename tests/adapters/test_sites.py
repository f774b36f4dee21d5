"""Which layers names choose."""

from __future__ import annotations

import pytest
from torch import nn

from modicum.adapters import LoRA
from modicum.adapters.sites import all_sites, choose
from modicum.core.errors import InputError
from modicum.linears import NF4Linear
from modicum.proofs.contracts.adapters.subjects import llama, odd_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def chosen(*targets: str, exclude: tuple[str, ...] = ()) -> list[str]:
    return [site.name for site in choose(llama("meta"), targets, exclude)]


def test_all_linear_is_every_linear_layer_but_the_head() -> None:
    expected = [
        f"model.layers.{block}.{part}.{name}"
        for block in (0, 1)
        for part, names in (("self_attn", ATTENTION), ("mlp", MLP))
        for name in names
    ]
    assert sorted(chosen("all-linear")) == sorted(expected)


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (("q_proj",), 2),
        (("q_proj", "v_proj"), 4),
        (("mlp.up_proj",), 2),
        (("model.layers.1.mlp.up_proj",), 1),
        (("model.layers.1.*",), 7),
        (("*_proj",), 14),
        (("lm_head",), 1),
        (("embed_tokens",), 1),
        (("all-linear", "lm_head"), 15),
    ],
)
def test_names_last_names_and_patterns(targets: tuple[str, ...], count: int) -> None:
    assert len(chosen(*targets)) == count


def test_a_last_name_is_a_whole_name() -> None:
    # `proj` ends many names and is none of them.
    with pytest.raises(InputError, match="no layer of the model has this name"):
        chosen("proj")


def test_excluded_layers_are_left_out() -> None:
    kept = chosen("all-linear", exclude=("down_proj", "model.layers.0.*"))
    assert len(kept) == 6
    assert all(name.startswith("model.layers.1.") for name in kept)
    with pytest.raises(InputError, match="excluded again"):
        chosen("q_proj", exclude=("q_proj",))


def test_what_matches_nothing_is_told_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="Did you mean 'q_proj'") as error:
        chosen("v_proj", "q_porj")
    assert error.value.field == "targets"
    assert "all-linear" in str(error.value.allowed)


def test_an_adapted_layer_keeps_its_name() -> None:
    model = odd_model()
    before = all_sites(model)
    LoRA(rank=1).attach(model)
    assert all_sites(model) == before


def test_a_model_with_nothing_to_adapt_is_refused() -> None:
    with pytest.raises(InputError, match="no linear layer"):
        LoRA().attach(nn.Sequential(nn.ReLU()))


def test_a_tied_head_is_named_with_its_twin() -> None:
    model = llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(InputError, match=r"shared with model\.embed_tokens"):
        LoRA(targets=("lm_head",)).attach(model)
    assert len(LoRA().attach(model).sites) == 14


def test_layers_of_every_linear_form_are_sites() -> None:
    model = nn.Sequential(NF4Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), nn.LayerNorm(4))
    assert [(s.name, s.in_features, s.out_features) for s in all_sites(model)] == [
        ("0", 8, 6),
        ("2", 6, 4),
    ]
    assert isinstance(LoRA(rank=1).attach(model).model[0], NF4Linear)


def test_shared_codes_are_shared_weights() -> None:
    model = nn.Sequential(NF4Linear(6, 6, bias=False), NF4Linear(6, 6, bias=False))
    model[1].codes = model[0].codes
    with pytest.raises(InputError, match="shared with 1"):
        LoRA().attach(model)
    biased = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    biased[1].bias = biased[0].bias  # which no adapter changes
    assert len(LoRA(rank=1).attach(biased).sites) == 2

"""Experts of transformers are stacked matrices: every room leaves them out, and says so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from decoders import config_json
from torch import nn
from torch.nn.utils import parametrizations
from transformers.models.dbrx.modeling_dbrx import DbrxExpertGLU
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from modicum.adapters import LoRA
from modicum.compress import FWSVD
from modicum.core.contracts.method import Context
from modicum.core.errors import InputError
from modicum.core.layers.left_out import what_is_left_out, what_stays
from modicum.core.layers.loose_matrices import (
    EXPERTS,
    MATRIX,
    STACKED,
    loose_matrices,
    stacked_experts,
)
from modicum.linears import NF4, Dense, NF4Linear

STACKS = [
    f"model.layers.{block}.mlp.experts.{leaf}"
    for block in (0, 1)
    for leaf in ("gate_up_proj", "down_proj")
]
ROUTERS = [f"model.layers.{block}.mlp.gate.weight" for block in (0, 1)]
LEFT = dict.fromkeys(STACKS, EXPERTS) | dict.fromkeys(ROUTERS, MATRIX)


class Named(nn.Linear):
    """A linear layer with another name."""


def mixtral() -> Any:
    raw = config_json("mixtral")
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_experts_are_stacked_in_parameters_of_three_dimensions() -> None:
    model = mixtral()
    assert sorted(stacked_experts(model)) == sorted(STACKS)
    assert {model.get_parameter(name).ndim for name in STACKS} == {3}


def test_rows_of_all_experts_are_experts_and_biases_are_no_matrices() -> None:
    sizes = SimpleNamespace(
        hidden_size=6, ffn_hidden_size=4, intermediate_size=4, moe_num_experts=3,
        num_local_experts=3, num_experts_per_tok=1, ffn_act_fn={}, swiglu_alpha=1.0,
        swiglu_limit=7.0,
    )  # fmt: skip
    layers = {"rows": DbrxExpertGLU(sizes), "stacked": GptOssExperts(sizes)}
    model = nn.ModuleDict(layers | {"router": GptOssTopKRouter(sizes)})
    experts = {"rows.w1", "rows.v1", "rows.w2", "stacked.gate_up_proj", "stacked.down_proj"}
    expected = dict.fromkeys(experts, EXPERTS) | {"router.weight": MATRIX}
    assert loose_matrices(model, lambda path, module: False) == expected
    assert set(stacked_experts(model)) == experts


def test_a_parametrized_layer_is_listed_once_and_a_convolution_not_at_all() -> None:
    made = [nn.Linear(4, 4), nn.Conv1d(4, 4, 3)]
    model = nn.Sequential(*(parametrizations.weight_norm(layer) for layer in made))
    assert NF4().left_out(model) == {"0": "it is parametrized"}
    assert NF4(exclude=("0",)).left_out(model) == {}


def test_an_adapter_freezes_experts_and_lists_them() -> None:
    model = mixtral()
    with pytest.warns(UserWarning, match=r"all-linear leaves out .*\*\.mlp\.experts\.") as caught:
        adapter = LoRA(rank=2).attach(model)
    assert caught[0].filename == __file__
    assert EXPERTS in str(caught[0].message)
    assert adapter.left_out == LEFT
    assert not any(model.get_parameter(name).requires_grad for name in STACKS)
    assert not any(name.rpartition(".")[0] in adapter.sites for name in STACKS)


def test_a_linear_form_leaves_experts_dense_and_lists_them() -> None:
    model = mixtral()
    with pytest.warns(UserWarning, match=r"all-linear leaves out .*\*\.mlp\.experts\.") as caught:
        formed = NF4().convert(model)
    assert caught[0].filename == __file__
    assert formed.left_out == LEFT
    assert isinstance(model.model.layers[0].self_attn.q_proj, NF4Linear)
    assert all(model.get_parameter(name).is_floating_point() for name in STACKS)
    # What has the form already is not left out.
    assert NF4().left_out(model) == LEFT


def test_what_is_bound_lists_them_and_changes_nothing() -> None:
    model = mixtral()
    assert NF4().bind(Context(model)).left_out == LEFT
    assert FWSVD(rank=2).bind(Context(model)).left_out == LEFT
    assert Dense().left_out(model) == {}
    assert NF4(targets=("q_proj",)).bind(Context(model)).left_out == {}


def test_what_is_excluded_is_not_listed() -> None:
    model = mixtral()
    assert NF4(exclude=("experts", "*.gate.weight")).left_out(model) == {}
    assert NF4(exclude=("mlp.experts",)).left_out(model) == dict.fromkeys(ROUTERS, MATRIX)


def test_what_an_adapter_has_copies_of_is_not_listed() -> None:
    gates = dict.fromkeys(ROUTERS, MATRIX)
    with pytest.warns(UserWarning, match=r"leaves out model\.layers\.\*\.mlp\.gate\.weight"):
        experts = LoRA(rank=2, also=("experts",)).attach(mixtral())
    assert experts.left_out == gates
    every = LoRA(rank=2, also=("mlp",)).attach(mixtral())  # any warning would fail the test
    assert every.left_out == {}


def test_a_pattern_of_layers_that_matches_experts_lists_them() -> None:
    model, expected = mixtral(), {name: EXPERTS for name in STACKS if ".1." in name}
    with pytest.warns(UserWarning, match="`targets` leaves out"):
        adapter = LoRA(rank=2, targets=("model.layers.1.*",)).attach(model)
    assert set(adapter.sites) == {
        f"model.layers.1.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    assert adapter.left_out == expected


@pytest.mark.parametrize(
    "choose",
    [
        lambda model, target: LoRA(rank=2, targets=(target,)).attach(model),
        lambda model, target: NF4(targets=(target,)).plan(model),
        lambda model, target: FWSVD(rank=2, targets=(target,)).plan(model),
    ],
    ids=["adapter", "form", "compressor"],
)
@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("experts", STACKS),
        ("gate_up_proj", STACKS[::2]),
        (STACKS[3], STACKS[3:]),
        ("mlp.experts.0.w1", STACKS),
    ],
)
def test_a_target_that_names_experts_is_refused_with_what_they_are(
    choose: Callable[[nn.Module, str], object], target: str, named: list[str]
) -> None:
    with pytest.raises(InputError, match=f"names {EXPERTS}: ") as error:
        choose(mixtral(), target)
    assert (error.value.field, error.value.value) == ("targets", target)
    said = error.value.problem
    assert [name for name in STACKS if name in said] == named[:3]
    assert ("and 1 more" in said) == (len(named) == 4)


def test_a_subclass_is_listed_and_a_layer_in_another_form_is_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Named(4, 4), NF4Linear(4, 4), nn.Bilinear(2, 3, 4))
    found = NF4().left_out(model)
    assert set(found) == {"1", "3.weight"}
    assert found["1"].startswith("Named is a subclass of Linear")
    assert found["3.weight"] == STACKED


def test_a_sentence_names_alike_names_once() -> None:
    assert what_is_left_out(LEFT, ["all-linear"]) == (
        f"all-linear leaves out model.layers.*.mlp.experts.gate_up_proj ({EXPERTS}), "
        f"model.layers.*.mlp.experts.down_proj ({EXPERTS}), "
        f"model.layers.*.mlp.gate.weight ({MATRIX}); `left_out` lists them"
    )
    assert what_stays(LEFT) == (
        "experts of 2 layers stay as they are, as no form here can hold stacked matrices: "
        "model.layers.*.mlp.experts.gate_up_proj, model.layers.*.mlp.experts.down_proj; "
        f"left out: model.layers.*.mlp.gate.weight ({MATRIX})"
    )
    assert what_stays({STACKS[0]: EXPERTS}).startswith("experts of 1 layer stay as they are")
    mixers = [f"layers.{block}.{mixer}.up" for block in (0, 1) for mixer in ("attention", "mlp")]
    assert what_stays(dict.fromkeys(mixers, EXPERTS)).startswith("experts of 2 layers stay")
    many = {f"{letter}.weight": MATRIX for letter in "abcdefg"}
    assert what_stays(many).endswith(", and 2 more kinds")

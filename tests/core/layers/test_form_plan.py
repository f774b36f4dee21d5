"""The plan of forms: a value that travels as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.core.layers.block_plan import BlockPlan
from modicum.core.layers.form_plan import FormPlan, LayerForm

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"


def plan() -> FormPlan:
    made = FormPlan().with_default("nf4").with_form(UP, "low_rank", rank=3)
    return made.with_form(DOWN, "dense").with_block("model.layers.1", mlp_width=40)


def of_a_block(**own: Any) -> dict[str, Any]:
    return {"blocks": {"model.layers.0": own}}


def test_what_a_block_has_of_its_own_is_put_in_order() -> None:
    block = BlockPlan(heads=4, mixer_skips=[5, 1, 2], mlp_skips=range(2, 8))
    assert block.skips == (((1, 2), (5, 5)), ((2, 7),))
    assert block.as_json() == {"heads": 4, "mixer_skips": [[1, 2], 5], "mlp_skips": [[2, 7]]}
    assert BlockPlan.from_json(json.loads(json.dumps(block.as_json()))) == block
    made = FormPlan().with_block("b", heads=4, mixer_skips=[5, [1, 2]]).with_block("b", mlp_width=3)
    assert made.block("b") == BlockPlan(4, None, 3, ((1, 2), (5, 5)))
    assert made.block("a") == BlockPlan()
    assert made.with_block("b", heads=None, mlp_width=None, mixer_skips=()).plain
    with pytest.raises(InputError, match=r"^forms.blocks.b.kv_heads: the 4 heads"):
        made.with_block("b", kv_heads=3)


def test_a_plan_travels_as_json() -> None:
    raw = json.loads(json.dumps(plan().as_json()))
    assert FormPlan.from_json(raw) == plan()
    assert raw["layers"][UP] == {"form": "low_rank", "rank": 3}
    assert FormPlan().as_json() == {}
    assert FormPlan().plain
    assert not plan().plain


def test_layers_have_the_default_or_their_own() -> None:
    assert plan().of(UP) == LayerForm("low_rank", {"rank": 3})
    assert plan().of(DOWN).name == "dense"
    assert plan().of("model.layers.0.self_attn.q_proj").name == "nf4"
    again = plan().with_form(UP, "low_rank", rank=5)
    assert again.of(UP).arguments == {"rank": 5}
    assert plan().of(UP).arguments == {"rank": 3}
    assert again.with_form(UP, "nf4").with_form(DOWN, "nf4").layers == {}


def test_what_the_default_says_is_not_said_twice() -> None:
    one = FormPlan().with_form(UP, "nf4").with_default("nf4")
    assert one == FormPlan(LayerForm("nf4"))


def test_a_part_of_a_plan() -> None:
    first = plan().within(["model.layers.1."])
    assert set(first.layers) == {DOWN}
    assert first.blocks == {"model.layers.1": BlockPlan(mlp_width=40)}
    assert plan().within(["model.layers.0."]).blocks == {}
    assert plan().dense() == FormPlan().with_block("model.layers.1", mlp_width=40)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ([], "section of these keys"),
        ({"layer": {}}, "section of these keys"),
        ({"layers": []}, "forms.layers: expected a section"),
        ({"layers": {UP: "nf4"}}, f"forms.layers.{UP}: a linear form is written as"),
        ({"layers": {UP: {"form": "low_rank", "rank": [3]}}}, "rank: an argument of a form"),
        ({"default": {"name": "nf4"}}, "forms.default: a linear form is written as"),
        (of_a_block(width=2), "model.layers.0: of a block these can differ.*mlp_skips"),
        (of_a_block(head=2), "Did you mean 'heads'"),
        ({"blocks": {"model.layers.0": 3}}, "of a block these can differ"),
        (of_a_block(mlp_width=True), "model.layers.0.mlp_width: must be an integer of at least 1"),
        (of_a_block(heads=0), "heads: must be an integer of at least 1"),
        (of_a_block(heads=3, kv_heads=2), "the 3 heads must be a multiple"),
        (of_a_block(mlp_skips=1.5), "mlp_skips: a skip is an integer"),
        (of_a_block(mlp_skips=[0]), "mlp_skips: a skip is an integer"),
        (of_a_block(mixer_skips=[[3, 2]]), "mixer_skips: a skip is an integer"),
        (of_a_block(mixer_skips=[[1, 2, 3]]), "mixer_skips: a skip is an integer"),
    ],
)
def test_what_is_no_plan_is_refused(raw: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        FormPlan.from_json(raw)

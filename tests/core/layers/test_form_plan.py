"""The plan of forms: a value that travels as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan, LayerForm

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"


def plan() -> FormPlan:
    made = FormPlan().with_default("nf4").with_form(UP, "low_rank", rank=3)
    return made.with_form(DOWN, "dense").with_mlp_width("model.layers.1", 40)


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
    assert first.mlp_widths == {"model.layers.1": 40}
    assert plan().within(["model.layers.0."]).mlp_widths == {}
    assert plan().dense() == FormPlan(mlp_widths={"model.layers.1": 40})


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ([], "section of these keys"),
        ({"layer": {}}, "section of these keys"),
        ({"layers": []}, "forms.layers: expected a section"),
        ({"layers": {UP: "nf4"}}, f"forms.layers.{UP}: a linear form is written as"),
        ({"layers": {UP: {"form": "low_rank", "rank": [3]}}}, "rank: an argument of a form"),
        ({"default": {"name": "nf4"}}, "forms.default: a linear form is written as"),
        ({"blocks": {"model.layers.0": {"heads": 2}}}, "only the MLP's can differ"),
        ({"blocks": {"model.layers.0": {"mlp_width": True}}}, "only the MLP's can differ"),
    ],
)
def test_what_is_no_plan_is_refused(raw: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        FormPlan.from_json(raw)

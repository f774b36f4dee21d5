from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan
from modicum.core.plain_values import as_plain, finite, from_plain
from modicum.models.config import ModelConfig
from modicum.models.convnet import ConvNetConfig

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@dataclass(frozen=True)
class Pair:
    mapping: object
    tuple: object = ()


VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(st.text(), inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


def test_what_is_not_finite_is_none_wherever_it_is() -> None:
    value = {"a": [float("inf"), 1], "b": {"c": (float("nan"), 0.5)}, "d": "nan"}
    assert finite(value) == {"a": [None, 1], "b": {"c": [None, 0.5]}, "d": "nan"}


@given(VALUES)
def test_values_come_back_as_they_were(value: object) -> None:
    assert from_plain(json.loads(json.dumps(as_plain(value)))) == value


def test_so_do_the_configurations_of_models() -> None:
    forms = FormPlan().with_form("model.layers.0.mlp.up_proj", "low_rank", rank=3)
    decoder = ModelConfig(
        50, 16, 2, 2, forms=forms.with_block("model.layers.1", heads=1, kv_heads=1, mlp_skips=[1])
    )
    for config in (decoder, ConvNetConfig(widths=(8, 16)), replace(decoder, rope_theta=5e5)):
        assert from_plain(json.loads(json.dumps(as_plain(config)))) == config


@pytest.mark.parametrize("value", [{1: 2}, Path("a"), {3}, object()])
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="another process"):
        as_plain([value])


def test_only_dataclasses_are_made() -> None:
    with pytest.raises(InputError, match="no dataclass"):
        from_plain({"class": "pathlib:Path"})

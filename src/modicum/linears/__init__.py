"""Linear forms: modules in place of `nn.Linear`, each of which says what dense weight it is."""

from __future__ import annotations

from modicum.core.layers.linear_forms import (
    DENSE,
    FORMS,
    LinearForm,
    full_weight,
    linear_form,
    make_linear,
    register,
    write_weight,
)
from modicum.linears.int8 import INT8, Int8Linear
from modicum.linears.low_rank import LOW_RANK, LowRankLinear, rank_surgery
from modicum.linears.nf4 import NF4, NF4Linear

__all__ = [
    "DENSE",
    "FORMS",
    "INT8",
    "LOW_RANK",
    "NF4",
    "Int8Linear",
    "LinearForm",
    "LowRankLinear",
    "NF4Linear",
    "full_weight",
    "linear_form",
    "make_linear",
    "rank_surgery",
    "register",
    "write_weight",
]

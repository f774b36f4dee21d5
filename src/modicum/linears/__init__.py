"""Linear forms: modules in the place of `nn.Linear`, each of which says what dense weight it is."""

from __future__ import annotations

from modicum.linears.base import FORMS, LinearForm, linear_form, make_linear, register
from modicum.linears.dense import DENSE

__all__ = ["DENSE", "FORMS", "LinearForm", "linear_form", "make_linear", "register"]

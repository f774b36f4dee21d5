"""Linear forms: modules in the place of `nn.Linear`, each of which says what dense weight it is."""

from __future__ import annotations

from modicum.core.linear_forms import (
    DENSE,
    FORMS,
    LinearForm,
    linear_form,
    make_linear,
    register,
)

__all__ = ["DENSE", "FORMS", "LinearForm", "linear_form", "make_linear", "register"]

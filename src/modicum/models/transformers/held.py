"""The tensors that a decoder of transformers holds of each parameter, by arithmetic."""

from __future__ import annotations

import math
from typing import Any

from modicum.core.layers.form_layer import StoredRows
from modicum.core.layers.form_plan import DENSE_FORM
from modicum.core.layers.linear_forms import linear_form
from modicum.models.transformers.config import TransformersConfig


def held_by_transformers(config: TransformersConfig, item_bytes: int) -> dict[str, StoredRows]:
    """Of each parameter how many rows its tensors have, and the bytes of one: codes and scales too.

    Those that are no codes have `item_bytes` an element, and four where they are kept in fp32.
    """
    layers = config.layers()

    def tensors(name: str, shape: tuple[int, ...]) -> StoredRows:
        item = max(4, item_bytes) if name in config.exact else item_bytes
        path, _, leaf = name.rpartition(".")
        form = config.forms.of(path) if path in layers else DENSE_FORM
        if form == DENSE_FORM or leaf != "weight":
            return ((shape[0] if shape else 1, math.prod(shape[1:]) * item),)
        arguments: dict[str, Any] = dict(form.arguments)
        return linear_form(form.name).rows(*layers[path], item, **arguments)

    return {name: tensors(name, shape) for name, shape in config.parameter_shapes().items()}

"""A decoder of transformers with memory, for weights that a folder holds."""

from __future__ import annotations

from dataclasses import replace

import torch

from modicum.core.layers.dense_layers import choose
from modicum.core.layers.form_plan import DENSE_FORM, FormPlan, LayerForm
from modicum.core.layers.meta import materialise, on_meta
from modicum.models.transformers.config import TransformersConfig
from modicum.models.transformers.model import TransformersDecoder, build

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def empty_decoder(
    config: TransformersConfig,
    stored: str,
    dtype: torch.dtype | None,
    device: torch.device | str,
    linear: str | FormPlan,
) -> TransformersDecoder:
    """The model of a configuration, whose weights are undefined.

    Args:
        stored: the dtype that files have, in their format's own names.
        dtype: of all parameters; None: the stored one.
        linear: the form that every layer but the output takes, where the folder does not hold it in
            one of its own; or the plan of forms.

    Raises:
        InputError: no linear form has that name, or a layer cannot take it.
    """
    with on_meta(dtype or DTYPES[stored]):
        model = build(config)
        if isinstance(linear, str) and linear != DENSE_FORM.name:
            linear = _with_every(config, linear)
        if isinstance(linear, FormPlan) and linear.layers:
            model = build(replace(config, forms=linear))
    materialise(model, device)
    return model


def _with_every(config: TransformersConfig, form: str) -> FormPlan:
    """The folder's plan of forms, in which its dense layers but the output take this one."""
    held = config.forms.layers
    sites = choose(build(replace(config, forms=FormPlan())), ["all-linear"])
    taken = {site.name: LayerForm(form) for site in sites if site.name not in held}
    return config.forms.with_forms(taken)

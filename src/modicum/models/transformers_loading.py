"""A decoder of transformers with its weights, for chat, merging and Python."""

from __future__ import annotations

from dataclasses import replace

import torch

from modicum.core.layers.dense_layers import choose
from modicum.core.layers.form_plan import DENSE_FORM, FormPlan, LayerForm
from modicum.core.layers.meta import materialise, on_meta
from modicum.models import huggingface
from modicum.models.transformers_config import TransformersConfig
from modicum.models.transformers_model import TransformersDecoder, build

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_decoder(
    header: huggingface.ModelHeader,
    dtype: torch.dtype | None,
    device: torch.device | str,
    linear: str | FormPlan,
) -> TransformersDecoder:
    """The model of a folder that was checked; `huggingface.load` says what is asked of it."""
    assert isinstance(header.config, TransformersConfig)
    with on_meta(dtype or _DTYPES[header.dtype]):
        model = build(header.config)
        if isinstance(linear, str) and linear != DENSE_FORM.name:
            sites = choose(model, ["all-linear"])
            linear = FormPlan().with_forms({site.name: LayerForm(linear) for site in sites})
        if isinstance(linear, FormPlan) and linear.layers:
            model = build(replace(header.config, forms=linear))
    materialise(model, device)
    huggingface.fill(model, header.folder)
    return model

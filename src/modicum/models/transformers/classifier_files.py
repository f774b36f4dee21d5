"""A classifier as a folder holds it, with its own head."""

from __future__ import annotations

from pathlib import Path

import torch

from modicum.core.layers.meta import materialise, on_meta
from modicum.models.huggingface import fill_from
from modicum.models.transformers.classes import (
    classifier_config,
    classifier_header,
    stored_classes,
)
from modicum.models.transformers.loading import DTYPES
from modicum.models.transformers.model import TransformersClassifier, build


def load_classifier(folder: Path) -> tuple[TransformersClassifier, tuple[str, ...]]:
    """The classifier in a folder, as its files round it, and the parameters that these lack.

    Those are zeros.

    Raises:
        InputError: the folder is no model of such a kind, or lacks a tensor of the blocks.
    """
    config = classifier_config(folder, stored_classes(folder) or ("0", "1"), None)
    header, lacking = classifier_header(folder, config, keep_head=True)
    with on_meta(DTYPES[header.dtype]):
        model: TransformersClassifier = build(config)
    materialise(model, "cpu")
    fill_from(model, header)
    for name in lacking:
        torch.nn.init.zeros_(model.get_parameter(name))
    return model.eval(), lacking

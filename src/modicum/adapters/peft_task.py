"""Which of PEFT's wrappers is right for a model, so that PEFT loads what is saved for it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from typing import Any

from torch import nn

from modicum.adapters.names import plain_name

# PEFT's task types: the table of transformers' classes that do this, what PEFT hands to `forward`,
# and how names of heads end, which PEFT keeps in full next to the adapter and reads from its file.
_INPUTS = ("input_ids", "attention_mask", "inputs_embeds")
_DECODER = ("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds")
_OPTIONS = ("output_attentions", "output_hidden_states", "return_dict")
_TASKS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "CAUSAL_LM": ("CAUSAL_LM", (*_INPUTS, "labels"), ()),
    "SEQ_2_SEQ_LM": ("SEQ_TO_SEQ_CAUSAL_LM", (*_INPUTS, *_DECODER, "labels"), ()),
    "SEQ_CLS": ("SEQUENCE_CLASSIFICATION", (*_INPUTS, "labels"), ("classifier", "score")),
    "TOKEN_CLS": ("TOKEN_CLASSIFICATION", (*_INPUTS, "labels"), ("classifier", "score")),
    "QUESTION_ANS": ("QUESTION_ANSWERING", (*_INPUTS, "start_positions"), ("qa_outputs",)),
    "FEATURE_EXTRACTION": ("", _INPUTS, ()),
}
_GENERATES = ("CAUSAL_LM", "SEQ_2_SEQ_LM")
# Layers that PEFT does not adapt, by the family of the model: of the first two it takes these names
# for experts, which transformers 5 keeps as one parameter, wherever they stand.
_EXPERTS = {
    "mixtral": ("gate", "w1", "w2", "w3"),
    "qwen2_moe": ("gate", "gate_proj", "up_proj", "down_proj"),
}
_MAMBAS = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")


def task_fields(model: nn.Module, adapted: Collection[str]) -> dict[str, Any]:
    """The fields `task_type` and `auto_mapping` of PEFT's configuration.

    Args:
        model: not compiled.
        adapted: plain names of the layers with factors.

    >>> task_fields(nn.Sequential(nn.Linear(2, 2)), ["0"])
    {'task_type': None, 'auto_mapping': None}
    """
    # A model of ours says itself what transformers' class of the same files does.
    own = getattr(type(model), "peft_task_type", None)
    known = next((c for c in type(model).__mro__ if _is_transformers(c)), None)
    if own is not None or known is None or not hasattr(known, "main_input_name"):
        return {"task_type": own, "auto_mapping": None}
    found = next((task for task in _TASKS if _is_right(task, known, model, adapted)), None)
    mapping = {"base_model_class": known.__name__, "parent_library": known.__module__}
    return {"task_type": found, "auto_mapping": mapping if found is None else None}


def unreadable(model: nn.Module, adapted: Collection[str]) -> tuple[str, str] | None:
    """A layer with factors that PEFT would not put on such a model, and why not; None: no such."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(kind, str) or not _is_transformers(type(model)):
        return None
    names: tuple[str, ...] = ()
    why = ""
    if kind in _MAMBAS:
        names, why = ("out_proj",), "PEFT adapts no such layer of Mamba models"
    try:
        families = importlib.import_module("transformers.conversion_mapping")
    except ImportError:  # transformers 4 keeps each expert as layers
        families = None
    family = getattr(families, "_MODEL_TO_CONVERSION_PATTERN", {}).get(kind, kind)
    if families is not None and family in _EXPERTS:
        names, why = _EXPERTS[family], "PEFT takes such names for the model's fused experts"
    found = next((name for name in adapted if name.rsplit(".", 1)[-1] in names), None)
    return None if found is None else (found, why)


def heads(model: nn.Module, task: str | None) -> dict[str, nn.Module]:
    """The modules, by plain names, that PEFT reads from the adapter's file for this task."""
    ends = _TASKS[task][2] if task is not None else ()
    modules = ((plain_name(name), module) for name, module in model.named_modules())
    return {name: module for name, module in modules if name.endswith(ends)} if ends else {}


def trained_heads(model: nn.Module) -> dict[str, nn.Module]:
    """The modules, by plain names, that a model has trained in full next to an adapter."""
    names = getattr(model, "trained_heads", ())
    return {name: model.get_submodule(name) for name in names}


def _is_transformers(made: type) -> bool:
    return made.__module__.startswith("transformers.")


def _is_right(task: str, known: Any, model: nn.Module, adapted: Collection[str]) -> bool:
    """Whether PEFT's wrapper for this task fits a model of transformers' class `known`."""
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    table, handed, _ = _TASKS[task]
    name = f"MODEL_FOR_{table}_MAPPING_NAMES" if table else "MODEL_MAPPING_NAMES"
    classes = getattr(tables, name, {}).values()
    if not any(known.__name__ in ((c,) if isinstance(c, str) else c) for c in classes):
        return False
    generates = task not in _GENERATES or hasattr(known, "prepare_inputs_for_generation")
    # PEFT cannot have factors in what it saves in full, nor save a part of that again.
    kept = heads(model, task)
    taken = any(f"{layer}.".startswith(f"{head}.") for head in kept for layer in adapted)
    nested = any(other.startswith(f"{head}.") for head in kept for other in kept)
    return generates and not taken and not nested and _takes(known, handed)


def _takes(known: Any, handed: tuple[str, ...]) -> bool:
    """Whether a model of this class takes text, with all that PEFT's wrapper hands on."""
    parameters = inspect.signature(known.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # Inputs must have names of their own: a model may hand whatever else it got to its encoder,
    # together with its own.
    named = (*handed, *(() if anything else _OPTIONS))
    return known.main_input_name == "input_ids" and all(name in parameters for name in named)

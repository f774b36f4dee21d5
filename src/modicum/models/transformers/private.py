"""The one file that names what transformers calls private.

Its names may change with any release, so they stand together, and tests run each of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_WRAPPER = "forward_with_checkpointing"


def decoders() -> Any:
    """The table from classes of configurations to classes of decoders."""
    import transformers

    return transformers.AutoModelForCausalLM._model_mapping


def encoders() -> Any:
    """The table from classes of configurations to classes of models that fill in masked tokens."""
    import transformers

    return transformers.AutoModelForMaskedLM._model_mapping


def classifiers() -> Any:
    """The table from classes of configurations to classes of classifiers of sequences."""
    import transformers

    return transformers.AutoModelForSequenceClassification._model_mapping


def image_classifiers() -> Any:
    """The table from classes of configurations to classes of classifiers of images."""
    import transformers

    return transformers.AutoModelForImageClassification._model_mapping


def known_types() -> Any:
    """The types of models that transformers has, registered ones too."""
    import transformers

    return transformers.models.auto.configuration_auto.CONFIG_MAPPING


def special_floats(raw: Any) -> Any:
    """What a config.json holds, with the floats that JSON has no words for, such as infinity."""
    import transformers

    return transformers.PretrainedConfig._decode_special_floats(raw)


def register(kind: str, classes: Mapping[str, type[Any]]) -> None:
    """Enter classes of a model into the tables, by the names of the tables."""
    import transformers

    config = classes["AutoConfig"]
    transformers.AutoConfig.register(kind, config)
    for name, made in classes.items():
        if name != "AutoConfig":
            made.config_class = config
            getattr(transformers, name).register(config, made)


def begin_module(model: Any, module: nn.Module) -> None:
    """Fill one module of a model with what transformers begins with."""
    # A model within the model may look at what it has itself.
    owner: Any = module if hasattr(module, "_init_weights") else model
    owner._init_weights(module)


@contextmanager
def kept(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """In here transformers leaves these as they are when it fills modules."""
    marked: list[Any] = list(parameters)
    for parameter in marked:
        parameter._is_hf_initialized = True
    try:
        yield
    finally:
        for parameter in marked:
            del parameter._is_hf_initialized


def runs_again(block: Any, again: Callable[..., Any] | None) -> bool:
    """Have a block run by `again(forward, *inputs)` in training, or None: as always; if it can."""
    if not hasattr(type(block), "gradient_checkpointing"):
        return again is None
    block.gradient_checkpointing = again is not None
    block._gradient_checkpointing_func = again
    return True


def runs_itself_again(block: nn.Module) -> bool:
    """Whether `runs_again` has a block run again in the backward pass."""
    return getattr(block, "_gradient_checkpointing_func", None) is not None


def without_checkpointing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward pass without what transformers wraps it in, which may run it again."""
    while getattr(forward, "__code__", None) and forward.__code__.co_name == _WRAPPER:
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    return forward


def may_be_left(model: Any, name: str) -> bool:
    """Whether transformers passes over a tensor of this name that a file holds in addition."""
    known = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(each, name) for each in known)


def may_be_missing(model: Any, name: str) -> bool:
    """Whether transformers computes a tensor of this name that a file lacks."""
    known = model._keys_to_ignore_on_load_missing or ()
    return any(re.search(each, name) for each in known)


def kept_in_fp32(model: Any, name: str) -> bool:
    """Whether transformers keeps a tensor of this name in fp32 in a model of bf16 or fp16."""
    known = model._keep_in_fp32_modules_strict or ()
    return any(re.search(each.replace("*", ".*"), name) for each in known)

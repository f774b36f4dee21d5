"""What PEFT's files hold of modules that are trained in full: its `modules_to_save`, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modicum.adapters.attachment import Attachment
from modicum.adapters.copies import complete
from modicum.adapters.names import plain_name
from modicum.adapters.peft_task import trained_heads
from modicum.adapters.slices import Slice
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import whole

PREFIX = "base_model.model."


def stored_copies(
    model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: Path
) -> dict[str, Tensor]:
    """By plain name, what the file has of parameters that were trained in full.

    Those are all in the modules whose names end as `modules_to_save` says, and in a model's heads.
    PEFT keeps a classifier's last layers alone: a pooler before them that it did not train is the
    base's.

    Raises:
        InputError: the file lacks one of them, or has it in another shape.
    """
    ends, own = tuple(config.get("modules_to_save") or ()), trained_heads(model)
    there = {path for path in own if any(key.startswith(f"{PREFIX}{path}.") for key in tensors)}
    needed = {path for path in own if path in there or "pooler" not in path.split(".")}
    found = {}
    for path, module in model.named_modules():
        inside = "layers_by_adapter" in path.split(".")
        if inside or not (plain_name(path).endswith(ends) or path in needed):
            continue
        for leaf, parameter in module.named_parameters():
            if "layers_by_adapter" in leaf.split("."):
                continue
            name = plain_name(f"{path}.{leaf}")
            tensor = tensors.get(f"{PREFIX}{name}")
            if tensor is None or tensor.shape != parameter.shape:
                what = "the classifier's head" if path in own else "what was trained in full"
                problem = f"lacks {what}, or has one of another shape"
                raise InputError(problem, file=file, value=name)
            found[name] = tensor
    return found


def saved_names(attached: Attachment) -> list[str] | str:
    """By which names PEFT takes the modules of which there are copies for just those; or why not.

    It takes every module whose name ends as one of them.
    """
    modules = complete(attached.model, attached.copied)
    if modules is None:
        return "PEFT trains modules in full, and here are copies of single parameters"
    chosen = {plain_name(name) for name in modules}
    everything = module_names(attached.model)
    inside = {n for n in everything if any(n.startswith(f"{one}.") for one in chosen)}
    for names in ({name.rpartition(".")[2] for name in chosen}, chosen):
        if {n for n in everything if n.endswith(tuple(names))} - inside == chosen:
            return sorted(names)
    return "PEFT would take other modules for these too, of which there are copies, by their names"


def kept_in_full(attached: Attachment, kept: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """What the file has of copies, and of the modules that PEFT keeps there in any case."""
    tensors = {}
    for name, head in kept.items():
        for key, value in head.named_parameters():
            if "layers_by_adapter" not in key.split("."):
                tensors[f"{PREFIX}{name}.{plain_name(key)}"] = as_kept(value)
    for name, layer in attached.everywhere():
        for leaf, copy in layer.copies().items():
            tensors[f"{PREFIX}{plain_name(name)}.{leaf}"] = as_kept(copy)
    return tensors


def as_kept(tensor: Tensor) -> Tensor:
    """A tensor as files keep it, of its own memory."""
    return whole(tensor.detach()).clone().contiguous().cpu()


def module_names(model: nn.Module) -> set[str]:
    """Plain names of all modules but those inside of adapters."""
    return {
        plain_name(name)
        for name, module in model.named_modules()
        if ".layers_by_adapter" not in f".{name}" and not isinstance(module, Slice)
    }

"""What llama.cpp calls the decoders that it computes as transformers does, and their tensors.

Only what `benchmarks/gguf.py` has read back with equal text stands in the table: llama.cpp takes a
file with wrong rows or a missing scale without a word, and writes other text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.models.config import ModelConfig
from modicum.models.config_checks import window_of
from modicum.models.decoders import Decoder, config_of
from modicum.models.rope import inverse_frequencies, unscaled_frequencies
from modicum.models.rope_config import rope_from_hf

_SILU = ("silu", "swish")
_GELU = ("gelu_pytorch_tanh",)


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp knows a model type of transformers.

    Args:
        name: what llama.cpp calls it.
        neighbours: rotary positions turn the channels 2i and 2i + 1 of a head, not i and i + D/2,
            so the rows of the query and key projections are written in another order.
        frequencies: it reads a factor of each rotary frequency, which Llama 3.1's scaling needs.
        biases: endings of the projections that may have a bias.
        shifted_norms: its norms multiply by one plus the weight; the file holds the sum.
        activations: of the MLP, by the names of config.json.
    """

    name: str
    neighbours: bool = False
    frequencies: bool = False
    biases: tuple[str, ...] = ()
    shifted_norms: bool = False
    activations: tuple[str, ...] = _SILU


_QKV = ("q_proj", "k_proj", "v_proj")
_ALL = (*_QKV, "o_proj", "gate_proj", "up_proj", "down_proj")
_LLAMA = Architecture("llama", neighbours=True, frequencies=True, biases=_ALL)
ARCHITECTURES = {
    "gemma": Architecture("gemma", shifted_norms=True, activations=_GELU),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture("qwen2", biases=_QKV),
    "qwen3": Architecture("qwen3"),
}


def architecture_of(raw: Mapping[str, Any]) -> Architecture:
    """What llama.cpp calls the model of a config.json, in which all fields have their values.

    Raises:
        InputError: it is not known to compute this model as it was trained.
    """
    kind = raw.get("model_type")
    known = ARCHITECTURES.get(str(kind))
    if "forms" in raw:
        problem = "blocks of different widths or wirings have no place in a GGUF file"
        raise InputError(problem, field="forms.blocks")
    if known is None:
        raise InputError(
            "GGUF files of this kind of model were not read back with equal text, so none is "
            "written; llama.cpp's own convert_hf_to_gguf.py may know it",
            field="model_type",
            value=kind,
            allowed=", ".join(sorted(ARCHITECTURES)),
        )
    activation = raw.get("hidden_activation") or raw.get("hidden_act", "silu")
    if activation not in known.activations:
        raise InputError(
            f"llama.cpp's {known.name} has another activation",
            field="hidden_act",
            value=activation,
            allowed=", ".join(known.activations),
        )
    if not raw.get("is_causal", True):
        raise InputError(
            f"llama.cpp's {known.name} attends to no later tokens",
            field="is_causal",
            value=raw["is_causal"],
            allowed="true",
        )
    window = window_of(raw)
    if window is not None and window < raw["max_position_embeddings"]:
        raise InputError(
            f"llama.cpp's {known.name} has no sliding window; set max_position_embeddings to the "
            "window to use the model up to that length",
            field="sliding_window",
            value=window,
        )
    _, scaling = rope_from_hf(raw)
    if scaling is not None and scaling["rope_type"] == "llama3" and not known.frequencies:
        problem = f"llama.cpp's {known.name} has no factors of rotary frequencies"
        raise InputError(problem, field="rope_scaling.rope_type", value="llama3")
    return known


def full_config(model: Decoder, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model's config.json with the values of all fields that transformers has a default for."""
    if isinstance(config_of(model), ModelConfig):
        return raw
    from modicum.models.transformers.kinds import described

    found: dict[str, Any] = described(raw).to_dict()
    return found


def hyper_parameters(writer: Any, raw: Mapping[str, Any]) -> None:
    """Write what config.json says, in llama.cpp's keys, into a `gguf.GGUFWriter`."""
    heads, width = raw["num_attention_heads"], raw["hidden_size"]
    head_width = raw.get("head_dim") or width // heads
    writer.add_vocab_size(raw["vocab_size"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(raw.get("num_key_value_heads") or heads)
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_dimension_count(head_width)
    theta, scaling = rope_from_hf(raw)
    writer.add_rope_freq_base(theta)
    if scaling is not None and scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(library("gguf", "gguf", "this").RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))


def frequency_factors(raw: Mapping[str, Any]) -> Tensor | None:
    """What each rotary frequency is divided by, float32 [head_width / 2]; None: by nothing.

    Scaling by one factor has a key of its own.
    """
    theta, scaling = rope_from_hf(raw)
    if scaling is None or scaling["rope_type"] == "linear":
        return None
    width = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return unscaled_frequencies(width, theta) / inverse_frequencies(width, theta, scaling)


class TensorNames:
    """llama.cpp's names of a model's tensors, and what is done to each before it is written."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        gguf = library("gguf", "gguf", "a GGUF file")
        self.architecture = architecture_of(raw)
        self._heads = {
            "q_proj": raw["num_attention_heads"],
            "k_proj": raw.get("num_key_value_heads") or raw["num_attention_heads"],
        }
        number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[self.architecture.name]
        self._map = gguf.get_tensor_name_map(number, raw["num_hidden_layers"])

    def of(self, name: str) -> str:
        """llama.cpp's name of a tensor that has this name in transformers' files.

        Raises:
            InputError: it has no place for the tensor.
        """
        path, _, leaf = name.rpartition(".")
        known: str | None = self._map.get_name(path)
        biased = path.rpartition(".")[2] in self.architecture.biases
        if known is None or (leaf == "bias" and not biased):
            problem = f"llama.cpp's {self.architecture.name} has no place for this tensor"
            raise InputError(problem, field=name)
        return f"{known}.{leaf}"

    def change(self, name: str) -> Callable[[Tensor], Tensor]:
        """What makes the tensor of the GGUF file of that of transformers' file."""
        part = re.sub(r"\.(weight|bias)$", "", name).rpartition(".")[2]
        if self.architecture.neighbours and part in self._heads:
            heads = self._heads[part]
            return lambda tensor: _neighbouring(tensor, heads)
        if self.architecture.shifted_norms and part.endswith("norm"):
            return lambda tensor: tensor.float() + 1
        return lambda tensor: tensor


def _neighbouring(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head reordered: those of the channels i and i + D/2 become neighbours."""
    halves = rows.unflatten(0, (heads, 2, -1))
    return torch.flatten(halves.transpose(1, 2), 0, 2)

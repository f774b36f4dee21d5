"""The shape of a Llama-family decoder, and its Hugging Face spelling. Imports no torch.

Knows every parameter's name and shape, so that plans and header checks need no model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modicum.core.contracts.catalog import built_in
from modicum.core.errors import InputError
from modicum.core.layers.block_plan import BlockPlan, Skips, check_heads
from modicum.core.layers.form_plan import DENSE_FORM, Argument, FormPlan, LayerForm
from modicum.core.layers.wiring import BlockWires, block_wires
from modicum.models.block_checks import checked_blocks
from modicum.models.config_checks import FORMED, refuse_unsupported
from modicum.models.rope_config import rope_from_hf, rope_to_hf

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
# Our name of a field: its name in a config.json, the type read there.
_SPELLING: dict[str, tuple[str, type]] = {
    "vocabulary_size": ("vocab_size", int),
    "width": ("hidden_size", int),
    "layers": ("num_hidden_layers", int),
    "heads": ("num_attention_heads", int),
    "kv_heads": ("num_key_value_heads", int),
    "head_width": ("head_dim", int),
    "mlp_width": ("intermediate_size", int),
    "context": ("max_position_embeddings", int),
    "norm_epsilon": ("rms_norm_eps", float),
    "initializer_range": ("initializer_range", float),
    "tied_embeddings": ("tie_word_embeddings", bool),
    "attention_bias": ("attention_bias", bool),
    "mlp_bias": ("mlp_bias", bool),
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MOST_LAYERS = 10_000  # each has a dozen names; a number in a damaged file would fill the memory
_REQUIRED = (
    *("vocabulary_size", "width", "layers", "heads", "mlp_width"),
    *("context", "norm_epsilon"),  # the libraries' defaults differ between model types
)
TokenIds = int | tuple[int, ...] | None


@dataclass(frozen=True)
class ModelConfig:
    """All that decides a decoder's parameters and arithmetic; widths and lengths are counts.

    Args:
        kv_heads: key and value heads, each shared by heads/kv_heads query heads; 0 means `heads`.
        head_width: of each head; 0 means width/heads.
        mlp_width: of the gated MLP; 0 means 8/3 of the width, rounded up to a multiple of 32.
        context: the longest sequence, in tokens.
        rope_scaling: None, or Hugging Face's entry with `rope_type` "linear" or "llama3".
        attention_bias: biases on q, k, v and, in all model types but qwen2, on the output too.
        forms: which form each projection takes, by full name (`model.layers.0.mlp.up_proj`), and
            the blocks (`model.layers.0`) that have other widths or another wiring; widths that are
            the model's own are left out of it.
        hf_extra: what else stood in config.json, kept for a faithful save.

    Raises:
        InputError: a field is out of range, or two do not go together.
    """

    vocabulary_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int = 0
    head_width: int = 0
    mlp_width: int = 0
    context: int = 2048
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    mixer: str = "attention"
    mlp: str = "swiglu"
    forms: FormPlan = field(default_factory=FormPlan)
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    pad_token_id: TokenIds = None
    model_type: str = "llama"
    hf_extra: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "width", "layers", "heads", "context"):
            if getattr(self, name) < 1:
                raise InputError("must be at least 1", field=name, value=getattr(self, name))
        if self.layers > _MOST_LAYERS:
            problem = f"must be at most {_MOST_LAYERS}"
            raise InputError(problem, field="layers", value=self.layers)
        if self.width % self.heads:
            raise InputError(
                f"the width {self.width} must be a multiple of the number of heads",
                field="heads",
                value=self.heads,
            )
        defaults = {
            "kv_heads": self.heads,
            "head_width": self.width // self.heads,
            "mlp_width": math.ceil(self.width / 12) * 32,
        }
        for name, value in defaults.items():
            if getattr(self, name) < 0:
                raise InputError("must not be negative", field=name, value=getattr(self, name))
            object.__setattr__(self, name, getattr(self, name) or value)
        check_heads(self.heads, self.kv_heads)
        if self.head_width % 2:
            raise InputError(
                "must be even, as rotary positions turn pairs of channels",
                field="head_width",
                value=self.head_width,
            )
        if self.norm_epsilon < 0 or self.rope_theta <= 0:
            name = "norm_epsilon" if self.norm_epsilon < 0 else "rope_theta"
            raise InputError("must be above zero", field=name, value=getattr(self, name))
        self._check_forms()

    def _check_forms(self) -> None:
        for name, form in self.forms.layers.items():
            if name not in (known := self._projection_names()):
                problem = "forms are those of projections, and this names none"
                field = f"forms.layers.{name}"
                raise InputError(problem, field=field, candidates=known, word=name)
            _check_arguments(form.name, tuple(form.arguments.items()))
        _check_arguments(self.forms.default.name, tuple(self.forms.default.arguments.items()))
        if self.forms.blocks:
            object.__setattr__(self, "forms", checked_blocks(self))

    @property
    def output_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return self.attention_bias and self.model_type != "qwen2"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], file: str | Path | None = None) -> ModelConfig:
        """The configuration that a Hugging Face config.json spells; `file` is named in errors.

        Raises:
            InputError: a field is missing, of the wrong type, out of range or not supported.
        """
        if not isinstance(raw, Mapping):
            raise InputError("must be a JSON object", file=file)
        refuse_unsupported(raw, file)
        values: dict[str, Any] = {"model_type": raw["model_type"].removeprefix(FORMED)}
        try:
            values["forms"] = FormPlan.from_json(raw.get("forms", {}))
        except InputError as error:
            raise error.located(file=file) from None
        for name, (key, kind) in _SPELLING.items():
            if raw.get(key) is not None:
                values[name] = _read(raw, key, kind, file)
            elif name in _REQUIRED:
                raise InputError("is missing", file=file, field=key)
        if values["model_type"] == "qwen2":
            values["attention_bias"] = True
        for key in _TOKENS:
            token = raw.get(key)
            values[key] = tuple(token) if isinstance(token, list) else token
        values["rope_theta"], values["rope_scaling"] = rope_from_hf(raw, file)
        known = {key for key, _ in _SPELLING.values()} | set(_TOKENS)
        known |= {"rope_theta", "rope_scaling", "rope_parameters", "model_type", "hidden_act"}
        known.add("forms")
        values["hf_extra"] = {key: value for key, value in raw.items() if key not in known}
        try:
            return cls(**values)
        except InputError as error:
            name = error.field or ""
            spelled = _SPELLING[name][0] if name in _SPELLING else name
            raise InputError(error.problem, file=file, field=spelled, value=error.value) from None

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model, in the spelling that transformers 4 and 5 both read."""
        raw = dict(self.hf_extra) | {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "hidden_act": "silu",
        }
        raw |= {key: getattr(self, name) for name, (key, _) in _SPELLING.items()}
        if self.model_type != "llama":
            raw = {key: value for key, value in raw.items() if not key.endswith("_bias")}
        if self.model_type == "mistral":  # of which transformers has a window where none is said
            raw.setdefault("sliding_window", None)
        for key in _TOKENS:
            token = getattr(self, key)
            raw[key] = list(token) if isinstance(token, tuple) else token
        if not self.forms.plain:
            # Another model type, since a library that knows dense layers alone would start those
            # that it does not find from random numbers.
            raw |= {"model_type": FORMED + self.model_type, "forms": self.forms.as_json()}
            raw["architectures"] = ["Forms" + name for name in raw["architectures"]]
        return raw | rope_to_hf(self.rope_theta, self.rope_scaling)

    def block_prefixes(self) -> list[str]:
        """How the names of each block's parameters begin."""
        return [f"model.layers.{layer}." for layer in range(self.layers)]

    def block(self, layer: int) -> BlockPlan:
        """What the block of this number has of its own."""
        return self.forms.block(f"model.layers.{layer}")

    def heads_of(self, layer: int) -> int:
        """The attention heads of the block of this number."""
        return self.block(layer).heads or self.heads

    def kv_heads_of(self, layer: int) -> int:
        """The key and value heads of the block of this number."""
        return self.block(layer).kv_heads or self.kv_heads

    def mlp_width_of(self, layer: int) -> int:
        """The inner width of the MLP of the block of this number."""
        return self.block(layer).mlp_width or self.mlp_width

    def skips(self) -> tuple[Skips, ...]:
        """What each branch leaves out: of each block the mixer, then the MLP."""
        return tuple(skips for n in range(self.layers) for skips in self.block(n).skips)

    def wires(self) -> Sequence[BlockWires | None]:
        """How streams run through each block; None: one does, and no branch leaves any out."""
        return [None if each.sequential else each for each in block_wires(self.skips())]

    def projections(self, layer: int) -> dict[str, tuple[int, int, bool]]:
        """Rows, columns and bias of every linear layer in a block, by its name in the block."""
        queries = self.heads_of(layer) * self.head_width
        keys, inner = self.kv_heads_of(layer) * self.head_width, self.mlp_width_of(layer)
        return {
            "self_attn.q_proj": (queries, self.width, self.attention_bias),
            "self_attn.k_proj": (keys, self.width, self.attention_bias),
            "self_attn.v_proj": (keys, self.width, self.attention_bias),
            "self_attn.o_proj": (self.width, queries, self.output_bias),
            "mlp.gate_proj": (inner, self.width, self.mlp_bias),
            "mlp.up_proj": (inner, self.width, self.mlp_bias),
            "mlp.down_proj": (self.width, inner, self.mlp_bias),
        }

    def _projection_names(self) -> set[str]:
        return {prefix + name for prefix in self.block_prefixes() for name in self.projections(0)}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and shape, as files hold them.

        Linear layers whose form takes no gradients are dense there; of others, what `forms` says.
        """
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary_size, self.width)
        }
        for layer, block in enumerate(self.block_prefixes()):
            for suffix, (rows, columns, bias) in self.projections(layer).items():
                for leaf, shape in _shapes(self.forms.of(block + suffix), columns, rows).items():
                    shapes[f"{block}{suffix}.{leaf}"] = shape
                if bias:
                    shapes[f"{block}{suffix}.bias"] = (rows,)
            shapes[f"{block}input_layernorm.weight"] = (self.width,)
            shapes[f"{block}post_attention_layernorm.weight"] = (self.width,)
        shapes["model.norm.weight"] = (self.width,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocabulary_size, self.width)
        return shapes

    def index_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every tensor of integers, as files hold them next to parameters."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, block in enumerate(self.block_prefixes()):
            for suffix, (rows, columns, _) in self.projections(layer).items():
                for leaf, shape in _indices(self.forms.of(block + suffix), columns, rows).items():
                    shapes[f"{block}{suffix}.{leaf}"] = shape
        return shapes

    def resting_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every tensor next to parameters that no update trains."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, block in enumerate(self.block_prefixes()):
            for suffix, (rows, columns, _) in self.projections(layer).items():
                for leaf, shape in _resting(self.forms.of(block + suffix), columns, rows).items():
                    shapes[f"{block}{suffix}.{leaf}"] = shape
        return shapes

    def parameter_count(self) -> int:
        """How many numbers the model learns; tied embeddings count once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())


def _shapes(form: LayerForm, columns: int, rows: int) -> Mapping[str, tuple[int, ...]]:
    if form == DENSE_FORM:
        return {"weight": (rows, columns)}
    from modicum.core.layers.linear_forms import linear_form  # which imports torch

    return linear_form(form.name).shapes(columns, rows, **form.arguments)


def _indices(form: LayerForm, columns: int, rows: int) -> Mapping[str, tuple[int, ...]]:
    if form == DENSE_FORM:
        return {}
    from modicum.core.layers.linear_forms import linear_form  # which imports torch

    return linear_form(form.name).indices(columns, rows, **form.arguments)


def _resting(form: LayerForm, columns: int, rows: int) -> Mapping[str, tuple[int, ...]]:
    if form == DENSE_FORM:
        return {}
    from modicum.core.layers.linear_forms import linear_form  # which imports torch

    return linear_form(form.name).resting(columns, rows, **form.arguments)


@functools.cache
def _check_arguments(form: str, arguments: tuple[tuple[str, Argument], ...]) -> None:
    """Check the arguments of a built-in form as its method's fields; of others, when it is made.

    Raises:
        InputError: an argument is unknown, of the wrong type or out of bounds.
    """
    record = built_in(form)
    if record is not None and record.room == "linears":
        record.validate(dict(arguments), prefix=f"forms.{form}.")


def _read(raw: Mapping[str, Any], key: str, kind: type, file: str | Path | None) -> Any:
    value = raw[key]
    wrong_bool = isinstance(value, bool) != (kind is bool)
    if wrong_bool or not isinstance(value, (int, float) if kind is float else kind):
        raise InputError(f"must be of type {kind.__name__}", file=file, field=key, value=value)
    return value

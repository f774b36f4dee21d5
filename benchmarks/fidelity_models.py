"""Any architecture of transformers, made small with random weights, and inputs that it takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

CONFIG_NAMES: dict[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
LARGEST = 40_000_000  # parameters
VOCABULARY, WIDTH, LAYERS, HEADS = 99, 32, 2, 4
_TABLES = (
    *("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM"),
    *("SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION", "CTC", "TEXT_TO_SPECTROGRAM", "PRETRAINING"),
)
# What an integer of a configuration becomes, by the first pattern that its name has.
_SMALL: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"vocab", lambda value: min(value, VOCABULARY)),
    (r"(token_id|token_index|_token)$|^(pad|bos|eos)_", lambda value: value % 89),
    (r"per_tok|top_?k$|experts_top", lambda value: min(value, 2)),
    (r"group|n_shared", lambda value: min(value, 1)),
    (r"expert", lambda value: min(value, 4)),
    (r"key_value_heads|kv_heads", lambda value: min(value, 2)),
    (r"head_dim$|head_size$|d_kv$|kv_channels|rope_dim", lambda value: min(value, 8)),
    (r"heads?$", lambda value: min(value, HEADS)),
    (r"layers?$|depth$|blocks$|num_stages$", lambda value: min(value, LAYERS)),
    (r"lora_rank|rank$", lambda value: min(value, 16)),
    (r"position|length|seq|n_ctx|context|window", lambda value: min(value, 128)),
    (r"image_size|img_size|crop_size|^size$", lambda value: min(value, 32)),
    (r"patch_size", lambda value: min(value, 8)),
    (r"intermediate|ffn|d_ff|inner|mlp", lambda value: min(value, 2 * WIDTH)),
    (r"conv_dim|kernel|stride|channels|mel|label|ratio|factor|chunk", lambda value: value),
    (r"hidden|embed|model|width|dim|size|proj|channel", lambda value: min(value, WIDTH)),
)


class NotMadeError(Exception):
    """No small model of the architecture runs here; the text says why."""


def model_types() -> list[str]:
    """Every configuration that transformers' auto classes know, by its name there."""
    return sorted(CONFIG_NAMES)


def small_model(model_type: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model of the architecture, and inputs for which it gives finite numbers.

    Raises:
        NotMadeError: no class, or no small configuration of it, or no inputs that it takes.
    """
    whys = []
    for name in _class_names(model_type):
        for shrink in (_by_name, _by_ratio, _as_it_is):
            try:
                model = _made(name, model_type, shrink)
                return model, _inputs(model)
            except NotMadeError as error:
                whys.append(str(error))
            except Exception as error:  # whatever a foreign model does with an odd configuration
                whys.append(f"{name}: {type(error).__name__}: {error}".split("\n")[0][:200])
    raise NotMadeError(whys[0] if whys else "no model class of its own in the auto classes")


def _class_names(model_type: str) -> list[str]:
    tables = [f"MODEL_FOR_{table}_MAPPING_NAMES" for table in _TABLES] + ["MODEL_MAPPING_NAMES"]
    found = [getattr(modeling_auto, table, {}).get(model_type) for table in tables]
    names = [one if isinstance(one, str) else one[0] for one in found if one]
    return list(dict.fromkeys([*names[:1], *names[-1:]]))


def _made(name: str, model_type: str, shrink: Callable[[PretrainedConfig], None]) -> nn.Module:
    config = getattr(transformers, CONFIG_NAMES[model_type])()
    shrink(config)
    made = getattr(transformers, name)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in made(config).parameters())
    if count > LARGEST:
        raise NotMadeError(f"{name}: {count / 1e6:.0f} million parameters at the smallest")
    torch.manual_seed(0)
    model: nn.Module = made(config).float().eval()
    return model


def _configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from _configs(value)


def _by_name(config: PretrainedConfig) -> None:
    """Every size to a small one, chosen by its name."""
    for one in _configs(config):
        layers = getattr(one, "num_hidden_layers", None)
        for name, value in list(vars(one).items()):
            if name.startswith("_") or isinstance(value, bool):
                continue
            if isinstance(value, int):
                _set(one, name, _small(name, value))
            elif isinstance(value, list | tuple) and value:
                if len(value) == layers:
                    _set(one, name, type(value)(_fewer(value)))
                elif all(isinstance(item, int) for item in value):
                    _set(one, name, type(value)(_small_list(name, value)))


def _small(name: str, value: int) -> int:
    rule = next((rule for pattern, rule in _SMALL if re.search(pattern, name)), None)
    return value if rule is None or value <= 0 else rule(value)


def _fewer(values: Any) -> list[Any]:
    """What is said of the layers that are left: the first, and one that differs if one does."""
    return [values[0], *[v for v in values if v != values[0]][:1], *values[1:]][:LAYERS]


def _small_list(name: str, values: Any) -> list[int]:
    if re.search(r"layer_ind|layer_id", name):
        return [LAYERS - 1]
    if re.search(r"depth|layers|blocks", name):
        return [1 for _ in values]
    return [_small(name, value) for value in values]


def _by_ratio(config: PretrainedConfig) -> None:
    """Every width divided by one number, so that what is a sum or a multiple stays one."""
    for one in _configs(config):
        layers = getattr(one, "num_hidden_layers", None)
        for name, value in list(vars(one).items()):
            if name.startswith("_") or isinstance(value, bool):
                continue
            if isinstance(value, int) and re.search(r"layers?$|depth$|blocks$", name):
                _set(one, name, min(value, LAYERS))
            elif isinstance(value, int) and re.search(r"vocab|token|position|length|ctx", name):
                _set(one, name, _small(name, value))
            elif isinstance(value, int) and value >= 64 and value % 16 == 0 and "image" not in name:
                _set(one, name, value // 8)
            elif isinstance(value, list | tuple) and len(value) == layers:
                _set(one, name, type(value)(_fewer(value)))


def _as_it_is(config: PretrainedConfig) -> None:
    """The default configuration: some are small enough.

    Raises:
        NotMadeError: it is clearly not; counting its parameters would take long.
    """
    for one in _configs(config):
        if max(getattr(one, "hidden_size", 0) or 0, 0) > 512:
            raise NotMadeError("the default configuration is large")


def _set(config: PretrainedConfig, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return  # derived from other fields, which are set


def _inputs(model: nn.Module) -> dict[str, Tensor]:
    """The first of some usual inputs with which the model gives finite numbers."""
    why = ""
    for inputs in _candidates(model):
        try:
            with torch.no_grad():
                found = outputs(model, inputs)
        except Exception as error:  # whatever a foreign model says of inputs that it cannot take
            why = why or f"{type(error).__name__}: {error}".split("\n")[0][:150]
            continue
        if found and all(bool(value.isfinite().all()) for value in found):
            return inputs
        why = why or "outputs are not finite numbers"
    raise NotMadeError(f"{type(model).__name__} takes none of the usual inputs: {why}")


def _candidates(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs to try: the model's main one alone, then with others."""
    config = model.config
    ids = torch.arange(16).view(2, 8) % 40 + 10
    size = _first(config, ("image_size", "img_size"), 32)
    size = max(size) if isinstance(size, list | tuple) else size
    channels = _first(config, ("num_channels", "in_channels", "in_chans"), 3)
    mel = _first(config, ("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels"), 80)
    frames = 2 * int(_first(config, ("max_source_positions",), 64))
    pixels, video = _ramp(2, channels, size, size), _ramp(2, 4, channels, size, size)
    known: dict[str, Tensor] = {
        "input_ids": ids,
        "pixel_values": pixels,
        "pixel_values_videos": video,
        "input_values": _ramp(2, 8000),
        "input_features": _ramp(2, mel, frames),
        "decoder_input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "past_values": _ramp(2, int(_first(config, ("context_length", "prediction_length"), 64))),
        "inputs": ids,
    }
    takes = inspect.signature(type(model).forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    sets = [
        *((main,), (main, "decoder_input_ids"), (main, "pixel_values"), ("input_ids",)),
        *(("pixel_values",), ("input_ids", "pixel_values"), ("input_values",)),
        *(("input_features",), ("input_features", "decoder_input_ids")),
        *(("input_values", "decoder_input_ids"), ("pixel_values_videos",), ("past_values",)),
        *(("pixel_values", "decoder_input_ids"), ("input_ids", "attention_mask"), ("inputs",)),
    ]
    for names in dict.fromkeys(sets):
        if all(name in known and (name in takes or name == main) for name in names):
            yield {name: known[name] for name in names}
    if "input_features" in takes or "input_values" in takes:
        name = "input_features" if "input_features" in takes else "input_values"
        yield {name: _ramp(2, frames, mel)}
        yield {name: _ramp(2, frames, mel), "decoder_input_ids": ids}
    if "pixel_values" in takes:
        yield {"pixel_values": video}


def _first(config: Any, names: tuple[str, ...], otherwise: Any) -> Any:
    for one in _configs(config):
        for name in names:
            if getattr(one, name, None):
                return getattr(one, name)
    return otherwise


def _ramp(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator)


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Every tensor of floating numbers that the model gives; what it draws, it draws again."""
    torch.manual_seed(0)
    return list(_tensors(model(**inputs)))


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield found
    elif isinstance(found, dict):
        for value in found.values():
            yield from _tensors(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _tensors(value)

"""What PEFT's `adapter_config.json` says, key by key, as far as it describes a plain LoRA.

Every key is one of four kinds: read; of no effect on what the model computes, whatever its value;
refused unless it is off, because it describes more than plain LoRA; or unknown, which is refused
too unless it is off, because a later PEFT may mean anything by it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from modicum.adapters.native_files import read_json
from modicum.core.errors import InputError

READ = (
    *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias"),
)
HARMLESS = {
    "task_type": "which class of PEFT's wraps the model",
    "auto_mapping": "which class the base model has",
    "base_model_name_or_path": "where the base model is from",
    "revision": "where the base model is from",
    "peft_version": "who wrote the file",
    "inference_mode": "whether PEFT trains what it loads",
    "runtime_config": "where PEFT computes; it ignores this in a file",
    "fan_in_fan_out": "a layer's own type says how its weight is stored, in PEFT too",
    "megatron_core": "a package's name, for `megatron_config` alone",
    "qalora_group_size": "for `use_qalora` alone",
    "loftq_config": "how factors began, for `init_lora_weights: loftq` alone",
    "eva_config": "how factors began, for `init_lora_weights: eva` alone",
    "corda_config": "how factors began, for `init_lora_weights: corda` alone",
    "lora_ga_config": "how factors began, for `init_lora_weights: lora_ga` alone",
    "ensure_weight_tying": "adapters of tied weights, which are refused when they are attached",
    "merge_weights": "whether PEFT 0.2 merged for evaluation",
}
REFUSED = {
    "use_qalora": "QALoRA pools the inputs of its factors",
    "use_bdlora": "BD-LoRA's factors are block-diagonal",
    "alora_invocation_tokens": "aLoRA leaves out what comes before these tokens",
    "velora_config": "VeLoRA keeps projections next to the factors",
    "kasa_config": "KaSA truncates the base weight and has a diagonal between the factors",
    "monteclora_config": "MonteCLoRA samples around the factors",
    "arrow_config": "Arrow routes between adapters",
    "trainable_token_indices": "rows of embeddings were trained in addition to the adapter",
    "layer_replication": "layers of the base are repeated",
    "target_parameters": "parameters that are no layers are adapted",
    "megatron_config": "it is for layers of Megatron",
    "enable_lora": "parts of a fused layer are adapted, as PEFT 0.2 could",
}
# Of these an empty value is not off: PEFT takes it for the default of the method.
_ON_WHEN_EMPTY = {
    *("velora_config", "kasa_config", "monteclora_config", "arrow_config", "use_bdlora"),
    "trainable_token_indices",
}
_WITHIN = ("rank_pattern", "alpha_pattern", "layers_pattern")  # parts of another pattern
_INITS_BESIDE_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")
_INITS_THAT_REWRITE = ("pissa", "olora", "corda", "lora_ga")
PeftNames = str | Sequence[str] | None


def read_config(path: Path) -> dict[str, Any]:
    """PEFT's configuration of a plain LoRA adapter.

    Raises:
        InputError: it is no JSON, or describes another kind of adapter, or has a key of which
            nobody here knows what it means.
    """
    config = read_json(path)
    try:
        _check(config)
    except InputError as error:
        raise error.located(file=path) from None
    return config


def chooses(config: Mapping[str, Any], name: str) -> bool:
    """Whether PEFT puts factors on the layer `name`, of which a list or a pattern is given."""
    targets, excluded = config["target_modules"], config.get("exclude_modules")
    if excluded and _matches(excluded, name):
        return False
    layers = config.get("layers_to_transform")
    # A name in full is chosen whatever its layer, and a pattern says which layers itself.
    if isinstance(targets, str) or name in targets or layers is None or layers == []:
        return _matches(targets, name)
    number = _layer_number(config.get("layers_pattern"), name)
    return _matches(targets, name) and number in (layers if isinstance(layers, list) else [layers])


def leaves_out(config: Mapping[str, Any], name: str) -> str | None:
    """The key that keeps PEFT from putting factors on the layer `name`; None: it puts them there.

    Args:
        config: with a list or a pattern as `target_modules`.
    """
    if chooses(config, name):
        return None
    others = ("exclude_modules", "layers_to_transform")
    return next((k for k in others if chooses({**config, k: None}, name)), "target_modules")


def of_layer(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The configuration with `r` and `lora_alpha` as PEFT takes them for the layer `name`.

    >>> of_layer({"r": 8, "lora_alpha": 8, "rank_pattern": {"^a.q": 2, "q": 4}}, "b.a.q")["r"]
    4
    """
    found = dict(config)
    for key, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        for given, value in (config.get(pattern) or {}).items():
            if re.match(rf"(.*\.)?({given})$", name):
                found[key] = value
                break
    return found


def patterns(values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    r"""The commonest value, and by a pattern of its full name each layer's that has another.

    >>> patterns({"a.q": 2, "a.k": 4, "a.v": 4})
    (4, {'^a\\.q': 2})
    """
    counted = Counter(values.values())
    common = counted.most_common(1)[0][0]
    return common, {f"^{re.escape(n)}": v for n, v in values.items() if v != common}


def _matches(chosen: str | Sequence[str], name: str) -> bool:
    if isinstance(chosen, str):
        return re.fullmatch(chosen, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in chosen)


def _layer_number(patterns: PeftNames, name: str) -> int | None:
    """The number of the block that a layer is in, of the outermost list of blocks."""
    lists = [patterns] if isinstance(patterns, str) and patterns else patterns or [r"[^.]*"]
    before = r"^.*?\." if not patterns else r"^(?:.*?\.)?"
    found = (re.match(rf"{before}{pattern}\.(\d+)\.", name) for pattern in lists)
    return next((int(match[1]) for match in found if match and match[1]), None)


def _check(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise InputError("not a LoRA adapter", field="peft_type", value=config.get("peft_type"))
    for key, value in config.items():
        if key in READ or key in HARMLESS or _is_off(key, value):
            continue
        problem = f"not plain LoRA: {REFUSED[key]}" if key in REFUSED else "not known, and not off"
        raise InputError(problem, field=key, value=value)
    if config.get("bias", "none") != "none":
        problem = "biases were trained in addition to the adapter"
        raise InputError(problem, field="bias", value=config["bias"])
    _check_numbers(config)
    _check_patterns(config)
    _check_init(config.get("init_lora_weights", True))
    check_names(config)


def _is_off(key: str, value: object) -> bool:
    if value is None or value is False:
        return True
    return isinstance(value, str | list | dict) and not value and key not in _ON_WHEN_EMPTY


def _check_numbers(config: Mapping[str, Any]) -> None:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank <= 0:
        raise InputError("must be an integer above zero", field="r", value=rank)
    if not (is_number(alpha) and alpha > 0):
        raise InputError("must be a number above zero", field="lora_alpha", value=alpha)
    dropout = config.get("lora_dropout", 0.0)
    number = isinstance(dropout, int | float) and not isinstance(dropout, bool)
    if not (number and 0 <= dropout < 1):
        raise InputError("must be from 0 to below 1", field="lora_dropout", value=dropout)
    for key in ("use_rslora", "use_dora", "lora_bias"):
        switch = config.get(key)
        if switch is not None and not isinstance(switch, bool):
            raise InputError("must be true or false", field=key, value=switch)
    if config.get("use_dora") and config.get("lora_bias"):
        raise InputError("PEFT has no biases next to DoRA", field="lora_bias", value=True)


def _check_patterns(config: Mapping[str, Any]) -> None:
    for key, number in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        given = config.get(key) or {}
        if not isinstance(given, dict):
            problem = "must map names or patterns of layers to numbers"
            raise InputError(problem, field=key, value=given)
        for pattern, value in given.items():
            _check_pattern(key, pattern)
            try:
                _check_numbers({**config, number: value})
            except InputError as error:
                raise InputError(error.problem, field=key, value=value) from None


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a file is a number that a float has, with all of its digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or sys.float_info.min <= abs(value) <= sys.float_info.max


def _check_init(init: object) -> None:
    """How factors began matters where the base weights were changed with them."""
    if init is None or isinstance(init, bool) or init in _INITS_BESIDE_THE_BASE:
        return
    word = init.lower() if isinstance(init, str) else ""
    problem = "PEFT has no such start that leaves the base weights as they are"
    if word.startswith(_INITS_THAT_REWRITE):
        problem = (
            "this start changed the base weights too, and the factors are for those; convert it "
            "with PEFT: save_pretrained(folder, path_initial_model_for_weight_conversion=...), "
            "with the folder of the adapter as it was before training"
        )
    elif word == "loftq":
        problem = (
            "this start quantized the base weights too, and the factors are for those; merge it "
            "with PEFT (merge_and_unload) and save the model"
        )
    raise InputError(problem, field="init_lora_weights", value=init)


def check_names(config: Mapping[str, Any]) -> None:
    """Make sure that a configuration says in names, patterns and numbers which layers it means.

    Raises:
        InputError: it does not.
    """
    for key in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
        value = config.get(key)
        patterns = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
            raise InputError("must be a pattern or a list of names", field=key, value=value)
        if isinstance(value, str) or key == "layers_pattern":
            for pattern in patterns:
                _check_pattern(key, pattern)
    layers = config.get("layers_to_transform")
    numbers = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        problem = "must be a layer's number or a list of them"
        raise InputError(problem, field="layers_to_transform", value=layers)


def _check_pattern(key: str, pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
        if key in _WITHIN:
            re.compile(f"({pattern})")
    except (re.error, OverflowError, RecursionError) as error:
        problem = f"not a regular expression: {error}"
        raise InputError(problem, field=key, value=pattern) from None
    if key == "layers_pattern" and groups:
        problem = "PEFT would take its first group for the number of a layer"
        raise InputError(problem, field=key, value=pattern)

"""What `accelerate estimate-memory` says of a case: it asks for a model, and for nothing else."""

from __future__ import annotations

from typing import Any

from plan_truth_cases import Case


def estimate(case: Case) -> dict[str, Any]:
    """The bytes that it says training takes, or why it has no answer.

    Its command looks a model up on the hub; here its functions are given the same model, as its
    command would build it, from config.json. Of precisions it is asked for the recipe's.
    """
    if case.raw is None:
        return {"why_not": "it estimates models of transformers and timm alone"}
    if case.ranks > 1:
        return {"why_not": "it does not ask how many ranks there are"}
    for slot in ("adapter", "linear", "compress", "transform", "memory", "comm"):
        if slot in case.recipe:
            return {"why_not": f"it does not ask for {slot}"}
    optimizer = case.recipe.get("optimizer", {}).get("method", "adamw")
    if optimizer != "adamw":
        return {"why_not": f"it knows Adam, and nothing of {optimizer}"}
    import torch
    from accelerate import init_empty_weights  # type: ignore[import-untyped]
    from accelerate.commands.estimate import estimate_training_usage  # type: ignore[import-untyped]
    from accelerate.utils import calculate_maximum_sizes  # type: ignore[import-untyped]
    from transformers import AutoConfig, AutoModel

    fields = dict(case.raw)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with init_empty_weights():
        model = AutoModel.from_config(config, torch_dtype=torch.float32)
    size, _ = calculate_maximum_sizes(model)
    half = case.recipe["training"]["precision"] == "bf16"
    usage = estimate_training_usage(size, "float16" if half else "float32")
    return {"predicted": max(usage.values())}

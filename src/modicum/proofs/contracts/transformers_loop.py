"""A small Hugging Face model under `transformers.Trainer`, for the checks of all rooms."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modicum.proofs.contracts.base import NotApplicable


def hugging_face_llama(**changes: Any) -> Any:
    """One block of width 16 over 29 tokens, with the same weights at each call.

    Raises:
        NotApplicable: transformers, or what its trainer needs, is not installed.
    """
    for name in ("transformers", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise NotApplicable(f"{name} is not installed")
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    fields: dict[str, Any] = {"vocab_size": 29, "num_hidden_layers": 1} | sizes | changes
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))


def train_under_transformers(
    model: Any,
    tokens: Tensor,
    *,
    folder: str | Path | None = None,
    resume_from: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    callback: Any = None,
    given_trainer: Callable[[Any], Any] | None = None,
    **arguments: Any,
) -> list[float]:
    """Let `transformers.Trainer` train a model on rows of tokens, four in a batch, in silence.

    Args:
        callback: one, several, or none.
        given_trainer: makes one more of the trainer.
        folder: where its checkpoints are, which are made only if there is one.
        arguments: further `TrainingArguments`; with an `eval_strategy` the same rows are evaluated.

    Returns:
        The losses that it logged.
    """
    import transformers

    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as elsewhere:
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                str(folder or elsewhere),
                per_device_train_batch_size=4,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                save_strategy="no" if folder is None else "steps",
                **arguments,
            ),
            train_dataset=rows,
            eval_dataset=rows if "eval_strategy" in arguments else None,
            optimizers=(optimizer, None),
            callbacks=_listed(callback),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        if given_trainer is not None:
            trainer.add_callback(given_trainer(trainer))
        trainer.train(resume_from_checkpoint=resume_from)
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def _listed(callback: Any) -> list[Any]:
    if callback is None:
        return []
    return list(callback) if isinstance(callback, tuple | list) else [callback]

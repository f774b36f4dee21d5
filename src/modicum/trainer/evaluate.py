"""Loss on data that is not trained on, and text that the model writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from modicum.core.random import derive_seed
from modicum.core.ranks import Ranks
from modicum.data.packing import Packed
from modicum.data.shares import micro_batches
from modicum.data.tokenizer import Tokenizer
from modicum.models.generate import generate
from modicum.models.llama import Llama
from modicum.recipe import SamplesSection
from modicum.tasks import CausalLM
from modicum.trainer.step import autocast


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in evaluation mode (no dropout), and back."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


def evaluate(
    task: CausalLM,
    model: Llama,
    data: Packed,
    *,
    rows: int,
    micro_batch_size: int,
    precision: str,
    ranks: Ranks,
    check: Callable[[], None],
) -> dict[str, Any]:
    """Mean nats per token over the first `rows` rows, in micro-batches as in training.

    The ranks share the rows; `check` is called between micro-batches, on all of them alike.
    """
    start = time.perf_counter()
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    batches = micro_batches(data, range(min(rows, len(data))), micro_batch_size, ranks)
    with evaluating(model), autocast(device, precision):
        for batch in batches:
            check()
            loss, trained = task.evaluate(model, batch.to(device))
            total, tokens = total + loss, tokens + trained
    total, counted = ranks.sum(total, tokens)
    return {
        "loss": total / max(counted, 1),
        "tokens": round(counted),
        "seconds": time.perf_counter() - start,
    }


def prompts(section: SamplesSection, tokenizer: Tokenizer, data: Packed | None) -> list[str]:
    """The recipe's prompts, else the beginnings of validation rows."""
    if section.prompts:
        return list(section.prompts)
    if data is None or not section.count:
        return []
    stride = max(1, len(data) // section.count)
    found = []
    for row in range(0, min(len(data), stride * section.count), stride):
        ids = data.batch([row]).input_ids[0]
        found.append(tokenizer.decode(ids[: min(32, len(ids) // 2)].tolist()))
    return [prompt for prompt in found if prompt]


def write_samples(
    model: Llama,
    tokenizer: Tokenizer,
    section: SamplesSection,
    texts: list[str],
    *,
    seed: int,
    ranks: Ranks,
) -> list[dict[str, Any]]:
    """What the model writes after each prompt; the same weights and seed write the same."""
    device = next(model.parameters()).device
    samples = []
    with evaluating(model):
        for text in texts:
            generator = torch.Generator().manual_seed(derive_seed(seed, f"sample/{text}"))
            ids = tokenizer.encode_prompt(text)[-(model.config.context - 1) :]
            written = generate(
                model,
                torch.tensor([ids], device=device),
                max_tokens=section.tokens,
                temperature=section.temperature,
                eos_id=tokenizer.eos_id,
                generator=generator,
                agreed=ranks.tell,
            )
            samples.append({"prompt": text, "text": tokenizer.decode(list(written))})
    return samples

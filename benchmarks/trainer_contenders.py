"""The three that `trainer.py` compares: each trains the same weights on the same tokens.

Each runs in a process of its own, just as it would for a user, and hands the machine on after
every segment of steps: whoever does not hold the baton waits on a pipe and costs nothing.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LEARNING_RATE, BETAS, EPSILON, CLIP_NORM = 3e-4, (0.9, 0.95), 1e-8, 1.0


@dataclass(frozen=True)
class Job:
    """What to train: a folder made by `trainer.prepare`, and how."""

    folder: Path
    kind: str  # "full" or "lora"
    rank: int
    batch_size: int
    sequence_length: int
    include: tuple[str, ...]
    steps: int

    @property
    def base(self) -> Path:
        """The model's Hugging Face folder."""
        return self.folder / "base" / "model"

    @property
    def batches(self) -> list[dict[str, Any]]:
        """Every step's input_ids and labels, both int64 [batch_size, sequence_length]."""
        from safetensors.torch import load_file

        tokens = load_file(self.folder / "batches.safetensors")
        ids, labels = (tokens[name].split(self.batch_size) for name in ("input_ids", "labels"))
        return [{"input_ids": i, "labels": n} for i, n in zip(ids, labels, strict=True)]


class Baton:
    """Lets so many steps pass at a time, and times them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._losses: list[float] = []
        self._take()

    def _take(self) -> None:
        steps = self._connection.recv()
        if steps is None:
            raise SystemExit
        self._left, self._start = steps, time.perf_counter()

    def step(self, loss: float) -> None:
        """A step was done; returns when the next may begin."""
        self._losses.append(loss)
        self._left -= 1
        if self._left == 0:
            from modicum.core.machine.memory import peak_resident_bytes

            seconds = time.perf_counter() - self._start
            self._connection.send((seconds, self._losses, peak_resident_bytes()))
            self._losses = []
            self._take()


def run_modicum(job: Job, baton: Baton) -> None:
    """What `modicum train` does, live line and all; evaluation and checkpoints never come due."""
    from modicum import Recipe, plan, train
    from modicum.cli.live import listener

    recipe = Recipe(
        model={"path": str(job.base.parent)},
        data={
            "include": job.include,
            "sequence_length": job.sequence_length,
            "boundaries": False,
            "validation_fraction": 0.0,
        },
        adapter={"method": "lora", "rank": job.rank} if job.kind == "lora" else None,
        optimizer={"betas": BETAS, "epsilon": EPSILON},
        training={
            "steps": job.steps,
            "batch_size": job.batch_size,
            "micro_batch_size": job.batch_size,
            "recompute": "none",
            "learning_rate": LEARNING_RATE,
            "schedule": "constant",
            "clip_norm": CLIP_NORM,
            "device": "cpu",
        },
        samples={"count": 0},
        checkpoint={"every": job.steps},
    )
    with open(os.devnull, "w", encoding="utf-8") as nowhere, listener("live", nowhere) as tell:

        def heard(event: dict[str, Any]) -> None:
            tell(event)
            if event["event"] == "step":
                baton.step(event["loss"])

        train(plan(recipe), tempfile.mkdtemp(dir=job.folder), listener=heard)


def run_bare(job: Job, baton: Baton) -> None:
    """The loop one would write by hand: modicum's model and, for LoRA, its adapter."""
    import torch
    import torch.nn.functional as F

    from modicum import adapters
    from modicum.models import huggingface

    model = huggingface.load(job.base, torch.float32, "cpu")
    if job.kind == "lora":
        adapters.load(model, job.folder / "adapter", train=True)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True
    )
    for batch in job.batches:
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        baton.step(loss.item())


def run_transformers(job: Job, baton: Baton) -> None:
    """`transformers.Trainer` on `LlamaForCausalLM`, with `peft` for LoRA, as fast as it goes.

    One process loads the data, as workers would take a core from the training; nothing is logged,
    shown, filtered, evaluated or saved.
    """
    import warnings

    import torch
    import transformers
    from peft import PeftModel
    from torch import Tensor, nn

    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, about itself
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: nn.Module = transformers.LlamaForCausalLM.from_pretrained(
        job.base, dtype=torch.float32, attn_implementation="sdpa"
    )
    if job.kind == "lora":
        model = PeftModel.from_pretrained(model, job.folder / "adapter", is_trainable=True)
    # The labels are shifted already, so that the last position of a row is trained too.
    rows = [
        {"input_ids": i, "labels": n, "shift_labels": n}
        for batch in job.batches
        for i, n in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(job.folder / "transformers"),
        max_steps=job.steps,
        per_device_train_batch_size=job.batch_size,
        train_sampling_strategy="sequential",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPSILON,
        weight_decay=0.0,
        max_grad_norm=CLIP_NORM,
        use_cpu=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

    class Trainer(transformers.Trainer):
        """Keeps each step's loss, which callbacks are not given."""

        loss: Tensor

        def training_step(self, *inputs: Any, **named: Any) -> Tensor:
            self.loss = super().training_step(*inputs, **named)
            return self.loss

    class PassOn(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            baton.step(trainer.loss.item())

    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[PassOn()])
    trainer.train()


CONTENDERS: dict[str, Callable[[Job, Baton], None]] = {
    "modicum": run_modicum,
    "bare": run_bare,
    "transformers": run_transformers,
}


def serve(name: str, job: Job, connection: Connection) -> None:
    """The process of one contender."""
    CONTENDERS[name](job, Baton(connection))

"""Who `kill.py` kills: modicum's command, and a script with `transformers.Trainer`.

Each says how it is started, how far it is, and what its run came to. The script is this file:
`python kill_contenders.py FOLDER` trains there, and resumes from the newest checkpoint as the
documentation of `transformers` shows it, with every setting that makes a run reproducible.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 3, 96, 4, 512, 96
STEPS, BATCH, MICRO_BATCH, SAVE_EVERY, EVALUATE_EVERY, ROWS, KEEP = 60, 12, 4, 5, 12, 16, 2
RECIPE = f"""\
model: {{layers: {LAYERS}, width: {WIDTH}, heads: {HEADS}, vocabulary_size: {VOCABULARY}}}
data: {{include: ["json/**", "email/**"], sequence_length: {LENGTH}, limit: 300kB}}
training:
  {{steps: {STEPS}, batch_size: {BATCH}, micro_batch_size: {MICRO_BATCH}, device: cpu, seed: 3}}
evaluation: {{every: {EVALUATE_EVERY}, rows: {ROWS}}}
checkpoint: {{every: {SAVE_EVERY}, keep: {KEEP}}}
samples: {{count: 1, tokens: 8}}
"""


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves: rows to compare, by file, and the exported weights' bytes."""

    rows: dict[str, list[tuple[Any, ...]]]
    weights: str

    def differences(self, other: Outcome) -> dict[str, int]:
        """Rows that differ to the bit, are missing or are there twice, by file."""
        return {name: _unequal(rows, other.rows[name]) for name, rows in self.rows.items()}


def _unequal(ours: list[Any], theirs: list[Any]) -> int:
    unequal = sum(a != b for a, b in zip(ours, theirs, strict=False))
    return unequal + abs(len(ours) - len(theirs))


@dataclass(frozen=True)
class Modicum:
    """`modicum train`, on so many ranks, with some fields of the recipe changed."""

    ranks: int = 1
    changes: tuple[str, ...] = ()
    KEYS: ClassVar[dict[str, tuple[str, ...]]] = {
        "metrics": ("step", "loss", "gradient_norm", "learning_rate", "tokens"),
        "evaluations": ("step", "loss", "tokens"),
        "samples": ("step", "prompt", "text"),
    }

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join([f"{self.ranks} rank" + "s" * (self.ranks > 1), *self.changes])

    def command(self, out: Path) -> list[str]:
        """What starts it and what resumes it."""
        recipe = out.parent / "recipe.yaml"
        recipe.write_text(RECIPE, encoding="utf-8")
        command = [sys.executable, "-m", "modicum", "train", str(recipe), "--out", str(out)]
        command += ["--progress", "json"]
        command += ["--ranks", str(self.ranks)] if self.ranks > 1 else []
        return command + [word for change in self.changes for word in ("--set", change)]

    def steps_done(self, out: Path) -> int:
        """The last step whose row is written."""
        return max(self.log(out), default=0)

    def log(self, out: Path) -> list[int]:
        """The steps that a log has which grows with the run, in its order."""
        return [row["step"] for row in rows_of(out / "metrics.jsonl")]

    def steps_saved(self, out: Path) -> int:
        """The step of the newest checkpoint."""
        return max((_number(path) for path in out.glob("checkpoints/step-*")), default=0)

    def outcome(self, out: Path) -> Outcome:
        """What the finished run came to."""
        rows = {
            name: [tuple(row.get(key) for key in keys) for row in rows_of(out / f"{name}.jsonl")]
            for name, keys in self.KEYS.items()
        }
        return Outcome(rows, digest(out / "model" / "model.safetensors"))

    def mend(self, out: Path, told: str) -> None:
        """There is nothing that a user has to do by hand.

        Raises:
            SystemExit: always.
        """
        raise SystemExit(f"modicum ({self.name}) could not resume:\n{told}")


@dataclass(frozen=True)
class Transformers:
    """`transformers.Trainer` in a script that resumes where there is a checkpoint."""

    @property
    def name(self) -> str:
        """For people."""
        return "transformers.Trainer"

    def command(self, out: Path) -> list[str]:
        """What starts it and what resumes it."""
        return [sys.executable, str(Path(__file__).resolve()), str(out)]

    def steps_done(self, out: Path) -> int:
        """The last step that its log shows."""
        return max(self.log(out), default=0)

    def log(self, out: Path) -> list[int]:
        """The steps that a log has which grows with the run, in its order."""
        return [row["step"] for row in rows_of(out / "log.jsonl") if "loss" in row]

    def steps_saved(self, out: Path) -> int:
        """The step of the newest checkpoint."""
        return max((_number(path) for path in out.glob("checkpoint-*")), default=0)

    def outcome(self, out: Path) -> Outcome:
        """What the finished run came to, by the history that the trainer itself keeps."""
        state = json.loads((out / "trainer_state.json").read_text(encoding="utf-8"))
        keys = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
        rows = [tuple(row.get(key) for key in keys) for row in state["log_history"]]
        training = [row for row in rows if row[1] is not None]
        evaluations = [row for row in rows if row[4] is not None]
        kept = {"metrics": training, "evaluations": evaluations}
        return Outcome(kept, digest(out / "model.safetensors"))

    def mend(self, out: Path, told: str) -> None:
        """What a user does when the newest checkpoint cannot be read: delete it.

        Raises:
            SystemExit: there is none, so that was not the reason.
        """
        checkpoints = sorted(out.glob("checkpoint-*"), key=_number)
        if not checkpoints:
            raise SystemExit(f"{self.name} could not start:\n{told}")
        shutil.rmtree(checkpoints[-1])


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a run's file so far."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def digest(path: Path) -> str:
    """What two files of equal bytes have in common."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def train(out: Path) -> None:
    """Train a Llama of modicum's size in the same number of steps, on tokens out of a generator."""
    import torch
    import transformers
    from transformers.trainer_utils import get_last_checkpoint

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    transformers.set_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
    )
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (400 + ROWS, LENGTH), generator=generator)
    rows = [{"input_ids": row, "labels": row} for row in tokens]

    class Log(transformers.TrainerCallback):
        """A row in a file for each, as trackers keep them."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            with open(out / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({**logs, "step": state.global_step}) + "\n")

    trainer = transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=transformers.TrainingArguments(
            output_dir=str(out),
            max_steps=STEPS,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=BATCH // MICRO_BATCH,
            learning_rate=1e-3,
            seed=3,
            data_seed=3,
            full_determinism=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=EVALUATE_EVERY,
            save_strategy="steps",
            save_steps=SAVE_EVERY,
            save_total_limit=KEEP,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows[:-ROWS],
        eval_dataset=rows[-ROWS:],
        callbacks=[Log()],
    )
    out.mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)))
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    train(Path(sys.argv[1]))

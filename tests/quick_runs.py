"""Runs of a comparison that are written down at once, where a process would have trained."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from formula_trials import noise

from modicum import recipe_yaml
from modicum.comparison.run_trials import RunTrials
from modicum.recipe import Recipe

STEPS = 20


class QuickRuns:
    """Replaces `modicum train`: complete run folders, whose losses follow from recipes.

    Attributes:
        trained: names of the runs in the order in which they were made.
        ends: exit codes of runs, by their number among all; those leave what they have said.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained: list[str] = []
        self.ends: dict[int, tuple[int, str]] = {}
        quick = self

        def train(runs: RunTrials, run: Path, recipe: Recipe) -> int:
            return quick(run, recipe)

        monkeypatch.setattr(RunTrials, "_train", train)

    def __call__(self, run: Path, recipe: Recipe) -> int:
        """Write the run, or how it ended."""
        code, said = self.ends.pop(len(self.trained), (0, ""))
        self.trained.append(run.name)
        run.mkdir(parents=True, exist_ok=True)
        if code:
            run.with_suffix(".log").write_text(said)
            return code
        loss, tokens = _loss(recipe), recipe.training.tokens or 64 * (recipe.training.steps or 1)
        write = {
            "recipe.yaml": recipe_yaml.dump(recipe),
            "plan.jsonl": json.dumps({"revision": 0, "why": "", "choices": [], "prediction": {
                "table": [{"kind": "optimizer", "bytes": 800}]}}) + "\n",
            "metrics.jsonl": "".join(
                json.dumps({"step": n, "loss": loss + 1 / n, "tokens": tokens / STEPS,
                            "seconds": 0.5}) + "\n"
                for n in range(1, STEPS + 1)
            ),
            "evaluations.jsonl": json.dumps({"step": STEPS, "loss": loss}) + "\n",
            "run.json": json.dumps({
                "modicum": "0", "status": "finished", "tokens": tokens, "steps": STEPS,
                "parameters": {"trainable": 100}, "inputs": {"order": f"d{recipe.training.seed}"},
                "peak_bytes": {"measured": None, "predicted": 4000, "process": None},
                "final": {"test": {"loss": loss + 0.1} if recipe.evaluation.test else None},
            }),
        }  # fmt: skip
        for name, text in write.items():
            (run / name).write_text(text)
        return 0


def _loss(recipe: Recipe) -> float:
    """By a law of tokens, best at a rate of 3e-3; SGD is worse, and every seed is another."""
    training = recipe.training
    tokens = training.tokens or 1000
    worse = 0.05 * math.log10(training.learning_rate / 3e-3) ** 2
    worse += 0.2 * (recipe.optimizer["method"] == "sgd")
    return 1 + 60 * tokens**-0.4 + worse + 1e-3 * noise(training.seed, recipe.optimizer["method"])

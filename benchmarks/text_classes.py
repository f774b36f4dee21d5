"""How fast a small encoder learns to tell texts apart: all weights, LoRA, and what needs neither.

The figures of `docs/how-to/classify-texts.md`. The shipped recipes `functions-full` and
`functions-lora` are trained with several seeds. Next to them stand logistic regressions on what
exists without training: the encoder's mean vector of each text, and counts of its tokens, both of
the same tokens. Their strength of regularisation is chosen by folds of the training files.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from common import say, write_result

import modicum
from modicum import recipe_yaml
from modicum.data.library_functions import SIDES, write_functions
from modicum.models.package_folders import package_folder

METHODS = ("full", "lora")
TITLES = {
    "full": "full",
    "lora": "LoRA",
    "frozen_vectors": "regression on frozen mean vectors",
    "token_counts": "regression on counts of tokens",
}
STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0)
FOLDS = 4


def trained(folder: Path, method: str, seed: int, tokens: int) -> list[dict[str, Any]]:
    """What a shipped recipe reaches at each evaluation; a run that finished earlier is read."""
    out = folder / f"{method}-{tokens}-{seed}"
    record = out / "run.json"
    if record.is_file() and json.loads(record.read_text())["status"] == "finished":
        run = modicum.TrainedRun(json.loads(record.read_text()), out)
    else:
        run = modicum.train(modicum.plan(recipe(folder, method, seed, tokens)), out)
    names = ("step", "loss", "accuracy", "macro_f1")
    found = [{name: round(row[name], 4) for name in names} for row in run.evaluations]
    say(f"{method}, seed {seed}: {found[-1]}")
    return found


def recipe(folder: Path, method: str, seed: int, tokens: int) -> modicum.Recipe:
    """The shipped recipe on the data in a folder."""
    paths = {"path": "train", "validation_path": "validation"}
    changes = [f"data.{field}={folder}/functions/{side}.jsonl" for field, side in paths.items()]
    changes += [f"training.seed={seed}", f"data.sequence_length={tokens}"]
    return recipe_yaml.load(f"functions-{method}", changes)


def read(folder: Path) -> dict[str, list[dict[str, str]]]:
    """The rows of both sides."""
    texts = {side: (folder / "functions" / f"{side}.jsonl").read_text() for side in SIDES}
    return {side: list(map(json.loads, text.splitlines())) for side, text in texts.items()}


def features(
    rows: dict[str, list[dict[str, str]]], model: Path, length: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Counts of tokens, and mean vectors of the frozen encoder: of both sides a matrix each."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = AutoModel.from_pretrained(model).eval()
    counts: dict[str, Any] = {}
    vectors: dict[str, Any] = {}
    for side, own in rows.items():
        texts = [row["text"] for row in own]
        made = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        found = [np.bincount(ids, minlength=len(tokenizer)) for ids in made]
        counts[side] = _library("scipy.sparse").csr_array(np.log1p(np.stack(found)))
        vectors[side] = np.concatenate([
            mean_vectors(encoder, tokenizer, texts[start : start + 32], length)
            for start in range(0, len(texts), 32)
        ])  # fmt: skip
    yield "token_counts", counts
    yield "frozen_vectors", vectors


@torch.no_grad()
def mean_vectors(encoder: Any, tokenizer: Any, texts: list[str], length: int) -> Any:
    """The mean over each text's tokens, of length one, as the encoder was trained for."""
    batch = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    means = (encoder(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(means, dim=-1).numpy()


def regression(rows: dict[str, list[dict[str, str]]], matrices: dict[str, Any]) -> dict[str, float]:
    """Accuracy and macro F1 of the logistic regression that does best over folds of files."""
    labels = {side: [row["label"] for row in own] for side, own in rows.items()}
    files = [row["file"] for row in rows["train"]]
    model = _library("sklearn.linear_model").LogisticRegression(max_iter=2000)
    choice = _library("sklearn.model_selection")
    folds = choice.GroupKFold(FOLDS)
    search = choice.GridSearchCV(model, {"C": list(STRENGTHS)}, cv=folds)
    search.fit(matrices["train"], labels["train"], groups=files)
    said = search.predict(matrices["validation"])
    truth, measures = labels["validation"], _library("sklearn.metrics")
    return {
        "C": search.best_params_["C"],
        "accuracy": round(float(measures.accuracy_score(truth, said)), 4),
        "macro_f1": round(float(measures.f1_score(truth, said, average="macro")), 4),
    }


def tables(
    curves: dict[str, list[list[dict[str, Any]]]], baselines: dict[str, dict[str, float]]
) -> dict[str, str]:
    """The figures as tables for the page: over the updates, and at the end."""
    curve = ["| accuracy in % after updates | full | LoRA |", "| --- | --- | --- |"]
    for points in zip(*curves["full"], *curves["lora"], strict=True):
        parts = (points[: len(curves["full"])], points[len(curves["full"]) :])
        cells = (_percent([point["accuracy"] for point in part]) for part in parts)
        curve.append(f"| {points[0]['step']} | {' | '.join(cells)} |")
    rows = {TITLES[name]: [run[-1] for run in runs] for name, runs in curves.items()}
    rows |= {TITLES[name]: [found] for name, found in baselines.items()}
    end = ["| at the end, in % | accuracy | macro F1 |", "| --- | --- | --- |"]
    for title, found in rows.items():
        cells = (_percent([each[key] for each in found]) for key in ("accuracy", "macro_f1"))
        end.append(f"| {title} | {' | '.join(cells)} |")
    return {"curve": "\n".join(curve), "end": "\n".join(end)}


def _percent(shares: list[float]) -> str:
    """The mean of some shares in percent, and their range where they differ."""
    low, middle, high = (f"{100 * each:.1f}" for each in (min(shares), fmean(shares), max(shares)))
    return middle if low == high else f"{middle} ({low} to {high})"


def _library(name: str) -> Any:
    """A library that has no types."""
    return importlib.import_module(name)


def main() -> None:
    """Train them all, one at a time; write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of a row; fewer are faster")
    parser.add_argument("--folder", type=Path, help="where runs are kept, and found again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modicum-classes-") as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        if not (folder / "functions").is_dir():
            write_functions(folder / "functions")
        rows = read(folder)
        shipped = recipe(folder, "full", 1, arguments.tokens)
        assert shipped.model.path is not None
        base, length = package_folder(shipped.model.path), arguments.tokens
        curves: dict[str, list[Any]] = {method: [] for method in METHODS}
        for seed in range(1, arguments.seeds + 1):
            for method in METHODS:
                curves[method].append(trained(folder, method, seed, length))
        baselines = {name: regression(rows, own) for name, own in features(rows, base, length)}
        say(f"{baselines}")
    counts = {side: len(own) for side, own in rows.items()}
    for table in tables(curves, baselines).values():
        say(f"\n{table}")
    settings = {"model": shipped.model.path, "tokens": length, "rows": counts}
    write_result("text_classes", {"baselines": baselines, "curves": curves}, settings)


if __name__ == "__main__":
    main()

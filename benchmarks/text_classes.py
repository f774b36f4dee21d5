"""How fast a small encoder learns to tell texts apart: all weights, LoRA, and what needs neither.

The figures of `docs/how-to/classify-texts.md`. The shipped recipes `functions-full` and
`functions-lora` are trained with several seeds. Next to them stand logistic regressions on what
exists without training: the encoder's mean vector of each text, and counts of its tokens, both of
the same tokens. Their strength of regularisation is chosen by folds of the training files.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import say, write_result

import modicum
from modicum import recipe_yaml
from modicum.data.library_functions import SIDES, write_functions
from modicum.models.package_folders import package_folder

METHODS = ("full", "lora")
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
    from scipy.sparse import csr_array
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = AutoModel.from_pretrained(model).eval()
    counts: dict[str, Any] = {}
    vectors: dict[str, Any] = {}
    for side, own in rows.items():
        texts = [row["text"] for row in own]
        made = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        found = [np.bincount(ids, minlength=len(tokenizer)) for ids in made]
        counts[side] = csr_array(np.log1p(np.stack(found)))
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
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, f1_score
    from sklearn.model_selection import GridSearchCV, GroupKFold

    labels = {side: [row["label"] for row in own] for side, own in rows.items()}
    files = [row["file"] for row in rows["train"]]
    search = GridSearchCV(
        LogisticRegression(max_iter=2000), {"C": list(STRENGTHS)}, cv=GroupKFold(FOLDS)
    )
    search.fit(matrices["train"], labels["train"], groups=files)
    said = search.predict(matrices["validation"])
    truth = labels["validation"]
    return {
        "C": search.best_params_["C"],
        "accuracy": round(float(accuracy_score(truth, said)), 4),
        "macro_f1": round(float(f1_score(truth, said, average="macro")), 4),
    }


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
    settings = {"model": shipped.model.path, "tokens": length, "rows": counts}
    write_result("text_classes", {"baselines": baselines, "curves": curves}, settings)


if __name__ == "__main__":
    main()

"""scikit-learn's handwritten digits, for proofs."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from modicum.proofs.base import ProofRun


def digits(run: ProofRun) -> tuple[Tensor, Tensor]:
    """1,797 images [8, 8] in [0, 1], and which digits they are.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (the
    test set, as scikit-learn ships it).

    Raises:
        InputError: scikit-learn is not installed.
    """
    run.library("sklearn", "proofs")
    loaded = importlib.import_module("sklearn.datasets").load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32) / 16
    return images, torch.tensor(loaded.target)

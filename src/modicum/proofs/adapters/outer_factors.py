"""Other outer factors for adapters that train a matrix between two: random ones, the last ones.

And how much of a full step such a pair lets through, along a training.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.base import Adapter
from modicum.adapters.deriving_layer import fingerprint
from modicum.adapters.lora_xs import LoRAXS, LoRAXSLayer
from modicum.adapters.middle_factor import MiddleFactorLayer
from modicum.core.layers.gradient_probe import probe_gradients
from modicum.core.random import normal_
from modicum.proofs.adapters.digits_bench import HIDDEN, DigitsBench

# Its best lies in these: tried were 1e-2 to 6.4.
RANDOM_RATES = (4e-1, 8e-1, 1.6, 3.2, 6.4)


class RandomOuterLayer(LoRAXSLayer):
    """B and A are random with orthonormal columns and rows."""

    def derive(self, weight: Tensor) -> Mapping[str, Tensor]:
        rank = self.method.rank
        up, down = (
            torch.linalg.qr(
                normal_(weight.new_empty(width, rank), seed=0, name=f"{self.site.name}/{side}")
            )
            for side, width in zip(("up", "down"), weight.shape, strict=True)
        )
        found = {"B": up.Q, "A": down.Q.T.contiguous()}
        return {**found, "fingerprint": fingerprint(found["B"], found["A"])}


class RandomOuter(LoRAXS):
    """R between two factors that know nothing of the layer."""

    layer = RandomOuterLayer


class LastOuterLayer(LoRAXSLayer):
    """B and A are of the smallest singular values, at the scale of the largest."""

    def derive(self, weight: Tensor) -> Mapping[str, Tensor]:
        rank = self.method.rank
        left, singular, right = torch.linalg.svd(weight, full_matrices=False)
        up, down = left[:, -rank:], singular[-rank:, None] * right[-rank:]
        return {"A": down, "B": up, "fingerprint": fingerprint(up, down)}


class LastOuter(LoRAXS):
    """R between the weight's last singular vectors."""

    layer = LastOuterLayer


def alignment(
    bench: DigitsBench, adapter: Adapter, learning_rate: float, steps: Sequence[int]
) -> list[float]:
    """After so many steps, the cosine of the layers' gradients and what the adapter makes of them.

    A step of SGD on R moves W by s^2 B B^T G A^T A. The mean over the layers is given.
    """
    model, (images, labels) = copy.deepcopy(bench.base), bench.turned
    value = adapter.with_fields(targets=HIDDEN)
    attached = value.attach(model, batches=bench.batches, loss=_loss)
    layers = dict(attached.layers())
    optimizer = torch.optim.AdamW(attached.parameters(), lr=learning_rate)
    sites, found = list(attached.sites.values()), []

    def cosine(name: str, gradient: Tensor) -> dict[str, Tensor]:
        layer = layers[name]
        assert isinstance(layer, MiddleFactorLayer)
        through = layer.B @ (layer.B.T @ gradient @ layer.A.T) @ layer.A
        return {"cosine": F.cosine_similarity(gradient.flatten(), through.flatten(), dim=0)}

    for step in range(max(steps) + 1):
        if step in steps:
            each = probe_gradients(model, [(images, labels)], _loss, cosine, sites=sites)
            found.append(sum(float(one["cosine"]) for one in each.values()) / len(each))
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

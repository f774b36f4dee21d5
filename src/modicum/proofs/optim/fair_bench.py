"""Trials of the fair benchmark: small decoders on the text of `text_bench`, by their settings.

First weights, batches and their order are functions of the seed alone, so all sides have the same.
The rate warms up over a part of the steps and comes down to zero on a cosine. A model's size is
that of its blocks' matrices, without embeddings, head and norms.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor

from modicum.core.contracts.catalog import built_in
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.machine.memory import bytes_by_kind
from modicum.models import create
from modicum.optim.protocol_trials import ProtocolRegime, ProtocolTrial, TrialResult
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.arm_trials import ArmTrials
from modicum.proofs.bench.training import RateSchedule, train
from modicum.proofs.optim.text_bench import CLIP, Text, TextSize, loss

# What a trial's settings say of the loop; all others are fields of the optimizer.
LOOP = ("learning_rate", "weight_decay", "warm_up")
_RATE = LOOP[0]
LOOKS = 8  # places of a curve, the end among them


@dataclass(frozen=True)
class TrainedTrial:
    """What a training ended with.

    Args:
        loss: on held-out text, in nats a character; None where it is no finite number.
        curve: (share of training, held-out loss); nothing where one is no finite number.
        data: a digest of the tokens in the order in which they were trained on.
    """

    loss: float | None
    curve: tuple[tuple[float, float], ...]
    state_bytes: int
    data: str


@dataclass(frozen=True)
class FairArm:
    """What is trained at a rate from a seed.

    Args:
        settings: of the optimizer and the loop but the learning rate, as pairs by name.
        curved: whether its loss is looked at on the way too.
    """

    size: TextSize
    method: str
    settings: tuple[tuple[str, Any], ...]
    curved: bool

    def trained(self, rate: float, seed: int) -> TrainedTrial:
        """What it comes to."""
        settings = {**dict(self.settings), _RATE: rate}
        return trained(self.size, self.method, settings, seed, self.curved)


def parameters_of(size: TextSize) -> int:
    """N: the elements of the blocks' matrices.

    >>> parameters_of(TextSize(width=64, layers=1, mlp_width=172, tokens=64, rows=16, steps=1))
    49408
    """
    return size.layers * (4 * size.width**2 + 3 * size.width * size.mlp_width)


class FairBench:
    """Decoders of several sizes, and trainings of them that are done once.

    Args:
        sizes: of models; their steps follow from a trial's regime.
        methods: the optimizer of each side, by its catalog name.
    """

    def __init__(
        self, run: ProofRun, sizes: Mapping[int, TextSize], methods: Mapping[str, str]
    ) -> None:
        self.run, self.sizes, self.methods = run, dict(sizes), dict(methods)
        self.orders: dict[tuple[ProtocolRegime, int], set[str]] = {}
        self._known: dict[str, TrainedTrial] = {}
        self._trials = ArmTrials(
            FairArm.trained,
            _loss_of,
            facts=lambda arm: {"bench": "fair text", "arm": arm},
            kind=TrainedTrial,
            fresh=run.fresh,
        )

    def size(self, regime: ProtocolRegime) -> TextSize:
        """The decoder of a regime, with the steps that its tokens make."""
        size = self.sizes[regime.parameters]
        return replace(size, steps=max(1, round(regime.tokens / (size.rows * size.tokens))))

    def trial(self, trial: ProtocolTrial) -> TrialResult:
        """What a trial comes to; known ones are not trained again, in another process neither."""
        settings = dict(trial.settings)
        rate = settings.pop(_RATE)
        size, curved = self.size(trial.regime), trial.part == "judge"
        arm = FairArm(size, self.methods[trial.side], tuple(sorted(settings.items())), curved)
        key = repr((arm, rate, trial.seed))
        if key not in self._known:
            self._known[key], known = self._trials.result(arm, rate, trial.seed, shared=True)
            self.run.reused += known
        found = self._known[key]
        self.orders.setdefault((trial.regime, trial.seed), set()).add(found.data)
        return TrialResult(_loss_of(found), found.curve, {"state_bytes": found.state_bytes})


def _loss_of(found: TrainedTrial) -> float:
    return math.inf if found.loss is None else found.loss


def trained(
    size: TextSize, method: str, settings: Mapping[str, Any], seed: int, curved: bool = False
) -> TrainedTrial:
    """A decoder from the seed's first weights, trained with these settings.

    Args:
        curved: whether its loss is looked at on the way too.
    """
    text, model = _text(replace(size, steps=1), seed), create(size.model, seed=seed)
    groups = optimizer_groups(
        model,
        learning_rate=settings["learning_rate"],
        weight_decay=settings.get("weight_decay", 0.0),
    )
    own = {name: value for name, value in settings.items() if name not in LOOP}
    optimizer = _value(method, own).bind(groups)
    digest, curve = hashlib.sha256(), list[tuple[float, float]]()
    places = range(1, LOOKS) if curved else ()
    looks = {round(size.steps * each / LOOKS) for each in places} - {0, size.steps}

    def loss_of(step: int) -> Tensor:
        rows = text.batch(f"step {step}", size.rows, text.halves[0])
        digest.update(rows.numpy().tobytes())
        return loss(model, rows)

    def look(step: int) -> bool:
        if step + 1 in looks:
            curve.append(((step + 1) / size.steps, text.held_out(model)))
        return False

    schedule = RateSchedule(settings.get("warm_up", 0.1), "cosine", delayed=True)
    train([optimizer], loss_of, size.steps, schedule=schedule, clip=CLIP, after_update=look)
    curve.append((1.0, end := text.held_out(model)))
    sound = all(math.isfinite(each) for _, each in curve)
    return TrainedTrial(
        end if math.isfinite(end) else None,
        tuple(curve) if sound else (),
        bytes_by_kind(model, optimizer)["optimizer"],
        digest.hexdigest()[:16],
    )


@cache
def _text(size: TextSize, seed: int) -> Text:
    return Text(size, seed)


def _value(method: str, fields: Mapping[str, Any]) -> OptimizerMethod:
    record = built_in(method)
    assert record is not None
    value = record.load()(**fields)
    assert isinstance(value, OptimizerMethod)
    return value


def takes(method: str, name: str) -> bool:
    """Whether a setting of this name is the loop's, or a field of the optimizer."""
    record = built_in(method)
    return name in LOOP or (record is not None and name in record.fields)

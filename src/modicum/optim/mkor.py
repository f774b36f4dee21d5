"""MKOR: K-FAC's inverse factors, refreshed by one vector each and not by inverting."""

from __future__ import annotations

import math
from itertools import chain
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from modicum.core.contracts.ledger import Ledger
from modicum.core.contracts.method import Against, Info, PositiveFloat, PositiveInt, Probability
from modicum.core.contracts.search import IntegerRange, LogRange, SearchChoice, SearchTable
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import own_part
from modicum.optim.capture import Capture
from modicum.optim.curvature import CurvatureRuntime
from modicum.optim.factors_ledger import factors_ledger
from modicum.optim.layer_factors import LayerFactors, RankOneInverse
from modicum.optim.layer_vectors import UpdateVectors
from modicum.optim.loss_decrease import LossDecrease
from modicum.optim.transform import (
    GradientRows,
    GradientTransform,
    TransformContext,
    TransformQuery,
    TransformRuntime,
)

NO_LOSS = (
    "it ends by the losses that it is shown, and is shown none here; give each update's mean loss "
    "over all ranks to apply(loss=...), or train with modicum's trainer"
)


class MKOR(GradientTransform):
    """Precondition gradients with two inverse factors a layer, L^-1 G R^-1, of rank-one refreshes.

    a is the mean over positions of a layer's inputs (with a constant 1 where it has a bias), g the
    *sum* of the gradients of its outputs, of one update alone. Every few updates L^-1 [out, out]
    takes g up and R^-1 [in, in] takes a up, each in O(d^2) operations; ranks exchange two vectors a
    layer for it. The result gets the norm that G had, layer by layer, so the rates of the optimizer
    behind it fit. Prefer it to K-FAC where layers are wide, and Eva where memory is short: the
    factors of a square layer are 2 d^2 numbers in fp16, half of AdamW's state.

    Args:
        every: f: factors are refreshed in every n-th update.
        warm_up: and in each of the first so many.
        form: how a vector enters; see `modicum.optim.layer_factors.RankOneInverse`. `code` is what
            the authors ran; `average` is the exact inverse of the running average that the paper
            describes; `paper` is the printed equation, which has a wrong sign.
        decay: gamma.
        bound: epsilon: a factor with a larger element is brought near I before its refresh; None:
            never.
        keep: zeta: what is left of it then; 0 makes the factor I.
        stabilizer: `each` brings near I those factors that are over the bound. `as_published` is
            what the authors' code does, whose test for known layers is never false: once one
            factor of a layer is over the bound both become I, and take nothing up; so in the first
            update.
        clamp: elements of a and g are clamped to [-clamp, clamp].
        factors: in which precision they are kept, and vectors are exchanged; `full` is that of
            gradients, fp32 at least.
        hybrid: whether it ends for good once the loss falls slowly: then hooks are off, memory is
            given back, nothing is exchanged, and gradients stay as they are.
        hybrid_after: it does not end before so many updates.
        hybrid_window: updates over which the loss's rate of decrease is taken.
        hybrid_share: it ends when that rate is below this share of the best window's.
        exclude: see `GradientTransform`; the authors' `sgd_layers`.

    The vectors are those of the full update: sums over micro-batches and ranks. With sharded
    parameters each layer has an owner, which alone keeps its factors and sends the others their
    rows of the result. An update that holds a number that is none changes no factor.

    Source: Mozaffari et al., "MKOR: Momentum-Enabled Kronecker-Factor-Based Optimizer Using Rank-1
    Updates", NeurIPS 2023 (arXiv 2306.01685), section 3, and the authors' code, which the defaults
    are from. When MKOR-H switches is nowhere published; see `modicum.optim.loss_decrease`.

    >>> from modicum.optim import MKOR, SGD
    >>> from modicum.optim.transform import TransformContext
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    >>> optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> mkor = MKOR(every=2, hybrid=True).bind(TransformContext(model, optimizer=optimizer))
    >>> inputs = torch.rand(32, 8)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs).square().mean()
    ...     loss.backward()
    ...     mkor.apply(loss=loss.item())
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> mkor.close()

    Under transformers: `Trainer(..., callbacks=[MKOR().callback()])`, without `hybrid`.
    """

    info = Info(
        name="mkor",
        title="MKOR: second-order preconditioning by rank-one refreshes of inverse factors",
        room="optim",
        paper="MKOR: Momentum-Enabled Kronecker-Factor-Based Optimizer Using Rank-1 Updates, "
        "NeurIPS 2023; arXiv 2306.01685",
        claim="up to 2.57x less training time than LAMB and 1.85x than K-FAC on BERT-Large",
        traits=(
            "transforms_gradients",
            "works_on_base",
            "keeps_own_shapes",
            "needs_eager",
            "exact_resume",
        ),
        evidence="verified against code",
        claim_verdict="in part",
        against=Against("better", "momentum with the clip alone"),
        reason="MKOR-H takes 0.78 of MKOR's time and ends 3.6 % above its loss, where 2 % were "
        "allowed; all else holds: 0.61 of momentum's steps, and a refresh 43 times as "
        "fast as a Cholesky inverse",
        run_on_gpu=True,
        slot="transform",
        tiny={"every": 3},
    )
    search = SearchTable(
        {
            "learning_rate": LogRange(1e-4, 1.0, 1e-2),
            "every": IntegerRange(1, 100, 10, log=True),
            "form": SearchChoice(("code", "average"), "code"),
        }
    )

    every: PositiveInt = 10
    warm_up: Annotated[int, Field(ge=0)] = 0
    form: Literal["code", "average", "paper"] = "code"
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.95
    bound: PositiveFloat | None = 2.0
    keep: Probability = 0.9
    stabilizer: Literal["each", "as_published"] = "each"
    clamp: PositiveFloat = 100.0
    factors: Literal["fp16", "full"] = "fp16"
    hybrid: bool = False
    hybrid_after: PositiveInt = 50
    hybrid_window: PositiveInt = 10
    hybrid_share: Annotated[float, Field(gt=0, lt=1)] = 0.1

    def bind(self, context: TransformContext) -> MKORRuntime:
        """Put hooks on the context's model.

        Raises:
            InputError: there is nothing to precondition.
        """
        return MKORRuntime(self, context)

    def _begun(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> TransformRuntime:
        """Refuse what other trainers cannot do, before their first update."""
        if self.hybrid:
            raise InputError(NO_LOSS, field="hybrid", value=True)
        return super()._begun(model, optimizer)

    def ledger(self, at: TransformQuery) -> Ledger:
        """Factors and products are of the rank that owns most; the wire's are an update's mean."""
        return factors_ledger(at, every=self.every, item=2 if self.factors == "fp16" else 4)


class MKORRuntime(CurvatureRuntime):
    """MKOR at work on a model."""

    def __init__(self, method: MKOR, context: TransformContext) -> None:
        super().__init__(context, method.exclude, every=method.every, warm_up=method.warm_up)
        self.method = method
        bound = method.bound if method.stabilizer == "each" else None
        self.rule = RankOneInverse(method.form, method.decay, bound, method.keep)
        self.open()

    def open(self) -> None:
        """Factors that are I, and hooks on the layers."""
        kept = torch.float16 if self.method.factors == "fp16" else self.dtype
        self.factors = LayerFactors(self.layers, self.parameters, kept, self.device)
        self.vectors = UpdateVectors(self.layers, True, self.dtype, self.device)
        self.capture = Capture(self.vectors.accumulators(over_places=True))
        window, share = self.method.hybrid_window, self.method.hybrid_share
        self.decrease = LossDecrease(window, share)
        self._finite = True

    def over(self, loss: float | None) -> str | None:
        """Whether the loss falls too slowly for what this spends."""
        self._finite = loss is None or math.isfinite(loss)
        if not self.method.hybrid:
            return None
        if loss is None:
            raise InputError(NO_LOSS, field="hybrid", value=True)
        little = self.decrease.is_little(loss)
        if not little or self.updates < self.method.hybrid_after:
            return None
        return (
            f"the loss fell less than {self.method.hybrid_share:g} times as fast as in its best "
            f"{self.method.hybrid_window} updates"
        )

    def take_up(self, gradient_scale: float) -> None:
        """Refresh the factors that are here."""
        pairs = self.vectors.taken(
            self.context.ranks,
            gradient_scale=gradient_scale,
            limit=self.method.clamp,
            wire=torch.float16 if self.method.factors == "fp16" else self.dtype,
            sound=self._sound(),
        )
        for index, pair in enumerate(pairs):
            if pair is not None and (held := self.factors.pairs.get(index)) is not None:
                self._refresh(held, pair)

    def _sound(self) -> Tensor:
        """Whether the loss and all gradients are finite on this rank, as an update needs it."""
        there = [p.grad for p in self.parameters.values() if p.grad is not None]
        norms = [torch.linalg.vector_norm(own_part(gradient)[0]).float() for gradient in there]
        known = torch.tensor([0.0 if self._finite else math.inf], device=self.device)
        return torch.stack([known[0], *norms]).isfinite().all()

    def _refresh(self, held: tuple[Tensor, Tensor], vectors: tuple[Tensor, Tensor]) -> None:
        a, g = vectors
        if self.method.stabilizer == "as_published" and self._reset(held):
            return
        for factor, vector in zip(held, (g, a), strict=True):
            self.rule.take_up(factor, vector)

    def _reset(self, held: tuple[Tensor, Tensor]) -> bool:
        """Make both factors I where the authors' code does; whether it does."""
        bound = math.inf if self.method.bound is None else self.method.bound
        over = any(float(factor.diagonal().max()) > bound for factor in held)
        for factor in held if over else ():
            factor.zero_().fill_diagonal_(1)
        return over or not self.updates

    def transform(self) -> None:
        """Replace every G by L^-1 G R^-1 with the norm of G."""
        if self.shards is None:
            self.each(lambda index, rows: rows.put(self.factors.product(index, rows.joined())))
            return
        held: dict[int, GradientRows] = {}
        self.each(held.__setitem__)
        joined = {index: rows.joined() for index, rows in held.items()}
        for index, update in self.factors.products(joined):
            held[index].put(update)

    def forget(self) -> None:
        """Begin new sums."""
        self.vectors.sums.zero_()

    def release(self) -> None:
        """Give the memory of factors and sums back."""
        del self.factors, self.vectors

    def held(self) -> list[Tensor]:
        """The factors that this rank owns, and the sums; nothing after the end."""
        if self.ended_because is not None:
            return []
        return [self.vectors.sums, *chain.from_iterable(self.factors.pairs.values())]

    def kept(self) -> dict[str, Any]:
        """The factors that this rank owns, and what is known of the loss."""
        return {"decrease": self.decrease.state(), **self.factors.state_dict()}

    def put_back(self, state: Any) -> None:
        """Take up this rank's factors."""
        self.decrease.restore(state["decrease"])
        self.factors.load_state_dict(state, skip=("updates", "decrease"))

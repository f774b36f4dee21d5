"""The limits of LoRA: a diagnosis, head by head, of whether attention can be linear in length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from modicum.adapters.adapted_layer import AdaptedBlock, AdaptedLayer, wearers
from modicum.adapters.diagnosis import DiagnosisRuntime, ModelDiagnosis
from modicum.adapters.head_scores import (
    HeadMaxima,
    Looking,
    finite,
    measured,
    needed_degree,
    sufficient_degree,
)
from modicum.core.contracts.method import Against, Context, Info, PositiveFloat, PositiveInt
from modicum.core.errors import InputError
from modicum.core.layers.attention_calls import SeenAttention, seen_attention
from modicum.core.layers.taylor_attention import columns

LINEAR, WITHOUT_OUTLIERS, EXACT = "linear path", "linear path after outlier removal", "exact only"


class LoRALimits(ModelDiagnosis):
    """Which heads' attention, with its LoRA gradients, a truncated series gives in linear time.

    It changes nothing and is no adapter: a row for each head says what was seen. Queries and keys
    are those that attention is given, after rotation, each with half of the scale. In a row are

    - `gamma`: Gamma, the largest entry of Q, K and what adapters add to the projections before;
      `adapter` the latter alone, of the layer; `over_threshold` is Gamma / sqrt(log L), with the
      longest row of keys L. Asymptotically 1 is the limit, here it is a ruler, and decides nothing;
    - `largest_score`: M = max |S|, of the sampled queries, and `degree_by_bound`, the degree g at
      which M^(g+1) / (g+1)! is at most the tolerance;
    - `degree`: the one at which attention weights of the sampled queries are near enough to the
      exact ones; null where none is; `error` is their largest distance there, or at the last degree
      that was tried; `columns` k1 = binomial(d + g, g); `speedup` L / (k1 d), next to
      exact attention with its full matrix (a fused kernel is about three times as fast as that);
    - `verdict`: `linear path` where the columns are few enough and the speed-up is above 1; `linear
      path after outlier removal` where it would be so without a few keys and queries, which have to
      be computed exactly; else `exact only`.

    Prefer it before a run on long sequences, and look again during it: alpha / r and training move
    heads over the limit. `approx_attention` is the linear path. Wide heads have too many columns:
    one of 64 channels has 47,905 at degree 3. Masks other than a causal one are counted as hidden
    keys here, and `approx_attention` has none. Only `scaled_dot_product_attention` is seen.

    Args:
        tolerance: the distance of a row of weights that is near enough, as the sum of absolute
            differences; weights sum to 1.
        most_degree: the highest that is tried.
        most_columns: more are too many.
        sequences: of each evaluation, how many are looked at on a rank: the first.
        samples: queries of each sequence that are looked at: half of them those of the largest
            norm, the others at equal distances.
        outliers: the share of queries, and of keys, that may be left out for the second verdict,
            those of the largest norm.

    Raises:
        InputError: `findings()` of a model whose attention was not seen.

    Source: Hu et al., "Computational Limits of Low-Rank Adaptation (LoRA) Fine-Tuning for
    Transformer Models", arXiv 2406.03136. The threshold is the paper's; degrees, the decision by
    measured weights and the verdicts are ours.

    >>> from modicum.adapters import LoRA
    >>> from modicum.core.contracts.method import Context
    >>> from modicum.models import ModelConfig, create
    >>> model = create(ModelConfig(layers=1, width=16, heads=4, vocabulary_size=50), seed=0)
    >>> adapter = LoRA(rank=2).attach(model)
    >>> limits = LoRALimits().bind(Context(model))
    >>> with limits.looking(), torch.no_grad():
    ...     logits = model(torch.arange(400).view(1, 400) % 50)
    >>> [(row["layer"], row["head"], row["verdict"]) for row in limits.findings()][:1]
    [('model.layers.0.self_attn', 0, 'linear path')]
    """

    info = Info(
        name="lora_limits",
        title="The limits of LoRA: which attention heads may be computed in linear time",
        room="adapters",
        paper="Computational Limits of Low-Rank Adaptation (LoRA) Fine-Tuning for Transformer "
        "Models, arXiv 2406.03136",
        claim="LoRA gradients to 1/poly(L) in almost linear time where activations stay below "
        "sqrt(log L), and in no sub-quadratic time above it (under SETH)",
        traits=("needs_eager", "exact_resume"),
        claim_verdict="holds",
        against=Against("better", "PyTorch's fused attention"),
        run_on_gpu=True,
        slot="diagnosis",
        tiny={"samples": 8, "sequences": 16},
    )

    tolerance: PositiveFloat = 0.01
    most_degree: Annotated[int, Field(ge=1, le=20)] = 8
    most_columns: PositiveInt = 4096
    sequences: PositiveInt = 4
    samples: PositiveInt = 64
    outliers: Annotated[float, Field(ge=0, lt=0.5)] = 0.02

    @property
    def closely(self) -> Looking:
        """How closely heads are looked at."""
        return Looking(self.most_degree, self.samples, self.outliers)

    def bind(self, context: Context) -> LimitsRuntime:
        """Look at the context's model."""
        return LimitsRuntime(self, context)


class LimitsRuntime(DiagnosisRuntime):
    """The diagnosis at work: what was seen of each attention, by its module's name."""

    def __init__(self, method: LoRALimits, context: Context) -> None:
        super().__init__(context)
        self.method = method
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._heads: dict[str, int] = {}
        self._maxima: dict[str, list[float]] = {}
        self._added: dict[str, float] = {}
        self._pending: dict[str, float] = {}
        self._sequences: dict[str, int] = {}

    def _left(self, name: str, rows: int) -> int:
        """How many of these sequences of a module's input are looked at."""
        before = self._sequences.get(name, 0)
        self._sequences[name] = before + rows
        return min(rows, max(0, self.method.sequences - before))

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at the forward passes in this block."""
        with ExitStack() as stack:
            for name, module in wearers(self.model):
                if not isinstance(module, AdaptedBlock):
                    hook = module.register_forward_hook(partial(self._adapted, name))
                    stack.callback(hook.remove)
            with seen_attention(self.model, self._look):
                yield

    def _adapted(self, name: str, module: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
        assert isinstance(module, AdaptedLayer)
        if not given or given[0].ndim < 2:
            return
        x, y = (t.detach().reshape(-1, *t.shape[-2:]) for t in (given[0], out))
        if not (left := self._left(name, len(y))):
            return
        count = min(self.method.samples, y.shape[1])
        places = torch.arange(count, device=y.device) * y.shape[1] // count
        with torch.no_grad():
            added = y[:left, places] - module.plain(x[:left, places])
        self._pending[name] = float(added.abs().max())

    def _look(self, seen: SeenAttention) -> None:
        method, name = self.method, seen.module
        if not (left := self._left(name, len(seen.query))):
            self._pending.clear()
            return
        new = measured(seen, method.closely, left)
        known = self._maxima.get(name)
        numbers = new.flat
        self._maxima[name] = numbers if known is None else list(map(max, known, numbers))
        self._heads[name] = len(new.entry)
        # What ran since the attention before: of the projections inside of its module.
        inside = [v for key, v in self._pending.items() if key.startswith(f"{name}.")]
        self._pending.clear()
        if inside:
            added = max(inside) * math.sqrt(seen.scale)
            self._added[name] = max(added, self._added.get(name, 0.0))

    def findings(self) -> list[dict[str, Any]]:
        """A row for each head, over all ranks."""
        if not self._maxima:
            raise InputError(
                "no attention was seen; a forward pass of the model must call "
                "scaled_dot_product_attention, as with transformers' attn_implementation='sdpa'",
                value=type(self.model).__name__,
            )
        rows = []
        for name, heads in self._heads.items():
            added = self._added.get(name, 0.0)
            *numbers, added = self.ranks.max(*self._maxima[name], added)
            found = HeadMaxima.of_flat(numbers, heads)
            rows += [self._row(name, head, found, added) for head in range(heads)]
        return rows

    def _row(self, name: str, head: int, found: HeadMaxima, added: float) -> dict[str, Any]:
        method, width = self.method, int(found.width)
        gamma = max(float(found.entry[head]), added)
        verdict, degree, errors = EXACT, None, found.errors[:, head]
        for says, tried in ((LINEAR, errors), (WITHOUT_OUTLIERS, found.kept_errors[:, head])):
            needed = needed_degree(tried, method.tolerance)
            degree = degree or needed
            if needed is not None and math.isfinite(gamma) and self._pays(found, needed):
                verdict, degree, errors = says, needed, tried
                break
        shown = degree or method.most_degree
        taken = columns(width, shown)
        return {
            "layer": name,
            "head": head,
            "length": int(found.length),
            "width": width,
            "gamma": finite(gamma),
            "adapter": finite(added),
            "over_threshold": finite(gamma / math.sqrt(math.log(max(found.length, 2)))),
            "largest_score": finite(found.score[head]),
            "degree_by_bound": sufficient_degree(float(found.score[head]), method.tolerance),
            "degree": degree,
            "error": finite(errors[shown - 1]),
            "columns": taken,
            "speedup": finite(found.length / (taken * width)),
            "verdict": verdict,
        }

    def _pays(self, found: HeadMaxima, degree: int) -> bool:
        """Whether columns are few enough, for the length too; and no mask changes the scores."""
        taken = columns(int(found.width), degree)
        few = taken <= self.method.most_columns and taken * found.width < found.length
        return few and not found.biased

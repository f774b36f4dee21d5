"""The character model with layers in linear forms, for the proofs of forms that are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from modicum.core.layers.form_plan import DENSE_FORM, FormPlan, LayerForm
from modicum.core.layers.linear_forms import linear_form
from modicum.core.layers.meta import on_meta
from modicum.linears.base import LinearMethod
from modicum.models import ModelConfig
from modicum.models.llama import Llama
from modicum.optim import AdamW
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.sweep import Sweep, Swept
from modicum.proofs.optim.text_bench import Plain, Text, TextArm, TextResult, TextSize


@dataclass(frozen=True)
class FormedSize(TextSize):
    """The experiment with a decoder whose projections take forms, or stay dense.

    Args:
        forms: which form each takes; None: all are dense.
    """

    forms: FormPlan | None = None

    @property
    def model(self) -> ModelConfig:
        """The decoder over characters."""
        config = super().model
        return config if self.forms is None else replace(config, forms=self.forms)

    @property
    def elements(self) -> dict[str, int]:
        """How many elements each projection that has a form has in it, by the layer's name."""
        found = {}
        for name, (rows, columns) in self._formed().items():
            form = self.model.forms.of(name)
            found[name] = linear_form(form.name).elements(columns, rows, **form.arguments)
        return found

    @property
    def dense_elements(self) -> dict[str, int]:
        """How many the dense weights of these projections have."""
        return {name: rows * columns for name, (rows, columns) in self._formed().items()}

    @property
    def sides(self) -> int:
        """Outputs and inputs of these projections, added up."""
        return sum(map(sum, self._formed().values()))

    def _formed(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the projections that have a form."""
        config, found = self.model, {}
        for layer, prefix in enumerate(config.block_prefixes()):
            for name, (rows, columns, _) in config.projections(layer).items():
                if config.forms.of(prefix + name) != DENSE_FORM:
                    found[prefix + name] = rows, columns
        return found

    def taking(self, form: LinearMethod) -> FormedSize:
        """The same with the projections in the form."""
        with on_meta():
            return replace(self, forms=form.plan(Llama(super().model)))

    def low_rank(self) -> FormedSize:
        """The same with low-rank factors of at least as many elements, layer by layer."""
        elements, forms = self.elements, {}
        for name, sides in self._formed().items():
            forms[name] = LayerForm("low_rank", {"rank": -(-elements[name] // sum(sides))})
        return replace(self, forms=FormPlan().with_forms(forms))


@dataclass(frozen=True)
class FormedArm:
    """A decoder, and how it is trained.

    Args:
        how: None: every weight by AdamW.
    """

    size: FormedSize
    how: TextArm | None = None

    @property
    def arm(self) -> TextArm:
        """How it is trained."""
        return self.how or Plain(AdamW.value())

    @property
    def facts(self) -> Mapping[str, Any]:
        """All that decides what it comes to; a dense one's are those of the optimizers' proofs."""
        size: TextSize = self.size
        if self.size.forms is None:
            size = TextSize(*(getattr(size, each.name) for each in fields(TextSize)))
        return {"size": size, "arm": self.arm}

    def trained(self, rate: float, seed: int) -> TextResult:
        """What it comes to."""
        return Text(self.size, seed).train(self.arm, rate)


def formed_sweep(run: ProofRun) -> Sweep[FormedArm, TextResult]:
    """Decoders at learning rates of their own, by the held-out loss of the first seed.

    Rivals are trained once for all proofs.
    """
    return Sweep(
        run,
        FormedArm.trained,
        lambda found: found.loss,
        chosen_by="first",
        shared={"bench": "text"},
        kind=TextResult,
        facts=lambda arm: arm.facts,
    )


def best_arm(
    run: ProofRun,
    sweep: Sweep[FormedArm, TextResult],
    name: str,
    arm: FormedArm,
    rates: Sequence[float],
    quick: Mapping[str, float],
    *,
    baseline: bool,
) -> Swept[TextResult]:
    """The arm at the best of its rates; in a quick run at one that was the best of them there.

    Args:
        quick: the rate of each arm in a quick run: better than half and twice of it.
        baseline: whether other proofs train it too.
    """
    if run.full:
        return sweep.best(name, arm, rates, baseline=baseline)
    return sweep.at(name, arm, quick[name], baseline=baseline)

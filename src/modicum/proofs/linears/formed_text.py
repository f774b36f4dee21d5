"""The character model with layers in linear forms, for the proofs of forms that are trained."""

from __future__ import annotations

from dataclasses import dataclass, replace

from modicum.core.layers.form_plan import FormPlan, LayerForm
from modicum.core.layers.linear_forms import linear_form
from modicum.core.layers.meta import on_meta
from modicum.linears.base import LinearMethod
from modicum.models import ModelConfig
from modicum.models.llama import Llama
from modicum.optim import AdamW
from modicum.proofs.optim.text_bench import Plain, Text, TextResult, TextSize


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
        config, found = self.model, {}
        for layer, prefix in enumerate(config.block_prefixes()):
            for name, (rows, columns, _) in config.projections(layer).items():
                form = config.forms.of(prefix + name)
                if form.name != "dense":
                    made = linear_form(form.name)
                    found[prefix + name] = made.elements(columns, rows, **form.arguments)
        return found

    def taking(self, form: LinearMethod) -> FormedSize:
        """The same with the projections in the form."""
        with on_meta():
            return replace(self, forms=form.plan(Llama(super().model)))

    def low_rank(self) -> FormedSize:
        """The same with low-rank factors of at least as many elements, layer by layer."""
        forms = {}
        for name, elements in self.elements.items():
            _, _, layer, part = name.split(".", 3)
            rows, columns, _ = self.model.projections(int(layer))[part]
            forms[name] = LayerForm("low_rank", {"rank": -(-elements // (rows + columns))})
        return replace(self, forms=FormPlan().with_forms(forms))


def trained(size: FormedSize, rate: float, seed: int) -> TextResult:
    """What a decoder of this size comes to."""
    return Text(size, seed).train(Plain(AdamW.value()), rate)

"""What all linear forms share: which layers take them, and how a model gets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from modicum.core.contracts.method import Context, Method, Names, Strings
from modicum.core.layers.dense_layers import choose, left_out
from modicum.core.layers.form_layer import FormLayer
from modicum.core.layers.form_plan import FormPlan, LayerForm
from modicum.core.layers.formed_model import FormedModel
from modicum.core.layers.left_out import warn_of_left_out
from modicum.core.layers.linear_forms import LinearForm, register
from modicum.core.ranks.ranks import Ranks

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class FormContext(Context):
    """What a form's part in a run is bound to (`LinearMethod.run_hook`): a model that is loaded.

    Args:
        parameters: what is trained, by the model's names (`Strategy.trained`): its parameters, of
            which a rank may hold some rows, or masters of them.
        ranks: those that share the batch.
    """

    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)


class LinearMethod(Method):
    """The fields and services of every form that replaces `nn.Linear`.

    A method names the class of its layers, `layer`, which is then known as the form of the method's
    name wherever plans of forms are read. Its own fields are arguments of the layers; where those
    depend on the shape, `arguments` says so. One with the trait `holds_convolutions` names also
    the class of its layers in place of `nn.Conv2d`, `convolution`; to these W is the matrix
    [out, in * places of the kernel], and layers are chosen by name alone.

    Args:
        targets: layers by full name, last name (`q_proj`), pattern, or `all-linear`, which leaves
            out the output head.
        exclude: of those, the ones that stay dense.
    """

    layer: ClassVar[type[FormLayer]]
    convolution: ClassVar[type[FormLayer] | None] = None

    targets: Names = ("all-linear",)
    exclude: Strings = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if "layer" in cls.__dict__:
            register(LinearForm.of_layers(cls.info.name, cls.layer, cls.convolution))

    def arguments(self, in_features: int, out_features: int) -> Mapping[str, Any] | None:
        """What a layer of this shape is made with; None where one stays dense."""
        return {
            name: getattr(self, name) for name in type(self).model_fields if name not in _OF_PLANS
        }

    def plan(self, model: nn.Module, within: FormPlan | None = None) -> FormPlan:
        """Which layers of a model, which may be without memory, take the form.

        Args:
            within: the plan that this one extends.

        Raises:
            InputError: a target matches no dense layer, or one whose weight is used elsewhere too.
        """
        convolutions = "holds_convolutions" in self.info.traits
        planned = {
            layer.name: LayerForm(self.info.name, dict(arguments))
            for layer in choose(model, self.targets, self.exclude, convolutions=convolutions)
            if (arguments := self.arguments(layer.in_features, layer.out_features)) is not None
        }
        return (within or FormPlan()).with_forms(planned)

    def left_out(self, model: nn.Module) -> dict[str, str]:
        """What `targets` leave dense though it holds matrices, by name, with the reason.

        Such are the stacked experts of a mixture. `wrap` and `convert` warn of them.

        Args:
            model: without adapters; it may be without memory.
        """
        return left_out(model, self.targets, self.exclude)

    def later(self, forms: FormPlan) -> FormPlan:
        """The forms that the layers of such a plan have once a run has changed them; here these."""
        return forms

    def bind(self, context: Context) -> FormedModel:
        """The handle to the context's model, of which nothing is changed yet.

        Raises:
            InputError: as `plan`.
        """
        model = context.model
        return FormedModel(model, self.plan(model), self.left_out(model))

    def run_hook(self, bound: Any) -> object:
        """What takes part in a run of a model that holds the form; most forms take none.

        Args:
            bound: a `FormContext`.
        """
        return None

    def wrap(self, model: nn.Module) -> FormedModel:
        """Put the forms in without numbers: for a model on meta, or one to load numbers into."""
        formed = self.bind(Context(model))
        formed.wrap()
        warn_of_left_out(formed.left_out, self.targets)
        return formed

    def convert(self, model: nn.Module) -> FormedModel:
        """Put the weights of a model that has memory into the form, as near as it can hold them."""
        formed = self.bind(Context(model))
        formed.convert()
        warn_of_left_out(formed.left_out, self.targets)
        return formed


_OF_PLANS = ("targets", "exclude")  # say which layers, not how

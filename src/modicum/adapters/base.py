"""What all adapters share: the value and its ledger.

A method says which factors it has at a site, what they do to the layer's output, and which change
of the layer that amounts to. Some also have tensors that are not trained, or train tensors that
many sites use. Targets, freezing, several adapters, merging, files and switching come from the
other modules of the room.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn

from modicum.adapters.adapter_layer import AdapterLayer, LayerChange
from modicum.adapters.blocks import block_sites, choose_blocks, module_sites
from modicum.adapters.copies import copied
from modicum.adapters.factors import Factor, Generated, SharedFactors, derived_bytes, frozen_bytes
from modicum.adapters.preparation import Preparation, PreparationContext, prepared_by
from modicum.adapters.sites import MATRICES, Site, SiteKind, all_sites, choose, unreached
from modicum.adapters.slice_sites import check_takes_slices
from modicum.adapters.slices import layer_name
from modicum.adapters.widths import check_rank_fits
from modicum.core.contracts.ledger import Entry, Ledger, ModelQuery, Phase, Work
from modicum.core.contracts.method import Context, Method, Names, Probability, Strings
from modicum.core.errors import InputError
from modicum.core.layers.calibration import Loss

if TYPE_CHECKING:
    from modicum.adapters.attached_adapter import AttachedAdapter

__all__ = [
    "Adapter",
    "AdapterLayer",
    "AdapterQuery",
    "Factor",
    "Generated",
    "LayerChange",
    "SharedFactors",
]

SAVED: tuple[Phase, ...] = ("forward", "loss", "backward")
ReadWeight = Callable[[str], Tensor]
NOT_TRAINED = "adapter tensors that are not trained"


@dataclass(frozen=True)
class AdapterQuery:
    """What an adapter's ledger is asked at: a site and the shape of a micro-batch."""

    site: Site
    shape: ModelQuery


class Adapter(Method):
    """The fields and services of every adapter.

    Args:
        targets: layers by full name, last name (`q_proj`), pattern, or `all-linear`, which leaves
            out those that no gradient reaches; where a model holds q, k and v in one layer,
            `q_proj` and the like are slices of that.
        exclude: of those, the ones to leave out.
        also: parameters of the base, or modules with all of theirs, by name or pattern, of which
            copies are trained in full as a part of the adapter: norms, biases, heads.
        dropout: probability with which an adapter's input is dropped in training.
    """

    layer: ClassVar[type[AdapterLayer]]
    # Whether gradients of its factors need the layer's input, as LoRA's A does.
    needs_input: ClassVar[bool] = True
    # Whether dropout is `dropping.dropped`, which keeps a bit a number for the backward pass.
    drops_by_bits: ClassVar[bool] = False
    # In how many batches at least, on each rank, come the examples that `prepare` looks at.
    looks_at_batches: ClassVar[int] = 1
    # The kind of PEFT's files that may hold it; the word of LoRA's that says it is not plain, and
    # the names there of factors that LoRA does not have.
    peft_type: ClassVar[str] = "LORA"
    peft_switch: ClassVar[str] = ""
    peft_tensors: ClassVar[Mapping[str, str]] = {}

    targets: Names = ("all-linear",)
    exclude: Strings = ()
    also: Strings = ()
    dropout: Probability = 0.0

    @abstractmethod
    def factors(self, site: Site) -> Mapping[str, Factor]:
        """The trained tensors at a site, by name.

        Raises:
            InputError: the method's sizes do not fit the site.
        """

    def frozen(self, site: Site) -> Mapping[str, Factor]:
        """What is kept at a site in addition, in checkpoints too, and not trained.

        Of a `Generated` one only the seed is kept.
        """
        return {}

    def derived(self, site: Site) -> Mapping[str, Factor]:
        """What a `DerivingLayer` computes of the layer's weight: in no state dict, in no file."""
        return {}

    @property
    def kinds(self) -> tuple[SiteKind, ...]:
        """The kinds of layers that the method can be on."""
        return (*MATRICES, "convolution") if "adapts_convolutions" in self.traits else MATRICES

    def candidates(self, model: nn.Module) -> list[Site]:
        """Every layer of a model, or every block, on which this adapter could be."""
        if "after_block" in self.traits:
            return [*block_sites(model), *module_sites(model)]
        return all_sites(model, self.kinds)

    def sites(self, model: nn.Module) -> list[Site]:
        """The layers of a model, or its blocks, on which this adapter would be.

        Raises:
            InputError: a target matches none, or one on which it could have another effect.
        """
        if "after_block" in self.traits:
            return choose_blocks(model, self.targets, self.exclude)
        full = [path for path, leaves in self.copied(model).items() if "weight" in leaves]
        sites = choose(model, self.targets, self.exclude, self.kinds, unreached(model))
        check_takes_slices(self, sites)
        kept = [site for site in sites if layer_name(site) not in full]
        if not kept:
            problem = "every layer that `targets` names is trained in full by `also`"
            raise InputError(problem, field="also")
        return kept

    def copied(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """By module, the parameters of which this adapter would have copies.

        Raises:
            InputError: `also` matches nothing, or what an adapter cannot have a copy of.
        """
        return copied(model, self.also)

    def instead(self, site: Site) -> str | None:
        """What is at a site instead of this method, and why; None: the method itself.

        For methods whose sizes do not fit every layer; handle and plan report it.
        """
        return None

    def built_at(self, site: Site, positions: int) -> tuple[bool, bool] | None:
        """Whether the change of a site is built, forward and backward; None: that is no choice.

        For methods that choose what is less work for the positions of a micro-batch.
        """
        return None

    def left_alone(self, site: Site) -> bool:
        """Whether a site gets nothing, as was found out: its layer then stays what it is."""
        return False

    @property
    def looks_at(self) -> int | None:
        """How many examples `prepare` looks at, over all ranks; None: every one; 0: none."""
        return None

    def prepare(self, context: PreparationContext) -> Preparation:
        """What the adapter finds out from data, once, before the first update.

        For methods with the trait `prepares_from_data`. Ranks must come to the same, and so must a
        second run of the same seed: both add up what they saw with `context.ranks`, or by
        `calibrate(..., ranks=context.ranks)`.
        """
        raise TypeError(f"{type(self).__name__} defines no prepare()")

    def shared(self, sites: Sequence[Site]) -> Mapping[str, Factor]:
        """The trained tensors that the sites have in common, by name.

        Raises:
            InputError: the method's sizes do not fit the sites.
        """
        return {}

    def shared_frozen(self, sites: Sequence[Site]) -> Mapping[str, Factor]:
        """What the sites have in common and is not trained, as `frozen`: once for the model."""
        return {}

    def check_kept(self, sites: Sequence[Site], state: Mapping[str, Tensor]) -> None:
        """Make sure that what a file has of frozen tensors can be computed with.

        Args:
            state: of the right names and shapes; `site.factor` by plain names.

        Raises:
            InputError: it cannot.
        """

    @property
    def from_file(self) -> bool:
        """Whether it has frozen tensors that only a file gives, so it can be loaded alone."""
        return False

    @classmethod
    def from_lora(
        cls, value: Adapter, state: Mapping[str, Tensor]
    ) -> tuple[Adapter, dict[str, Tensor]] | None:
        """This method's value and state that compute what a stored LoRA does; None: there is none.

        Args:
            state: `A` [r, in] and `B` [out, r] of each layer by `site.factor`.
        """
        return None

    def attach(
        self,
        model: nn.Module,
        *,
        name: str = "default",
        seed: int = 0,
        weights: ReadWeight | None = None,
        batches: Iterable[Any] | None = None,
        loss: Loss | None = None,
        prepared: Preparation | None = None,
    ) -> AttachedAdapter:
        """Freeze `model`, put this adapter on its target layers, and return the handle to it.

        Args:
            weights: gives the full-precision weight of a layer by its name, as the model's file
                stores it; None: the layer's own. A method that rewrites the base asks for it.
            batches, loss: what a method looks at that prepares from data: batches, and
                `loss(model, batch)`, the sum over one. Other methods leave them unread.
            prepared: what it found out, in their place.

        Raises:
            InputError: a target matches no layer, or a tied one, or one that may compute something
                else than its type says; the name is taken; sizes do not fit; the method needs
                weights that a quantized base has lost, data, or a file. After a failure the model
                is as it was.
        """
        from modicum.adapters.attached_adapter import AttachedAdapter

        real = not any(parameter.is_meta for parameter in model.parameters())
        if self.from_file and real:
            problem = "it takes frozen tensors from a file; read one with modicum.adapters.load"
            raise InputError(problem, value=self.info.name)
        asks = "prepares_from_data" in self.traits and prepared is None
        if asks and real:
            if self.looks_at == 0:
                batches, loss = batches or (), loss or _unread
            if batches is None or loss is None:
                problem = "this adapter begins by looking at data; give `batches` and `loss`"
                raise InputError(problem, field="batches", value=self.info.name)
            sites = tuple(self.sites(model))
            for site in sites:
                self.factors(site)  # what does not fit is refused before data are looked at
            check_rank_fits(self, sites)
            context = PreparationContext(model, sites, batches, loss, seed=seed, weights=weights)
            prepared = prepared_by(self.prepare, context)
        return AttachedAdapter(
            model, self, name=name, seed=seed, weights=weights, prepared=prepared
        )

    def bind(self, context: Context) -> AttachedAdapter:
        """Attach to the context's model, seeded by the context."""
        return self.attach(context.model, seed=context.seed)

    def between(self, first: Any, second: Any, labels: Tensor) -> Tensor:
        """With the trait `pairs_passes`: the sum of losses between the outputs of two passes."""
        raise TypeError(f"{type(self).__name__} defines no between()")

    def trained(self, site: Site) -> int:
        """Trained elements at a site, without what it shares with others."""
        return sum(factor.numel for factor in self.factors(site).values())

    def trained_shared(self, sites: Sequence[Site]) -> int:
        """Trained elements that the sites share, each once."""
        return sum(factor.numel for factor in self.shared(sites).values())

    def saves_input(self, site: Site) -> bool:
        """Whether the layer's input is kept for the backward pass: by a linear map, undropped."""
        return self.needs_input and site.kind == "linear" and not self.dropout

    def input_parts(self, site: Site) -> int:
        """How many channels of the input each number is the sum of that is kept of it.

        Layers that read one tensor keep its sums once too.
        """
        return 1

    def ledger(self, at: AdapterQuery) -> Ledger:
        """A site's own tensors, what `layer.forward` saves beyond its input, the extra work."""
        compute = at.shape.compute_bytes
        saved = self.saved_elements(at.site) * at.shape.positions
        dropped = self.dropout_bytes(at) if self.dropout else 0
        still = self._frozen_bytes(at.site)
        return Ledger.of(
            Entry("weight", 4 * self.trained(at.site), what="adapter factors"),
            Entry("weight", still, what=NOT_TRAINED),
            Entry("activation", saved * compute, SAVED, "adapter activations"),
            Entry("activation", dropped, SAVED, "dropout"),
            Entry("activation", self.matrices_kept(at) * compute, SAVED, "adapter matrices"),
            *self.work(at),
        )

    def shared_ledger(self, sites: Sequence[Site]) -> Ledger:
        """What the sites share, once for the model; the ledgers of the sites do not hold it."""
        shared = self.shared(sites).values()
        # Each use makes a gradient of the full tensor, which is added to those before it.
        gradient = max((factor.bytes for factor in shared), default=0)
        return Ledger.of(
            Entry("weight", sum(factor.bytes for factor in shared), what="shared adapter factors"),
            Entry("weight", frozen_bytes(self.shared_frozen(sites)), what=NOT_TRAINED),
            Entry("workspace", gradient, ("backward",), "a gradient of shared factors"),
        )

    def _frozen_bytes(self, site: Site) -> int:
        derived = derived_bytes(self.derived(site), of_held=self.layer.of_held)
        return frozen_bytes(self.frozen(site)) + derived

    def frozen_total(self, sites: Sequence[Site]) -> int:
        """Bytes of all that is not trained; every rank holds them in full."""
        own = sum(self._frozen_bytes(site) for site in sites)
        return own + frozen_bytes(self.shared_frozen(sites))

    def matrices_kept(self, at: AdapterQuery) -> int:
        """Elements of matrices that one forward pass makes of factors and keeps for backward.

        By default those are the factors, cast to the dtype of the products where it is not theirs.
        """
        return self.trained(at.site) if at.shape.compute_bytes < 4 else 0

    @abstractmethod
    def saved_elements(self, site: Site) -> int:
        """Elements that one position's forward saves for backward, without the layer's input."""

    def dropout_bytes(self, at: AdapterQuery) -> int:
        """What dropout keeps: what it multiplied with, and let through, where that is kept."""
        elements = at.site.in_features * at.shape.positions
        if self.drops_by_bits and at.site.kind != "convolution":
            return -(-elements // 8)
        return (1 + self.needs_input) * elements * at.shape.compute_bytes

    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        """Matrix-product work beyond the frozen layer's own, forward and backward."""
        forward, backward = self.operations(at)
        return Work(forward), Work(backward, phase="backward")

    def operations(self, at: AdapterQuery) -> tuple[int, int]:
        """Those of matrix products beyond the frozen layer's own, forward and backward.

        By default each position is multiplied with all that is trained, once; twice backward.
        """
        product = 2 * at.shape.positions * self.trained(at.site)
        return product, 2 * product

    def with_fields(self, **fields: Any) -> Self:
        """This value with some fields changed, checked again."""
        return type(self)(**(self.model_dump() | fields))


def _unread(model: nn.Module, batch: Any) -> Tensor:
    raise TypeError("an adapter that looks at no example has asked for a loss")

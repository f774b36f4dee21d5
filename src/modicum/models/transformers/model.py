"""A decoder of transformers as tasks and trainers call one: blocks, documents, states.

The model is transformers' own: its modules, its parameters' names, its forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.block_kinds import outermost_lists
from modicum.core.layers.form_layer import FormLayer
from modicum.core.layers.formed_model import FormedModel
from modicum.core.layers.layer_sites import survey
from modicum.core.layers.linear_forms import frozen_linears, write_weight
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.layers.recomputing import recomputed
from modicum.core.random import derive_seed
from modicum.core.ranks.sharding import is_sharded
from modicum.models.llama import compute_dtype
from modicum.models.rope import document_mask, document_positions
from modicum.models.transformers.buffers import compute_buffers, keep_exact
from modicum.models.transformers.kinds import architecture, described
from modicum.models.transformers.private import begin_module, runs_again, without_checkpointing
from modicum.models.transformers.shape import TransformersShape

# As blocks call what they write keys and values into.
_CACHES = ("past_key_values", "layer_past", "cache_params")


@dataclass(frozen=True)
class DecoderStates:
    """What a model remembers of the first tokens.

    Args:
        tokens: all of them [B, T]; None: there are none yet.
        cache: keys and values as transformers keeps them; None: all tokens are read anew.
    """

    tokens: Tensor | None = None
    cache: Any = None


class TransformersModel(nn.Module):
    """What modicum adds to any class of transformers; `build` makes a model of both.

    Attributes:
        decoder_config: the shape of the model.
        blocks_name: the name of the list that holds its blocks.
        transposed: names of linear layers that store W^T, as the `Conv1D` of GPT-2 does.
    """

    peft_task_type: ClassVar[str]  # as which PEFT loads adapters of it
    decoder_config: TransformersShape
    blocks_name: str
    transposed: frozenset[str]
    recompute_blocks: bool

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder blocks, in order."""
        return cast(nn.ModuleList, self.get_submodule(self.blocks_name))

    @property
    def unreached(self) -> frozenset[str]:
        """Names of linear layers whose weights get no gradient, where that is known."""
        found: frozenset[str] = getattr(self.decoder_config, "unreached", frozenset())
        return found

    @property
    def recompute(self) -> bool:
        """Whether blocks forget their activations and compute them again in the backward pass."""
        return self.recompute_blocks

    @recompute.setter
    def recompute(self, value: bool) -> None:
        self.recompute_blocks = value
        for block in self.blocks:
            if not runs_again(block, recomputed if value else None):
                raise InputError(
                    "blocks of this model cannot run again in the backward pass",
                    field="training.recompute",
                    value=type(block).__name__,
                    allowed="none",
                )

    def _run(self, input_ids: Tensor, *, use_cache: bool = False, **more: Any) -> Any:
        if "use_cache" in _parameters(type(self)):
            more["use_cache"] = use_cache
        # Blocks run again in eval mode too, where gradients are computed, but for those that write
        # into a cache, which would then have it twice.
        again = self.recompute_blocks and torch.is_grad_enabled() and not self.training
        again = again and not use_cache
        blocks = [block for block in self.blocks if not block.training] if again else []
        with _running_again(blocks):
            try:
                return super().forward(input_ids=input_ids, **more)
            except RuntimeError as error:
                if use_cache or not self._mixes(error):
                    raise
            # xLSTM makes tensors in fp32 and multiplies them with weights of bf16.
            first = next(self.parameters())
            with torch.autocast(first.device.type, compute_dtype(first)):
                return super().forward(input_ids=input_ids, **more)

    def _mixes(self, error: RuntimeError) -> bool:
        """Whether a pass ended where its own tensors have another dtype than the weights."""
        first = next(self.parameters())
        half = compute_dtype(first) in (torch.bfloat16, torch.float16)
        autocast = torch.is_autocast_enabled(first.device.type)
        return half and not autocast and "same dtype" in str(error)

    def compute_buffers(self, device: torch.device | str) -> None:
        """Give buffers memory and the numbers that follow from the configuration.

        Raises:
            InputError: transformers does not say what stands in one.
        """
        compute_buffers(self, device)

    @torch.no_grad()
    def initialise(self, seed: int) -> TransformersModel:
        """Fill every parameter as transformers begins a new model, each module by its own seed.

        Raises:
            ValueError: the model is on the meta device, or sharded over ranks.
        """
        if any(each.is_meta or is_sharded(each) for each in self.parameters()):
            raise ValueError("new weights are drawn where the model has all its memory")
        frozen = frozen_linears(self)
        with torch.random.fork_rng():
            for name, module in self.named_modules():
                torch.manual_seed(derive_seed(seed, name))
                if name in frozen:
                    layer = cast(nn.Linear, module)
                    drawn = torch.randn(layer.out_features, layer.in_features)
                    write_weight(module, 0.02 * drawn.to(next(module.parameters()).device))
                elif isinstance(module, FormLayer) and module.begins_dense:
                    like = next(module.parameters(recurse=False))
                    with on_meta(like.dtype):  # where making a layer draws nothing
                        dense = nn.Linear(module.in_features, module.out_features, bias=False)
                    materialise(dense, like.device)
                    begin_module(self, dense)
                    module.fit(dense.weight)
                elif isinstance(module, FormLayer):
                    module.initialise(std=0.02, seed=seed, name=name)
                else:
                    begin_module(self, module)
        return self


class TransformersDecoder(TransformersModel):
    """A decoder of transformers: logits of the next token, of documents in rows."""

    peft_task_type: ClassVar[str] = "CAUSAL_LM"

    def forward(self, input_ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocabulary].

        Args:
            documents: int [B, T], the document of each token; attention stays in a document and
                positions restart with each. None: every row is one document.

        Where nothing else keeps documents of a row apart, each is computed by itself.

        Raises:
            InputError: so it would have to be, and the weights are sharded over ranks, which would
                wait for each other with different numbers of documents.
        """
        more: dict[str, Any] = {}
        if documents is not None:
            packing = self.decoder_config.packing_of(input_ids.shape[1])
            if packing == "none":
                return self._one_by_one(input_ids, documents)
            more["position_ids"] = document_positions(documents)
            if packing == "mask":
                dtype = compute_dtype(next(self.parameters()))
                more["attention_mask"] = document_mask(documents, dtype)
        return cast(Tensor, self._run(input_ids, **more).logits)

    def _one_by_one(self, input_ids: Tensor, documents: Tensor) -> Tensor:
        """The logits of each document alone, those of equal length together."""
        if any(is_sharded(parameter) for parameter in self.parameters()):
            raise InputError(
                "this model computes documents one at a time, which sharded weights do not go "
                "with; set this to false, or let every rank hold all weights",
                field="data.boundaries",
                value=True,
            )
        begins = (document_positions(documents).flatten() == 0).nonzero().flatten().tolist()
        ends = [*begins[1:], input_ids.numel()]
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        parts = list(input_ids.flatten().split(lengths))
        found: list[Tensor] = list(parts)
        for length in set(map(len, parts)):
            places = [place for place, part in enumerate(parts) if len(part) == length]
            logits = self(torch.stack([parts[place] for place in places]))
            for place, each in zip(places, logits, strict=True):
                found[place] = each
        return torch.cat(found).unflatten(0, input_ids.shape)

    def continued(self, input_ids: Tensor, states: DecoderStates) -> tuple[Tensor, DecoderStates]:
        """Logits [B, vocabulary] of what follows the last of these tokens, and new states.

        They are those of all tokens anew. Where a row becomes so long that its first tokens have
        other positions (LongRoPE), it is read anew, as transformers' `generate` does for Phi-3.
        """
        # Logits of all places of a long prompt would take gigabytes.
        more: dict[str, Any] = {"logits_to_keep": 1} if _keeps_logits(type(self)) else {}
        tokens, before, cache = input_ids, 0, states.cache
        if states.tokens is not None:
            tokens, before = torch.cat([states.tokens, input_ids], 1), states.tokens.shape[1]
        if not self.decoder_config.caches:
            return self._run(tokens, **more).logits[:, -1], DecoderStates(tokens)
        if cache is None or not self.decoder_config.rope_limits.keeps(before, tokens.shape[1]):
            cache, input_ids = _empty_cache(self.config), tokens
        elif "position_ids" in _parameters(type(self)):
            # Not every model counts the tokens in its cache, which transformers' `generate` does.
            places = torch.arange(before, tokens.shape[1], device=tokens.device)
            more["position_ids"] = places.expand_as(input_ids)
        found = self._run(input_ids, use_cache=True, past_key_values=cache, **more)
        return found.logits[:, -1], DecoderStates(tokens, found.past_key_values)

    def new_states(self, batch: int, capacity: int | None = None) -> DecoderStates:
        """Empty states; a model that is not shown to continue by a cache reads all tokens anew."""
        return DecoderStates()


class TransformersClassifier(TransformersModel):
    """A classifier of sequences of transformers: logits of each row's class.

    Attributes:
        trained_heads: names of the modules that make logits of what the blocks give. They are
            trained in full next to an adapter too.
    """

    peft_task_type: ClassVar[str] = "SEQ_CLS"
    trained_heads: tuple[str, ...]

    def forward(
        self, input_ids: Tensor, mask: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Logits [B, classes].

        Args:
            input_ids: [B, T], padded at the end.
            mask: int64 [B, T], 1 where there is a token and 0 where padding is; None: no padding.
            types: int64 [B, T], of which text of a pair each token is, for a model that asks.
        """
        given = {"attention_mask": mask, "token_type_ids": types}
        more: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        with self._one_dtype():
            return cast(Tensor, self._run(input_ids, **more).logits)

    def _one_dtype(self) -> AbstractContextManager[object]:
        """Where a head is trained in fp32 on blocks of bf16, products are in the blocks' dtype."""
        first = next(self.parameters())
        dtype = compute_dtype(first)
        heads = (self.get_submodule(name).parameters() for name in self.trained_heads)
        if all(parameter.dtype == dtype for parameter in chain.from_iterable(heads)):
            return nullcontext()
        return torch.autocast(first.device.type, dtype)


def build(config: TransformersShape) -> Any:
    """The model of a configuration, its linear layers in the forms that it says; call it on meta.

    Raises:
        InputError: transformers cannot build it so, or a layer that is to have a form is not there.
    """
    own = architecture(config.raw, config.head)
    ours = TransformersDecoder if config.head == "tokens" else TransformersClassifier
    try:
        known = described(config.raw)
        # Some classifiers make what is below their head in the dtype that config.json names.
        known.dtype = torch.get_default_dtype()
        if getattr(known, "rescale_every", 0):
            known.rescale_every = 0  # RWKV would divide weights in place where it is evaluated
        model: TransformersModel = _with_ours(own, ours)(known)
    except InputError:
        raise
    except Exception as error:  # whatever a model's own code says of its configuration
        said = f"{type(error).__name__}: {error}".splitlines()[0][:240]
        raise InputError(f"transformers cannot build this model ({said})") from None
    keep_exact(model)
    model.decoder_config = config
    model.blocks_name = _blocks_name(model)
    model.recompute_blocks = False
    sites = survey(model, ["linear"]).every.items()
    model.transposed = frozenset(name for name, site in sites if site.transposed)
    if isinstance(model, TransformersClassifier):
        model.trained_heads = _heads(model)
    if config.forms.layers:
        formed = FormedModel(model, config.forms)
        formed.wrap()
        formed.close()
    return model


@contextmanager
def _running_again(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """In here blocks in evaluation mode keep no activations, and run again in the backward pass.

    transformers does so in training alone, and a block that is said to train may drop something.
    """
    before = {block: block.__dict__.get("forward") for block in blocks}
    for block, own in before.items():
        plain = partial(without_checkpointing(type(block).forward), block)
        block.__dict__["forward"] = partial(_again, plain if own is None else own)
    try:
        yield
    finally:
        for block, own in before.items():
            if own is None:
                del block.__dict__["forward"]
            else:
                block.__dict__["forward"] = own


def _again(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    # Models that take no `use_cache` give a cache all the same, which would have everything twice.
    keywords |= dict.fromkeys(keywords.keys() & _CACHES)
    return recomputed(partial(forward, **keywords), *arguments)


def _empty_cache(config: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=config)


_made: dict[type[Any], type[Any]] = {}


def _with_ours(own: type[Any], ours: type[Any]) -> type[Any]:
    """The class of transformers with ours before it, under its name, by which they look it up."""
    if own not in _made:
        known = {"__module__": own.__module__, "plain_type": own, "__doc__": own.__doc__}
        _made[own] = type(own.__name__, (ours, own), known)
    return _made[own]


def _parameters(kind: type[Any]) -> set[str]:
    """What the forward pass of transformers' class takes by name."""
    plain = getattr(kind, "plain_type", kind)
    return set(inspect.signature(plain.forward).parameters)


def mixers(model: TransformersModel) -> frozenset[str]:
    """Names of the classes in its blocks that take a cache, or whether there is to be one."""
    kinds = {type(module) for module in model.blocks.modules()}
    return frozenset(kind.__name__ for kind in kinds if _parameters(kind) & {*_CACHES, "use_cache"})


def _keeps_logits(kind: type[Any]) -> bool:
    """Whether transformers' class computes logits of the last places alone where it is asked."""
    return "logits_to_keep" in _parameters(kind)


def _blocks_name(model: nn.Module) -> str:
    """The list of modules that holds most of the parameters.

    Raises:
        InputError: the model has no list of blocks.
    """
    lists = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in outermost_lists(model).items()
        if isinstance(module, nn.ModuleList)
    }
    if not lists:
        raise InputError("this model has no list of blocks", value=type(model).__name__)
    return max(lists, key=lists.__getitem__)


def _heads(model: Any) -> tuple[str, ...]:
    """The modules of a classifier that are not of its base model, and what pools in that."""
    base = model.base_model_prefix
    own = [name for name, child in model.named_children() if name != base and _holds(child)]
    pooler = getattr(getattr(model, base), "pooler", None)
    return tuple(own) + ((f"{base}.pooler",) if pooler is not None and _holds(pooler) else ())


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None

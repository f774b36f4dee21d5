"""LoRAM: a LoRA that is trained on a pruned model, and used on the one that was not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from modicum.adapters.base import Factor
from modicum.adapters.base_weights import at_least_fp32
from modicum.adapters.lora import LoRA
from modicum.adapters.lora_layer import LoRALayer
from modicum.adapters.sites import Site, all_sites
from modicum.adapters.slices import layer_name
from modicum.core.contracts.method import Against, Info
from modicum.core.errors import InputError
from modicum.core.random import normal_

KEPT = "kept"


class LoRAMLayer(LoRALayer):
    """y = W x + b + s B (A dropout(x)) of a layer that may have lost rows and columns.

    `delta` is the change of W; `as_lora` that of the weight that has all rows and columns. `kept`
    is a digest of which W has, so that no state comes to a layer with others.
    """

    method: LoRAM
    kept: Tensor
    fill_seed = 0

    def initialise(self, *, seed: int, device: torch.device | str) -> None:
        """Start as LoRA does, and note which rows and columns there are."""
        super().initialise(seed=seed, device=device)
        self.fill_seed = seed
        self.kept.fill_(self.digest)

    @property
    def digest(self) -> int:
        """A number that says which rows and columns W has; 0: all."""
        return 0 if self.site.part is None else self.site.part.digest

    def check_kept(self, kept: Mapping[str, Tensor]) -> None:
        if (other := kept.get(KEPT)) is None or other.is_meta or self.kept.is_meta:
            return
        if int(other) != self.digest:
            raise InputError(
                "this adapter was trained on a model that lost other units, so its factors belong "
                "to other rows and columns; load it on the pruned model that it was trained on, or "
                "what `save` writes for the full model on that",
                value=self.site.name,
            )

    def delta(self) -> Tensor:
        a, b, scale = super().as_lora()
        return scale * (at_least_fp32(b) @ at_least_fp32(a))

    def as_lora(self) -> tuple[Tensor, Tensor, float]:
        a, b, scale = super().as_lora()
        return *self.in_files(a, b), scale

    def lora_on_residual(self) -> tuple[Tensor, Tensor, float]:
        return super().as_lora()  # of the pruned model itself

    def in_files(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if (part := self.site.part) is None:
            return a, b
        full_a, full_b = part.factors(a, b)
        if self.method.fill == "normal" and (places := part.kept(a)) is not None:
            full_a = torch.empty_like(full_a)
            std, name = 1 / a.shape[0], f"{part.name}/A of removed inputs"
            normal_(full_a, seed=self.fill_seed, name=name, std=std)
            full_a = full_a.index_copy(1, places.to(a.device), a)
        return full_a, full_b


class LoRAM(LoRA):
    """A LoRA is trained on a model that lost neurons and heads, and saved for the one that has all.

    In training the base is what takes the memory, and a small base gives gradients that are good
    enough: the factors' rows and columns that belong to kept units come to their places in the full
    model's factors, all others are zero. So the change of the full weight is that of the small one
    at what was kept, and nothing elsewhere. Where nothing was removed, it is LoRA.

    Prefer it where the full model can be served and not trained. Not where it does not fit there
    either: then train the small one with LoRA, and keep that. It is as good as the small model is
    like the full one: with half of the neurons gone a part of what was learned is lost on the way,
    with three quarters much more, though the small model itself has learned it.

    Make the model small with `compress: {method: structured_pruning}` in the same recipe, or in one
    before it, whose `base/` is then `model.path`. The paper's alignment is that earlier recipe
    without an adapter: it trains the small model on general text, and `model/` is what comes of it.
    With `linear: {method: nf4}` in the later one the small base has four bits (QLoRAM). The folder
    `adapter/` of the run is a PEFT LoRA of the full model, with the digests of its weights;
    `modicum merge`, `export`, `chat` and `serve` use the run with that model, and refuse another.
    In Python, `save` writes the same, `merge` folds it into the small model, and
    `save(form="modicum")` or `"peft-rest"` keeps it for that.

    Args:
        fill: A of inputs that were removed, in what is saved for the full model: `zero`, or
            `normal`, N(0, 1/r^2), which adds a response that nobody trained. B's rows are zero.
        rank, alpha, rank_stabilized, dropout, targets, exclude, also: see `LoRA`.

    Raises:
        InputError: `targets` names a slice of a layer that lost units, or `also` parameters of such
            a one: their values for removed units would be made up; or a state is of a model that
            lost others.

    Source: Zhang et al., "Train Small, Infer Large: Memory-Efficient LoRA Training for Large
    Language Models", arXiv 2502.13533, sections 2 and 3, its structured variant.

    >>> import torch
    >>> from modicum.adapters import LoRAM
    >>> from modicum.compress import StructuredPruning
    >>> from modicum.models import ModelConfig, create
    >>> model = create(ModelConfig(vocabulary_size=16, width=8, layers=1, heads=2), seed=0)
    >>> pruning = StructuredPruning(score="magnitude", neurons=0.5)
    >>> small = pruning.fit(model, pruning.calibrate(model, [], None))
    >>> adapter = LoRAM(rank=2, targets=("down_proj",)).attach(model)
    >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    >>> for ids in torch.randint(16, (10, 4, 9)):
    ...     logits = model(ids).mT[..., :-1]
    ...     torch.nn.functional.cross_entropy(logits, ids[:, 1:]).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> [(_, layer)] = adapter.layers()
    >>> tuple(layer.A.shape), tuple(layer.as_lora()[0].shape)  # of the small and the full model
    ((2, 16), (2, 32))
    """

    info = Info(
        name="loram",
        title="LoRAM: LoRA trained on a pruned model, for the model that was not",
        room="adapters",
        paper="Train Small, Infer Large: Memory-Efficient LoRA Training for Large Language Models, "
        "arXiv 2502.13533",
        claim="LoRA training of a 70B model with 15.8 times fewer bytes of base parameters, better "
        "than the untuned model and than LoRA on smaller ones",
        traits=(
            "adapts_base",
            "for_full_model",
            "mergeable",
            "is_lora",
            "exact_resume",
            "compiles",
        ),
        evidence="verified against code",
        claim_verdict="in part",
        against=Against("worse", "the small model itself, as tuned"),
        reason="without a quarter of the neurons it closes 99.9 % of the gap between the untuned "
        "full model and LoRA on that, without half 98 %; the small model itself, as tuned, "
        "has the lower loss on what is learned",
        run_on_gpu=True,
        tiny={"rank": 2},
    )
    layer = LoRAMLayer

    fill: Literal["zero", "normal"] = "zero"

    def frozen(self, site: Site) -> Mapping[str, Factor]:
        return {KEPT: Factor((1,), dtype=torch.int64)}

    def sites(self, model: nn.Module) -> list[Site]:
        chosen = super().sites(model)
        smaller = {site.name for site in all_sites(model) if site.part is not None}
        slices = [site.name for site in chosen if site.rows and layer_name(site) in smaller]
        copies = [path for path in self.copied(model) if path in smaller]
        for field, names in (("targets", slices), ("also", copies)):
            if names:
                problem = "the layer lost units, so no part of it has a place in the full model"
                raise InputError(f"{problem}; name the layer as a target", field=field, value=names)
        return chosen

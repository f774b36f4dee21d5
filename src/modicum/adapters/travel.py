"""Where an attached adapter can be used outside of modicum: in PEFT, in vLLM, merged, or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from modicum.adapters.attachment import Attachment
from modicum.adapters.base_weights import is_exact
from modicum.adapters.names import plain_name
from modicum.adapters.peft_formats import why_not
from modicum.adapters.peft_slices import on_layers
from modicum.core.contracts.travel import LOADS_IN, TravelForm

# What vLLM's --max-lora-rank can be (vllm/config/lora.py, v0.27).
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_SAME = 1e-6  # of a scale: what dividing and multiplying by ranks rounds


@dataclass(frozen=True)
class Travel:
    """Where an adapter can be used, on the model that it is attached to.

    Attributes:
        form: `lora`: PEFT's LoRA files hold it exactly; `peft`: other files of PEFT's do; `merged`:
            the merged model does; `here`: nothing else does.
        ranks: the smallest and the largest rank of its LoRA; None: it is none.
        why: why it is no more; empty for a LoRA.
        not_in_vllm: which of vLLM's rules its PEFT files break; empty: none, by what the rules say.
    """

    form: TravelForm
    ranks: tuple[int, int] | None = None
    why: str = ""
    not_in_vllm: str = ""

    @property
    def loads_in(self) -> str:
        """The programs, in a few words."""
        return LOADS_IN["peft" if self.form == "lora" and self.not_in_vllm else self.form]

    @property
    def reason(self) -> str:
        """What it is there, and why no more."""
        if self.ranks is None:
            of_vllm = (
                f"exact in a file of its own kind; not in vLLM: {self.not_in_vllm}"
                if self.form == "peft"
                else ""
            )
            return of_vllm or self.why
        least, most = self.ranks
        rank = f"{most}" if least == most else f"{least} to {most}"
        said = self.not_in_vllm and f"not in vLLM: {self.not_in_vllm}"
        enough = next((each for each in VLLM_RANKS if each >= most), most)
        said = said or f"vLLM's rules are kept with --max-lora-rank {enough}, not run here"
        return f"a LoRA of rank {rank}, exact; {said}"

    def row(self) -> dict[str, Any]:
        """What a plan's row says of it."""
        return {
            "loads_in": self.loads_in,
            "form": self.form,
            "ranks": None if self.ranks is None else list(self.ranks),
            "in_vllm": self.form == "lora" and not self.not_in_vllm,
            "reason": self.reason,
        }


def loaded_as(attached: Attachment) -> str | None:
    """What an adapter's PEFT files load as, where that is a LoRA and the method is another.

    >>> import torch
    >>> from modicum.adapters import SVFit
    >>> adapter = SVFit(rank=3).attach(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    >>> loaded_as(adapter)
    "a LoRA of rank 3 in PEFT's files, exact: loaded there or here it is lora, and no longer svfit"
    """
    travel, name = travel_of(attached), attached.method.info.name
    if travel.form != "lora" or travel.ranks is None or name == "lora":
        return None
    least, most = travel.ranks
    rank = f"{most}" if least == most else f"{least} to {most}"
    kept = f"loaded there or here it is lora, and no longer {name}"
    return f"a LoRA of rank {rank} in PEFT's files, exact: {kept}"


def travel_of(attached: Attachment) -> Travel:
    """Where an adapter can be used; of one on meta too, which has shapes and no values.

    vLLM's part is a check of what its loader refuses or leaves unread (vllm/lora/peft_helper.py,
    v0.27: DoRA, `modules_to_save`, a rank above the largest, and one scale for all layers).
    vLLM itself is not run here.

    >>> import torch
    >>> from modicum.adapters import LoRA
    >>> adapter = LoRA(rank=3).attach(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    >>> travel_of(adapter).reason
    "a LoRA of rank 3, exact; vLLM's rules are kept with --max-lora-rank 8, not run here"
    """
    if (why := _why_no_peft(attached)) is not None:
        return Travel("merged" if "mergeable" in attached.method.traits else "here", why=why)
    loras = {name: layer.as_lora() for name, layer in attached.layers()}
    exact = [lora for lora in loras.values() if lora is not None]
    if len(exact) < len(loras):
        kind = attached.method.peft_switch or attached.method.peft_type
        return Travel("peft", not_in_vllm=f"it takes no `{kind}`")
    exact = list(on_layers(attached, dict(zip(loras, exact, strict=True))).values())
    ranks = [a.shape[0] for a, _, _ in exact]
    extent = min(ranks), max(ranks)
    return Travel("lora", extent, not_in_vllm=_broken_rule(attached, exact))


def _why_no_peft(attached: Attachment) -> str | None:
    for name, layer in attached.layers():
        # It may not have been rewritten yet, as on meta.
        if layer.rewrites and not is_exact(attached.model.get_submodule(name)):
            return f"its start is taken out of the quantized weight of {plain_name(name)}"
    return why_not(attached)


def _broken_rule(attached: Attachment, loras: list[tuple[Tensor, Tensor, float]]) -> str:
    """The first of vLLM's rules that the PEFT files of a LoRA would break; empty: none."""
    if attached.copied:
        return "it takes no `modules_to_save`"
    kinds = {site.kind for site in attached.sites.values()} - {"linear"}
    if kinds:
        return f"its layers with adapters are linear ones, and here is {_with_article(min(kinds))}"
    largest = max(a.shape[0] for a, _, _ in loras)
    if largest > VLLM_RANKS[-1]:
        return f"its largest rank is {VLLM_RANKS[-1]}"
    scales = [scale for _, _, scale in loras]
    if not all(math.isclose(scale, scales[0], rel_tol=_SAME) for scale in scales):
        return "it reads one `lora_alpha` / `r` for all layers, and these have several"
    return ""


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"

"""Where an adapter can be used outside of modicum, as far as its method's traits say it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

TravelForm = Literal["lora", "peft", "merged", "here"]

LOADS_IN: dict[TravelForm, str] = {
    "lora": "peft, vLLM",
    "peft": "peft",
    "merged": "merged only",
    "here": "modicum only",
}

MEANINGS: dict[TravelForm, str] = {
    "lora": "peft, and vLLM by its rules (not run here): it is a LoRA, exactly; `modicum plan` "
    "says of which rank",
    "peft": "peft, exactly; in vLLM only merged",
    "merged": "nothing else as an adapter; merged, the model is a plain one; "
    'save(form="peft", rank=r) folds it into a LoRA and says what that loses',
    "here": "nothing else: it has no dense form, so it neither merges nor becomes a LoRA",
}


def travel_form(traits: Collection[str]) -> TravelForm | None:
    """How far a method with these traits travels on layers that suit it; None: it is no adapter.

    >>> travel_form({"adapts_base", "mergeable", "is_lora"}), travel_form({"adapts_base"})
    ('lora', 'here')
    """
    if "adapts_base" not in traits:
        return None
    if "is_lora" in traits:
        return "lora"
    if "in_peft" in traits:
        return "peft"
    return "merged" if "mergeable" in traits else "here"

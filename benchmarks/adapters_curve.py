"""LoRA's total memory over LoRA-FA's, by ledger, next to the most that any adapter could have.

The total is weights, adapter, its gradients and two moments, and the worst phase of a step. The
bound is LoRA's total over that of the frozen model, which keeps what gradients flow through.
"""

from __future__ import annotations

from typing import Any

import torch

from modicum.adapters import LoRA, LoRAFA
from modicum.adapters.base import Adapter, AdapterQuery
from modicum.core.contracts.ledger import Entry, Ledger, ModelQuery
from modicum.core.machine.memory import TensorMeter
from modicum.models import ModelConfig, create
from modicum.models.ledger import AdapterActivations, ledger
from modicum.models.llama import Llama

ROWS, RANK, LAYERS, HEAD_WIDTH = 4, 16, 4, 64
WIDTHS = (256, 512, 1024, 2048, 4096)
POSITIONS = (256, 512, 1024, 2048, 4096, 8192)
MEASURED = ((256, 1024), (512, 1024), (256, 4096))
QUICK = ((256, 256),)
CLAIMED = 1.4


def total(adapter: Adapter | None, width: int, positions: int) -> int:
    """Bytes of a step with an adapter on all linears; None: of the frozen model."""
    config = _config(width, positions)
    shape = ModelQuery(ROWS, positions // ROWS)
    value = adapter or LoRAFA(rank=1)
    with torch.device("meta"):
        sites = value.sites(Llama(config))
    if adapter is None:
        nothing = AdapterActivations({site.name: 0 for site in sites})
        return ledger(config, shape, adapted=nothing).peak()
    each = {site: adapter.ledger(AdapterQuery(site, shape)) for site in sites}
    kept = {site: own.bytes("activation") for site, own in each.items()}
    weights = sum(own.bytes("weight") for own in each.values())
    states = 12 * sum(adapter.trained(site) for site in sites)
    model = ledger(config, shape, adapted=AdapterActivations.of(adapter, kept))
    own = Ledger.of(
        Entry("weight", weights, what="adapter"), Entry("optimizer", states, what="states")
    )
    return (model + own).peak()


def measured(adapter: Adapter, width: int, positions: int) -> int:
    """The peak of tensor bytes of a second step, with weights, gradients and moments."""
    model = create(_config(width, positions), seed=0)
    attached = adapter.attach(model)
    model.model.embed_tokens.register_forward_hook(_flows)
    optimizer = torch.optim.AdamW(attached.parameters(), fused=True)
    ids = torch.zeros(ROWS, positions // ROWS, dtype=torch.int64)

    def step() -> None:
        model(ids).sum().backward()
        optimizer.step()

    step()  # gradients and moments are there from now on, and stay
    tensors = [*model.parameters(), *model.buffers()]
    there = sum(t.nbytes for t in tensors)
    there += sum(3 * p.nbytes for p in attached.parameters())
    with TensorMeter("cpu") as meter:
        step()
    return there + (meter.peak or 0)


def curve(*, quick: bool) -> list[dict[str, Any]]:
    """A row for each width and number of positions."""
    lora, ours = LoRA(rank=RANK), LoRAFA(rank=RANK)
    rows = []
    for width in WIDTHS[: 2 if quick else None]:
        for positions in POSITIONS[: 2 if quick else None]:
            of_lora, of_ours = (total(each, width, positions) for each in (lora, ours))
            row: dict[str, Any] = {"width": width, "positions": positions}
            row |= {"lora": of_lora, "lora_fa": of_ours, "ratio": of_lora / of_ours}
            row["bound"] = of_lora / total(None, width, positions)
            if (width, positions) in (QUICK if quick else MEASURED):
                found = [measured(each, width, positions) for each in (lora, ours)]
                row |= {"lora_measured": found[0], "lora_fa_measured": found[1]}
                row["ratio_measured"] = found[0] / found[1]
            rows.append(row)
    return rows


def _config(width: int, positions: int) -> ModelConfig:
    return ModelConfig(
        vocabulary_size=16,
        width=width,
        layers=LAYERS,
        heads=width // HEAD_WIDTH,
        mlp_width=width * 11 // 4,
        context=positions // ROWS,
    )


def _flows(module: Any, inputs: Any, output: torch.Tensor) -> None:
    if not output.requires_grad:
        output.requires_grad_()

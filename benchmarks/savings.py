"""What optimizers keep and trained forms export, in bytes, next to AdamW and to dense weights.

    python benchmarks/savings.py           # a decoder of 27 million numbers; half a minute
    python benchmarks/savings.py --quick   # a tiny one; nothing is written

State is what optimizers hold after some steps with drawn gradients, the most of them, with a
quarter of the width or of the numbers in their subspaces. Folders are those of models that were
never trained, once as dense weights and once as small as a run leaves them: each layer in its form,
where that is no larger than the dense weight. What Maestro leaves depends on what it prunes; here
it has kept a quarter of the dense work.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import alone, say, write_result

from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.layers.meta import on_meta
from modicum.core.layers.small_forms import small_forms_of
from modicum.core.machine.memory import bytes_by_kind
from modicum.linears import LOST, SST, LinearMethod, LowRank, Maestro, Monarch
from modicum.models import ModelConfig
from modicum.models.llama import Llama, create
from modicum.models.saving import save
from modicum.optim import FRUGAL, AdamW, DCTAdamW, GaLore, Trion

FULL = ModelConfig(vocabulary_size=2048, width=512, layers=8, heads=8, mlp_width=1376)
TINY = ModelConfig(vocabulary_size=64, width=64, layers=2, heads=2, mlp_width=160)
STEPS = 5  # with two switches of subspaces among them
FORMS: dict[str, LinearMethod] = {
    "low_rank": LowRank(),
    "monarch": Monarch(share=0.5),
    "lost": LOST(),
    "maestro": Maestro(),
    "sst": SST(),
}
KEPT = 0.25  # of the dense work, by Maestro


def optimizers(width: int) -> dict[str, OptimizerMethod]:
    """Those whose state is counted."""
    rank = width // 4
    return {
        "adamw": AdamW.value(),
        "galore": GaLore.value(rank=rank, update_gap=2),
        "frugal": FRUGAL.value(density=0.25, update_gap=2),
        "dct_adamw": DCTAdamW.value(rank=rank, update_gap=2),
        "trion": Trion.value(rank=rank),
    }


def state(method: OptimizerMethod, config: ModelConfig) -> int:
    """The most bytes that an optimizer keeps between steps."""
    model, most = create(config, seed=0), 0
    optimizer = method.bind(optimizer_groups(model, learning_rate=1e-3, weight_decay=0.0))
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        most = max(most, bytes_by_kind(model, optimizer)["optimizer"])
    return most


def exported(form: LinearMethod, config: ModelConfig, folder: Path) -> dict[str, float]:
    """Bytes of a model's folder in its form and as dense weights, where there are some."""
    with on_meta():
        plan = form.plan(Llama(config))
    model = create(replace(config, forms=plan), seed=0)
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    if isinstance(form, Maestro):
        steps = form.steps(model)
        steps.keep_share(KEPT)
        steps.shrink()
    forms = small_forms_of(model)
    found: dict[str, float] = {"form": size_of(save(model, folder / "form", forms=forms))}
    dense = create(config, seed=0)
    found["dense"] = size_of(save(dense, folder / "dense"))
    found["over_dense"] = found["form"] / found["dense"]
    weights = sum(each.nbytes for each in (*dense.parameters(), *dense.buffers()))
    return found | {"layers_in_form": len(forms.layers), "trained_over_dense": held / weights}


def size_of(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    """Count, show and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny decoder; keeps no result")
    quick = parser.parse_args().quick
    config = TINY if quick else FULL
    figures: dict[str, Any] = {"state": {}, "exported": {}}
    with alone(), tempfile.TemporaryDirectory() as folder:
        for name, method in optimizers(config.width).items():
            kept = state(method, config)
            least = figures["state"].get("adamw", {"bytes": kept})["bytes"]
            figures["state"][name] = {"bytes": kept, "over_adamw": kept / least}
            say(f"{name}: {kept} bytes of state, {kept / least:.3f} of AdamW's")
        for name, form in FORMS.items():
            figures["exported"][name] = row = exported(form, config, Path(folder) / name)
            said = f"{row['layers_in_form']} layers in its form"
            say(f"{name}: a folder of {row['over_dense']:.3f} of the dense one's bytes, {said}")
    if quick:
        print(json.dumps(figures, indent=2))
    else:
        write_result("savings", figures, config.to_hf())


if __name__ == "__main__":
    main()

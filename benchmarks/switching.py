"""How long it takes to change the adapter that is folded into a model's weights.

Two adapters of a method are on a model. A change takes one out of the weights and folds the other
in: by the handles (`unmerge`, `merge`), and by the least that the method's form needs, in plain
PyTorch: two products that are added for LoRA, entries that are put back and others that are written
for SHiRA, and for S2FT a slice of columns that is written over, as the units of both adapters come
first then. All take turns in one run, and have as many trained numbers as a LoRA of rank 32; SVFit
has one a singular value.
After each measurement the outputs are those of the adapter alone, and the base is what it was: to
the bit where a method promises it. MoS shares over layers, so it is not on one alone, and SVFit,
whose factors are of the full width, neither. The bars are for the sizes that the papers have, a
hundredth of the entries for SHiRA and 3 % of the columns for S2FT ("sized"); with as many numbers
as LoRA both are shown next to it. LoRA and SHiRA are in peft too, which reads the same adapters
from files and changes them by its `unmerge_adapter` and `merge_adapter`; what that leaves in the
base is shown, where SHiRA here leaves nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from common import alone, interleaved, paired_ratio, say, spread, write_result
from torch import Tensor, nn

from modicum.adapters import AttachedAdapter
from modicum.adapters.base import Adapter, AdapterLayer
from modicum.adapters.patching_layer import PatchingLayer
from modicum.core.contracts.catalog import catalog
from modicum.proofs.contracts.adapters.subjects import stir

RANK = 32
PLACES = {"one layer of 4096": (1, 4096), "12 layers of 768": (12, 768)}
BARS = {"shira, sized": 4.0, "s2ft, sized": 20.0}  # times faster than LoRA's fuse
LEAST = ("lora", "shira", "s2ft")
IN_PEFT = ("lora", "shira")
CLOSE = 1e-3  # of outputs, after sums in fp32 that were undone


def of(name: str) -> str:
    """The method of a row."""
    return name.partition(",")[0]


def model_of(layers: int, width: int) -> nn.Sequential:
    """Square linear layers, each behind neurons that one more of them and a ReLU make."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width, bias=False))
    for _ in range(layers):
        model.extend([nn.ReLU(), nn.Linear(width, width, bias=False)])
    return model


def values(layers: int, width: int) -> dict[str, Adapter]:
    """The methods, at LoRA's numbers where they have a size; the first layer has none."""
    known = catalog()
    sizes: dict[str, dict[str, Any]] = {
        "lora": {"rank": RANK},
        "shira": {"rank": RANK},
        "shira, sized": {"rank": round(width / 200)},  # r (m + n) = m n / 100
        "s2ft": {"neurons": 2 * RANK / width},
        "s2ft, sized": {"neurons": 0.03},
        "svfit": {"rank": width},
        "mos": {"rank": RANK, "equivalent_rank": RANK},
    }
    if layers == 1:
        sizes = {name: fields for name, fields in sizes.items() if of(name) in LEAST}
    own = tuple(str(2 * place) for place in range(1, layers + 1))
    made = {n: known[of(n)].load()(**fields, targets=own) for n, fields in sizes.items()}
    return {name: value for name, value in made.items() if isinstance(value, Adapter)}


@dataclass
class Switch:
    """Two adapters of a method on one model, the first of them folded in."""

    model: nn.Sequential
    now: AttachedAdapter
    other: AttachedAdapter

    @classmethod
    def of(cls, value: Adapter, layers: int, width: int) -> Switch:
        model = model_of(layers, width)
        one, two = (stir(value.attach(model, name=n, seed=s)) for n, s in (("one", 1), ("two", 2)))
        two.deactivate()
        one.activate()
        one.merge()
        return cls(model, one, two)

    def __call__(self) -> float:
        """Seconds of one change."""
        begun = time.perf_counter()
        self.now.unmerge()
        self.other.merge()
        taken = time.perf_counter() - begun
        self.now.deactivate()
        self.now, self.other = self.other, self.now
        return taken

    def check(self, value: Adapter, layers: int, width: int) -> None:
        """What is folded in is the adapter, and the base is what it was."""
        inputs = torch.ones(2, width)
        merged = self.model(inputs)
        self.now.unmerge()
        torch.testing.assert_close(self.model(inputs), merged, rtol=CLOSE, atol=CLOSE)
        self.now.detach()
        self.other.detach()
        exact = "writes_base" in value.traits
        plain = dict(model_of(layers, width).named_parameters())
        for name, found in self.model.named_parameters():
            torch.testing.assert_close(found, plain[name], rtol=0, atol=0 if exact else CLOSE)


class OfPeft:
    """The same change by peft, of two adapters that files of ours hold."""

    def __init__(self, value: Adapter, layers: int, width: int) -> None:
        self.names = ["one", "two"]
        self.base = model_of(layers, width)
        with tempfile.TemporaryDirectory() as temporary:
            for seed, name in enumerate(self.names, 1):
                folder = Path(temporary) / name
                model = model_of(layers, width)
                stir(value.attach(model, seed=seed)).save(folder, form="peft")
                if seed == 1:
                    made = peft.PeftModel.from_pretrained(self.base, folder, adapter_name=name)
                    self.model: Any = made.eval()
                else:
                    self.model.load_adapter(folder, adapter_name=name)
        self.model.merge_adapter(self.names[:1])

    def __call__(self) -> float:
        """Seconds of one change."""
        begun = time.perf_counter()
        self.model.unmerge_adapter()
        self.model.merge_adapter(self.names[1:])
        taken = time.perf_counter() - begun
        self.names.reverse()
        return taken

    def left(self, layers: int, width: int) -> float:
        """The largest difference of the base's weights from what they were, without adapters."""
        self.model.unmerge_adapter()
        plain = model_of(layers, width)
        own = {n.replace(".base_layer", ""): p for n, p in self.base.named_parameters()}
        return max(float((own[n] - p).abs().max()) for n, p in plain.named_parameters())


def _nothing() -> None:
    """What takes an adapter out that the next one is written over."""


class Least:
    """The same change by the least operations that the method's form needs, in plain PyTorch."""

    def __init__(self, switch: Switch) -> None:
        self.weights = {
            n: torch.zeros_like(layer.layer.get_parameter("weight"))
            for n, layer in switch.now.layers()
        }
        self.sides = [self._side(switch.now), self._side(switch.other)]

    def _side(self, adapter: AttachedAdapter) -> list[tuple[Callable[[], Any], Callable[[], Any]]]:
        """For each layer what takes the adapter out of the weight, and what folds it in."""
        return [self._layer(self.weights[name], layer) for name, layer in adapter.layers()]

    @staticmethod
    def _layer(weight: Tensor, layer: AdapterLayer) -> tuple[Callable[[], Any], Callable[[], Any]]:
        if isinstance(layer, PatchingLayer):
            values, spot = layer.values.detach(), layer.places().spot(weight)
            if values.ndim == 2:  # a slice, the other's too: what folds it in takes that out
                part = weight[:, : values.shape[1]]
                return _nothing, partial(part.copy_, part + values)
            kept = spot.read()
            return partial(spot.write, kept), partial(spot.write, kept + values)
        factors = layer.as_lora()
        assert factors is not None
        a, b, scale = factors[0].detach(), factors[1].detach(), factors[2]
        fuse = partial(weight.addmm_, b, a)
        return partial(fuse, alpha=-scale), partial(fuse, alpha=scale)

    @torch.no_grad()
    def __call__(self) -> float:
        """Seconds of one change."""
        now, other = self.sides
        begun = time.perf_counter()
        for undo, _ in now:
            undo()
        for _, fold in other:
            fold()
        taken = time.perf_counter() - begun
        self.sides.reverse()
        return taken


def measured(layers: int, width: int, rounds: int) -> dict[str, Any]:
    """Seconds of a change by each method, and how many times faster than LoRA's least it is."""
    chosen = values(layers, width)
    switches = {name: Switch.of(value, layers, width) for name, value in chosen.items()}
    plain = {n: Least(s) for n, s in switches.items() if of(n) in LEAST}
    runs: dict[str, Callable[[], float]] = dict(switches)
    runs |= {f"{name}, least": run for name, run in plain.items()}
    theirs = {n: OfPeft(v, layers, width) for n, v in chosen.items() if of(n) in IN_PEFT}
    runs |= {f"{name}, peft": run for name, run in theirs.items()}
    seconds = interleaved(runs, rounds=rounds, warm_up=2)
    found: dict[str, Any] = {}
    for name, value in chosen.items():
        row: dict[str, Any] = {
            "trained": sum(p.numel() for p in switches[name].now.parameters()),
            "handles": spread(seconds[name]),
            "handles_lora_over": paired_ratio(seconds["lora"], seconds[name]),
        }
        if name in plain:
            row["least"] = spread(seconds[f"{name}, least"])
            row["lora_over"] = paired_ratio(seconds["lora, least"], seconds[f"{name}, least"])
        if name in theirs:
            row["peft"] = spread(seconds[f"{name}, peft"])
            row["over_peft"] = paired_ratio(seconds[name], seconds[f"{name}, peft"])
            row["peft_leaves"] = theirs[name].left(layers, width)
        if name in BARS:
            row |= {"bar": BARS[name], "holds": row["lora_over"]["median"] >= BARS[name]}
        switches[name].check(value, layers, width)
        found[name] = row
        ms = 1e3 * row["handles"]["median"]
        times = f", least {1e3 * row['least']['median']:.2f} ms" if name in plain else ""
        faster = f", LoRA's {row['lora_over']['median']:.1f} times that" if name in plain else ""
        peft_ms = f", peft's {1e3 * row['peft']['median']:.2f} ms" if name in theirs else ""
        say(f"  {name}: {ms:.2f} ms by the handles{times}{faster}{peft_ms}")
    return found


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")  # of peft, about itself
    found = {}
    with alone():
        for place, (layers, width) in PLACES.items():
            say(place)
            found[place] = measured(layers, width, asked.rounds)
    rows = [row for each in found.values() for row in each.values()]
    figures = {"places": found, "all_hold": all(row.get("holds", True) for row in rows)}
    write_result("switching", figures, {"rank": RANK, "rounds": asked.rounds, "dtype": "float32"})


if __name__ == "__main__":
    main()

"""Linear forms that are trained next to dense layers: products, steps, saved bytes, conversion.

    python benchmarks/forms.py                 # all, on one thread; some twenty minutes
    python benchmarks/forms.py --quick         # tiny, a minute; nothing is written

Products are forward, of square layers at several widths; from the break-even width on a form takes
less time than a dense layer, at all wider ones too. A step is forward, backward and AdamW of one
decoder block whose seven projections have the form, next to its ratio of matrix-product work.
Saved bytes are those of one layer, next to what its equations read in the backward pass. Converted
are the weights of a decoder of a billion numbers, and of it the largest layer alone: what is there
in addition to the model must not be more. Forms of a full SVD convert one block of that decoder.

All contenders of a figure take turns in one run; ratios are of the same round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from common import alone, interleaved, paired_ratio, say, spread, write_result
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from modicum.core.layers.form_plan import FormPlan, LayerForm
from modicum.core.layers.linear_forms import make_linear
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.machine.memory import TensorMeter, tensor_bytes
from modicum.core.random import normal_
from modicum.linears import LOST, SST, LinearMethod, LowRank, Maestro, Monarch
from modicum.models import ModelConfig
from modicum.models.llama import Llama, create
from modicum.models.rope import describe
from modicum.optim import AdamW
from modicum.proofs.bench.meters import saved_bytes

FORMS: dict[str, LinearMethod] = {
    "low_rank": LowRank(),
    "monarch": Monarch(blocks=4),
    "monarch, 16 blocks": Monarch(blocks=16),
    "lost": LOST(),
    "maestro": Maestro(),
    "sst": SST(rank=64),
}
PARTS = ("products", "steps", "saved", "conversion")
HEAD_WIDTH = 64
FASTER, OVER_WORK, OVER_NEEDED, OVER_ONE_LAYER = 3.0, 1.25, 1.05, 1.0


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Args:
        widths: of the square layers; the last is that of the bar.
        rows: of their inputs.
        width, sequences, tokens: of the block whose steps are timed, and of its input.
        saved: inputs and outputs of the layers whose saved bytes are counted.
        converted: the decoder whose weights are converted.
    """

    widths: tuple[int, ...]
    rows: int
    width: int
    sequences: int
    tokens: int
    saved: tuple[tuple[int, int], ...]
    converted: ModelConfig


FULL = Sizes(
    (64, 128, 256, 512, 1024, 2048), 256, 1024, 4, 256,
    ((1024, 1024), (1024, 2752), (2752, 1024), (1000, 1500)),
    ModelConfig(vocabulary_size=32000, width=2048, layers=18, heads=16),
)  # fmt: skip
QUICK = Sizes(
    (64, 256), 64, 128, 2, 32, ((256, 256), (250, 700)),
    ModelConfig(vocabulary_size=300, width=128, layers=3, heads=2),
)  # fmt: skip


# Products


def products(sizes: Sizes, rounds: int) -> dict[str, Any]:
    """By form and width how many times as fast as dense its product is, and where both are even."""
    found: dict[str, dict[str, Any]] = {name: {} for name in FORMS}
    for width in sizes.widths:
        x = normal_(torch.empty(sizes.rows, width), seed=0, name="x")
        runs = {"dense": product(LayerForm(), x)}
        for name, method in FORMS.items():
            if (asked := method.arguments(width, width)) is not None:
                runs[name] = product(LayerForm(method.info.name, dict(asked)), x)
        seconds = interleaved(runs, rounds=rounds, warm_up=2)
        for name in runs:
            if name != "dense":
                faster = paired_ratio(seconds["dense"], seconds[name])
                found[name][str(width)] = {"seconds": spread(seconds[name]), "faster": faster}
        told = {name: f"{found[name][str(width)]['faster']['median']:.2f}" for name in runs
                if name != "dense"}  # fmt: skip
        say(f"products {width} wide, times as fast as dense: {told}")
    return {name: {"widths": each, "break_even": break_even(each)} for name, each in found.items()}


def product(form: LayerForm, x: Tensor) -> Callable[[], float]:
    """A square layer's forward pass, some times, as the seconds of one."""
    width = x.shape[1]
    layer = make_linear(form, width, width, False)
    for name, parameter in layer.named_parameters():
        normal_(parameter.detach(), seed=0, name=name)
    repeats = max(1, 1024 // width)

    @torch.no_grad()
    def run() -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            layer(x)
        return (time.perf_counter() - started) / repeats

    return run


def break_even(each: Mapping[str, Mapping[str, Any]]) -> int | None:
    """The least width from which on all are faster than dense; None: the widest is not.

    >>> break_even({"8": {"faster": {"median": 2}}, "16": {"faster": {"median": 0.9}},
    ...     "32": {"faster": {"median": 1.1}}})
    32
    """
    found = None
    for width in sorted(map(int, each), reverse=True):
        if each[str(width)]["faster"]["median"] <= 1:
            break
        found = width
    return found


# Steps


class OneBlock(nn.Module):
    """A decoder block, some of its projections in a form, as a map of hidden states."""

    def __init__(self, sizes: Sizes, method: LinearMethod | None) -> None:
        super().__init__()
        width = sizes.width
        config = ModelConfig(
            vocabulary_size=16, width=width, layers=1, heads=width // HEAD_WIDTH,
            context=sizes.tokens, forms=planned(method, width),
        )  # fmt: skip
        self.block = create(config, seed=0).model.layers[0]
        ids = torch.zeros(sizes.sequences, sizes.tokens, dtype=torch.int64)
        self.sequence = describe(config, ids, None, 0, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for x."""
        return self.block(x, None, self.sequence)[0]


def planned(method: LinearMethod | None, width: int) -> FormPlan:
    """The forms of a decoder of one block."""
    if method is None:
        return FormPlan()
    config = ModelConfig(vocabulary_size=16, width=width, layers=1, heads=width // HEAD_WIDTH)
    with on_meta():
        return method.plan(Llama(config))


def steps(sizes: Sizes, rounds: int) -> dict[str, Any]:
    """By form the seconds of a step over those of a dense one, next to the ratio of their work."""
    shape = (sizes.sequences, sizes.tokens, sizes.width)
    x, gradient = (normal_(torch.empty(shape), seed=0, name=name) for name in ("x", "gradient"))
    blocks = {"dense": OneBlock(sizes, None)}
    blocks |= {name: OneBlock(sizes, method) for name, method in FORMS.items()}
    work = {name: flops(block, x, gradient) for name, block in blocks.items()}
    runs = {name: step(block, x, gradient, FORMS.get(name)) for name, block in blocks.items()}
    say("blocks are ready")
    seconds = interleaved(runs, rounds=rounds, warm_up=2)
    found = {}
    for name in FORMS:
        over, ratio = paired_ratio(seconds[name], seconds["dense"]), work[name] / work["dense"]
        found[name] = {
            "seconds": spread(seconds[name]),
            "over_dense": over,
            "work_over_dense": ratio,
            "over_work": over["median"] / ratio,
        }
        say(f"{name}: a step {over['median']:.2f} of a dense one, its work {ratio:.2f}")
    return found


def step(
    block: OneBlock, x: Tensor, gradient: Tensor, method: LinearMethod | None
) -> Callable[[], float]:
    """A training step, which gives its seconds; with what Maestro does in each update."""
    inputs = x.clone().requires_grad_()
    optimizer = AdamW(block.parameters(), lr=1e-4)
    ordered = method.steps(block) if isinstance(method, Maestro) else None

    def run() -> float:
        started = time.perf_counter()
        block(inputs).backward(gradient)
        if ordered is not None:
            ordered.after_backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ordered is not None:
            ordered.update()
        inputs.grad = None
        return time.perf_counter() - started

    return run


def flops(block: OneBlock, x: Tensor, gradient: Tensor) -> int:
    """Operations of the matrix products of a forward and a backward pass."""
    inputs = x.clone().requires_grad_()
    addmm_ = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1]}
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False, custom_mapping=addmm_) as counter,
    ):
        block(inputs).backward(gradient)
    block.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())


# Saved bytes


def saved(sizes: Sizes) -> dict[str, Any]:
    """By form, shape and precision the bytes that autograd saves over what the equations read."""
    found: dict[str, Any] = {}
    for name, method in FORMS.items():
        found[name] = {}
        for ins, outs in sizes.saved:
            asked = dict(method.arguments(ins, outs) or {})
            for dtype in (torch.float32, torch.bfloat16):
                form = LayerForm(method.info.name, asked)
                layer = make_linear(form, ins, outs, True, dtype=dtype)
                x = torch.zeros(sizes.rows, ins, dtype=dtype, requires_grad=True)
                with torch.no_grad():
                    for parameter in layer.parameters():
                        parameter.zero_()
                with saved_bytes([*layer.parameters(), *layer.buffers()]) as kept:
                    out = layer(x)
                numbers = read_backward(method.info.name, ins, outs, layer)
                needs = sizes.rows * numbers * dtype.itemsize
                row = {"saved": kept.total, "needed": needs, "over_needed": kept.total / needs}
                found[name][f"{ins} to {outs}, {str(dtype).removeprefix('torch.')}"] = row
                del out
        worst = max(row["over_needed"] for row in found[name].values())
        say(f"{name}: saves {worst:.3f} of what its equations read, at the most")
    return found


def read_backward(form: str, ins: int, outs: int, layer: Any) -> int:
    """Numbers of a row that the gradients of a form are made of, by its equations."""
    match form:
        case "low_rank" | "maestro":  # dA reads x, dB reads A x
            return ins + layer.rank
        case "monarch":  # the first factor's gradient reads x, the second's the sums between
            return ins + layer.blocks**2 * layer.rank
        case "lost":  # dA reads x, SiLU's slope A x, d[B S] the product's other operand
            return ins + layer.rank + layer.mixed.shape[1]
        case "sst":  # vectors read x, sigma and the other vectors V^T x of all
            return ins + min(ins, outs)
    raise ValueError(f"what {form} needs is not known here")


# Conversion


def conversion(sizes: Sizes) -> dict[str, Any]:
    """By form the bytes in addition to the model while its weights are converted."""
    found = {}
    for name, method in FORMS.items():
        config = sizes.converted
        if method.info.name != "monarch":  # a full SVD of each weight, which takes minutes
            config = ModelConfig(
                vocabulary_size=config.vocabulary_size, width=config.width, layers=1,
                heads=config.heads,
            )  # fmt: skip
        with on_meta():
            model: nn.Module = Llama(config).to(torch.bfloat16)
        started = time.perf_counter()
        in_model = converted(model, method)
        seconds = time.perf_counter() - started
        of_one = converted(largest(config), method)
        found[name] = {
            "parameters": config.parameter_count(),
            "model": in_model,
            "largest_layer": of_one,
            "over_one_layer": in_model["in_addition"] / of_one["in_addition"],
            "seconds": seconds,
        }
        say(
            f"{name}: {config.parameter_count() / 1e6:.0f} M numbers converted with "
            f"{in_model['in_addition'] / 1e6:.0f} MB more, the largest layer alone with "
            f"{of_one['in_addition'] / 1e6:.0f} MB, {seconds:.0f} s"
        )
    return found


def largest(config: ModelConfig) -> nn.Module:
    """The MLP's first projection alone, on meta."""
    with on_meta():
        layer = nn.Linear(config.width, config.mlp_width, bias=False, dtype=torch.bfloat16)
        return nn.Sequential(layer)


def converted(model: nn.Module, method: LinearMethod) -> dict[str, int]:
    """Give a model that is on meta memory and convert it: its bytes, and those in addition."""
    meter = TensorMeter("cpu")
    meter.start()
    materialise(model, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    before = tensor_bytes(held(model))
    method.convert(model)
    after = tensor_bytes(held(model))
    return {"before": before, "after": after, "in_addition": meter.stop() - max(before, after)}


def held(model: nn.Module) -> list[Tensor]:
    """All that a model holds."""
    return [*model.parameters(), *model.buffers()]


# All together


def bars(figures: Mapping[str, Any], sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Each bar with its figure, and whether it holds."""
    if "products" in figures:
        widest = figures["products"]["monarch, 16 blocks"]["widths"][str(sizes.widths[-1])]
        faster = widest["faster"]["median"]
        what = f"monarch, 16 blocks: product {sizes.widths[-1]} wide, times as fast as dense"
        yield {"what": what, "figure": faster, "at_least": FASTER, "holds": faster >= FASTER}
    asked = [
        ("steps", "over_work", "step over work", OVER_WORK),
        ("conversion", "over_one_layer", "memory of a conversion over one layer's", OVER_ONE_LAYER),
    ]
    rows = [
        (f"{name}: {said}", row[key], most)
        for part, key, said, most in asked
        for name, row in figures.get(part, {}).items()
    ]
    for name, cases in figures.get("saved", {}).items():
        for case, row in cases.items():
            rows.append((f"{name}: saved over needed, {case}", row["over_needed"], OVER_NEEDED))
    for what, figure, most in rows:
        yield {"what": what, "figure": figure, "at_most": most, "holds": figure <= most}


def main() -> None:
    """Measure what is asked for, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; keeps no result")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    sizes, figures = (QUICK if arguments.quick else FULL), dict[str, Any]()
    torch.set_num_threads(1)
    with alone():
        if "products" in arguments.parts:
            figures["products"] = products(sizes, arguments.rounds)
        if "steps" in arguments.parts:
            figures["steps"] = steps(sizes, arguments.rounds)
        if "saved" in arguments.parts:
            figures["saved"] = saved(sizes)
        if "conversion" in arguments.parts:
            figures["conversion"] = conversion(sizes)
    figures["bars"] = list(bars(figures, sizes))
    for row in figures["bars"]:
        if not row["holds"]:
            say(f"does not hold: {row}")
    if not arguments.quick and set(arguments.parts) == set(PARTS):
        settings = {"rounds": arguments.rounds, "rows": sizes.rows, "width": sizes.width}
        write_result("forms", figures, settings | {"threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()

"""A LoRA step against a step through the same frozen layers that makes input gradients only.

The layers are one Llama block, all seven linears adapted; next to it, one square linear alone,
where nothing hides what the adapter costs. All contenders hold the same base weights and take the
same input, whose gradient each of them computes, as every block but the first must. A LoRA step
is forward, backward and AdamW; a frozen step is forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable

import torch
from common import alone, interleaved, paired_ratio, say, spread, write_result
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from modicum.adapters import LoRA
from modicum.models.config import ModelConfig
from modicum.models.llama import create
from modicum.models.rope import describe

HEAD_WIDTH = 64
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class OneBlock(nn.Module):
    """A decoder block as a map of hidden states [rows, length, width]."""

    def __init__(self, width: int, rows: int, length: int) -> None:
        super().__init__()
        config = ModelConfig(
            vocabulary_size=16, width=width, layers=1, heads=width // HEAD_WIDTH, context=length
        )
        self.block = create(config, seed=0).model.layers[0]
        ids = torch.zeros(rows, length, dtype=torch.int64)
        self.sequence = describe(config, ids, None, 0, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for x."""
        return self.block(x, None, self.sequence)[0]


class OneLinear(nn.Module):
    """A square linear layer under the name of one of a block's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for x."""
        return self.q_proj(x)


def frozen(base: nn.Module) -> nn.Module:
    """A copy whose weights take no gradient."""
    return copy.deepcopy(base).requires_grad_(False)


def with_modicum(base: nn.Module, rank: int) -> nn.Module:
    """A copy with modicum's LoRA on every linear."""
    model = copy.deepcopy(base)
    LoRA(rank=rank).attach(model)
    return model


def with_peft(base: nn.Module, rank: int) -> nn.Module:
    """A copy with peft's LoRA on every linear, alpha = rank as modicum's default is."""
    present = {name.rsplit(".", 1)[-1] for name, _ in base.named_modules()}
    targets = [name for name in LINEARS if name in present]
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
    model = frozen(base)
    return inject_adapter_in_model(config, model)


def step(model: nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], float]:
    """A training step on `model`, which gives its seconds."""
    inputs = x.clone().requires_grad_()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True) if trained else None

    def run() -> float:
        start = time.perf_counter()
        model(inputs).backward(gradient)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        inputs.grad = None
        return time.perf_counter() - start

    return run


def measure(
    base: nn.Module, width: int, arguments: argparse.Namespace, rounds: int
) -> dict[str, object]:
    """Seconds of all three steps, and the ratios to the frozen one."""
    generator = torch.Generator().manual_seed(width)
    shape = (arguments.rows, arguments.length, width)
    x, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
    contenders = {
        "frozen": step(frozen(base), x, gradient),
        "modicum": step(with_modicum(base, arguments.rank), x, gradient),
        "peft": step(with_peft(base, arguments.rank), x, gradient),
    }
    seconds = interleaved(contenders, rounds=rounds, warm_up=3)
    return {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "ratio": {
            name: paired_ratio(seconds[name], seconds["frozen"]) for name in ("modicum", "peft")
        },
    }


def main() -> None:
    """Measure every width, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=12.0, help="about so long a measurement")
    arguments = parser.parse_args()
    # Modules given to peft one by one have no model configuration, which it remarks upon.
    warnings.filterwarnings("ignore", module="peft")
    figures: dict[str, dict[str, object]] = {"block": {}, "linear": {}}
    with alone():
        torch.manual_seed(0)
        for width in arguments.widths:
            bases = {
                "block": OneBlock(width, arguments.rows, arguments.length),
                "linear": OneLinear(width),
            }
            for kind, base in bases.items():
                probe = step(
                    frozen(base), *(torch.ones(arguments.rows, arguments.length, width),) * 2
                )
                each = min(probe() for _ in range(5))
                rounds = min(200, max(10, round(arguments.seconds / (3.3 * each))))
                figure = measure(base, width, arguments, rounds)
                figures[kind][str(width)] = figure
                told = {k: f"{v['median']:.3f}" for k, v in figure["ratio"].items()}  # type: ignore[attr-defined]
                say(f"{kind} of width {width}: x frozen {told}, {rounds} rounds")
        write_result("lora_step", figures, vars(arguments) | {"dtype": "float32"})


if __name__ == "__main__":
    main()

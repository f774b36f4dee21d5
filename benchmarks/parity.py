"""Adapters that PEFT has too, on the same weights: logits, gradients, losses, files both ways.

Each case is attached here and in PEFT to copies of one small transformers Llama in fp32, with the
same factors, moved from their start. Gradients are compared relative to the largest of a tensor,
losses over 20 updates by AdamW. RandLoRA's bases are those of PEFT's file, as it draws them in half
precision, and so are SHiRA's indices. LoRA-FA's gradients are compared with what PEFT's optimizer
makes of LoRA's, with the product in fp64, and its losses with none, as another rule trains there.

Then every adapter of the catalog is attached twice (one that rewrites the base next to LoRA), and a
batch whose rows use the first, the second or none is compared with each of them alone, in fp32.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from common import say, write_result
from torch import Tensor

from modicum.adapters import AttachedAdapter, LoRA, PiSSA, load
from modicum.adapters.batch_rows import adapter_names
from modicum.adapters.randlora import GAMMA, LAMBDA
from modicum.core.contracts.catalog import catalog
from modicum.core.errors import InputError
from modicum.recipe import methods_for

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
}
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
RANK, ALPHA, LENGTH, ROWS = 4, 6.0, 32, 4
UPDATES, RATE = 20, 1e-3
PLAIN: dict[str, Any] = {"target_modules": TARGETS, "r": RANK}


@dataclass(frozen=True)
class Case:
    """One adapter in both.

    Args:
        config: PEFT's; None: it begins here, as the base's weights are changed with it.
        method: as which method a file of PEFT's is loaded; None: as what it is.
        expected: what a gradient here should be, of PEFT's and of the layer of factors there.
    """

    config: Any = None
    method: str | None = None
    expected: Callable[[Tensor, Any], Tensor] = lambda gradient, twin: gradient


def cases() -> dict[str, Case]:
    """Every adapter that both have."""
    lora: dict[str, Any] = {"lora_alpha": ALPHA, **PLAIN}
    mixed: dict[str, Any] = {
        "rank_pattern": {"q_proj": 2, r"1\.mlp\.up_proj": 7},
        "alpha_pattern": {"v_proj": 3},
    }
    return {
        "lora": Case(peft.LoraConfig(**lora)),
        "lora, ranks and alphas by layer": Case(peft.LoraConfig(**lora, **mixed)),
        "lora, modules_to_save": Case(peft.LoraConfig(**lora, modules_to_save=["lm_head"])),
        # It trains a bias more here, so losses are not compared.
        "lora, lora_bias": Case(peft.LoraConfig(**lora, lora_bias=True), "hydra"),
        "rslora": Case(peft.LoraConfig(**lora, use_rslora=True)),
        "dora": Case(peft.LoraConfig(**lora, use_dora=True)),
        "dora, rank-stabilized": Case(peft.LoraConfig(**lora, use_dora=True, use_rslora=True)),
        "pissa": Case(),
        "lora_fa": Case(peft.LoraConfig(**lora), "lora_fa", _corrected),
        "randlora": Case(peft.RandLoraConfig(**PLAIN, randlora_alpha=20 * RANK)),
        "shira": Case(peft.ShiraConfig(**PLAIN, random_seed=0)),
    }


def _corrected(gradient: Tensor, twin: Any) -> Tensor:
    """What PEFT's LoRA-FA optimizer makes of B's gradient, with its product in fp64."""
    a = twin.lora_A["default"].weight.double()
    gram = a @ a.T + 1e-8 * torch.eye(len(a), dtype=a.dtype)
    solved: Tensor = gradient.double() @ torch.linalg.inv(gram) / twin.scaling["default"] ** 2
    return solved.float()


def llama(seed: int) -> Any:
    """The model, the same for the same seed."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(num_hidden_layers=2, **SIZES)
    return transformers.LlamaForCausalLM(config).eval()


def twins(case: Case, folder: Path, seed: int) -> tuple[Any, AttachedAdapter, Any]:
    """A model with the adapter, its handle, and PEFT's model of the same."""
    ours, base = llama(seed), llama(seed)
    if case.config is not None:
        theirs = peft.get_peft_model(base, case.config).eval()
        _move((p for p in theirs.parameters() if p.requires_grad), seed)
        theirs.save_pretrained(folder / "theirs")
        return ours, load(ours, folder / "theirs", train=True, method=case.method), theirs
    adapter = PiSSA(rank=RANK, alpha=ALPHA, targets=tuple(TARGETS)).attach(ours, seed=seed)
    _move(adapter.parameters(), seed)
    adapter.save(folder / "theirs", form="peft-rest")
    with torch.no_grad():
        for name, _ in adapter.layers():
            base.get_submodule(name).weight.copy_(ours.get_submodule(name).weight)
    theirs = peft.PeftModel.from_pretrained(base, folder / "theirs", is_trainable=True)
    return ours, adapter, theirs.eval()


def distances(case: Case, folder: Path, seed: int) -> dict[str, Any]:
    """Largest differences of logits, of gradients, and of logits of what was saved here."""
    ids = torch.randint(SIZES["vocab_size"], (ROWS, LENGTH), generator=_draws(seed))
    ours, adapter, theirs = twins(case, folder, seed)
    logits = [model(ids).logits for model in (ours, theirs)]
    with torch.no_grad():
        does = _apart(logits[0], llama(seed)(ids).logits)
    for each in logits:
        each.square().mean().backward()
    gradients = [
        _apart(own, case.expected(other, twin)) / float(other.abs().max())
        for own, other, twin in _gradients(adapter, theirs)
    ]
    adapter.save(folder / "ours", form="peft")
    again = peft.PeftModel.from_pretrained(llama(seed), folder / "ours").eval()
    with torch.no_grad():
        written = _apart(again(ids).logits, logits[1])
    found = {
        "read_as": adapter.method.info.name,
        "logits": _apart(*logits),
        "gradients": max(gradients),
        "compared_gradients": len(gradients),
        "written": written,
        "adapter_does": does,
    }
    if case.method is None:
        one, other = (_losses(model, ids) for model in (ours, theirs))
        found["losses"] = max(abs(a - b) for a, b in zip(one, other, strict=True))
        found["losses_fall_by"] = one[0] - one[-1]
    return found


def _losses(model: Any, ids: Tensor) -> list[float]:
    """Those of the updates of what is trained of a model, on one batch."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=RATE)
    losses = []
    for _ in range(UPDATES):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _gradients(adapter: AttachedAdapter, theirs: Any) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """Gradients of what is trained, here and in PEFT, and the layer there."""
    for name, parameter in adapter.named_parameters():
        site, _, key = name.rpartition(".")
        if key == "c_p":  # in PEFT only B has a bias
            continue
        twin = theirs.get_submodule(f"base_model.model.{site}")
        match key:
            case "A" | "B" | "A_p" | "B_p":
                other = getattr(twin, f"lora_{key[0]}")["default"].weight.grad
            case "d_p":
                other = twin.lora_B["default"].bias.grad
            case "magnitude":
                other = twin.lora_magnitude_vector["default"].weight.grad
            case "values":
                other = twin.shira_weight["default"].grad
            case "copy_weight":
                other = twin.modules_to_save["default"].weight.grad
            case _:
                there = {LAMBDA: "randlora_lambda", GAMMA: "randlora_gamma"}
                other = getattr(twin, there[key])["default"].grad
                other = other.T if key == LAMBDA else other
        assert parameter.grad is not None
        yield parameter.grad, other, twin


def mixed_rows(seed: int) -> dict[str, Any]:
    """By method the largest difference of a logit; where it refuses such batches, the reason."""
    found: dict[str, Any] = {}
    for name in sorted(methods_for("adapter")):
        try:
            found[name] = _mixed(name, seed)
        except InputError as error:
            found[name] = error.problem
    return found


def _mixed(name: str, seed: int) -> float:
    model, record = llama(seed), catalog()[name]
    value = record.load()(**record.info.tiny)
    ids = torch.randint(SIZES["vocab_size"], (5, LENGTH), generator=_draws(seed))
    second: Any = LoRA(rank=2) if "rewrites_base" in record.info.traits else value
    adapters = {}
    for number, (label, each) in enumerate((("first", value), ("second", second))):
        adapter = each.attach(
            model, seed=number, name=label, batches=list(ids.split(1)), loss=_loss_sum
        )
        _move(adapter.parameters(), number)
        adapter.deactivate()
        adapters[label] = adapter
    rows = ("first", None, "second", "first", None)
    with torch.no_grad():
        alone: dict[str | None, Tensor] = {None: model(ids).logits}
        for label, adapter in adapters.items():
            adapter.activate()
            alone[label] = model(ids).logits
            adapter.deactivate()
        with adapter_names(model, rows):
            mixed = model(ids).logits
    assert _apart(alone["first"], alone[None]) > 1e-4, f"{name} changes nothing"
    return max(_apart(mixed[row], alone[label][row]) for row, label in enumerate(rows))


def _loss_sum(model: Any, ids: Tensor) -> Tensor:
    return model(ids, labels=ids).loss * ids.numel()


def _draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _move(parameters: Iterable[Tensor], seed: int) -> None:
    """As after training: where factors start as zeros, any adapter is equal to any other."""
    generator = _draws(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.detach() - other.detach()).abs().max())


def main() -> None:
    """Compare every case, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    warnings.filterwarnings("ignore")  # of PEFT and transformers, about themselves
    transformers.logging.disable_progress_bar()
    by_case = {}
    for name, case in cases().items():
        with tempfile.TemporaryDirectory() as folder:
            by_case[name] = distances(case, Path(folder), seed)
        say(f"{name}: {by_case[name]}")
    rows = mixed_rows(seed)
    say(f"rows of a batch: {rows}")
    worst = {
        key: max(figures[key] for figures in by_case.values() if key in figures)
        for key in ("logits", "gradients", "written", "losses")
    }
    worst["mixed_rows"] = max(each for each in rows.values() if isinstance(each, float))
    settings = {
        "sizes": SIZES,
        "targets": TARGETS,
        "rank": RANK,
        "alpha": ALPHA,
        "seed": seed,
        "updates": UPDATES,
        "learning_rate": RATE,
    }
    found = {"largest_difference": worst, "by_case": by_case, "mixed_rows": rows}
    write_result("parity", found, settings)


if __name__ == "__main__":
    main()

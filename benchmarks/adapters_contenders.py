"""The contenders of `adapters.py`: one transformers Llama with each adapter, ours and peft's."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers
from peft.optimizers import create_lorafa_optimizer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.base import Adapter, AdapterQuery
from modicum.core.contracts.catalog import catalog
from modicum.core.contracts.ledger import ModelQuery
from modicum.proofs.bench.meters import saved_bytes
from modicum.recipe import methods_for

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RATE = 1e-4
# What is not the method's default. Ranks are LoRA's where they mean the same; Block-LoRA's dropout
# is 0.25 by default.
FIELDS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 16},
    "rslora": {"rank": 16, "alpha": 16.0, "rank_stabilized": True},
    "pissa": {"rank": 16},
    "dora": {"rank": 16},
    "lora_fa": {"rank": 16},
    "q_bara": {"rank": 16},
    "block_lora": {"rank": 16},
    "hydra": {"rank": 8, "sequential_rank": 8},
    "mos": {"rank": 4},
    "mosa": {"passes": 1},  # with two, a batch has twice the rows
    "shira": {"rank": 16},
    "loram": {"rank": 16},
    "diffora": {"rank": 16, "search_steps": 4},  # whichever layers share a pair, bytes are the same
}
VARIANTS = {"rslora": "lora"}  # names that are another method with other fields
OWN_PLACES = ("s2ft",)  # like those after a block, they are not on linears of any name


@dataclass(frozen=True)
class Sizes:
    """The model and the batch."""

    width: int
    mlp_width: int
    layers: int
    heads: int
    vocabulary: int
    rows: int
    tokens: int

    @property
    def query(self) -> ModelQuery:
        """What a ledger is asked at."""
        return ModelQuery(self.rows, self.tokens)


def methods() -> list[str]:
    """All adapters of the catalog, and the variants; LoRA first, to which others are compared."""
    known = methods_for("adapter")
    return sorted({*known, *VARIANTS}, key=lambda name: (name != "lora", name))


def value_of(name: str, dropout: float = 0.0) -> Adapter:
    """The method's value."""
    record = catalog()[VARIANTS.get(name, name)]
    fields = FIELDS.get(name, {}) | {"dropout": dropout}
    if name not in OWN_PLACES and "after_block" not in record.info.traits:
        fields["targets"] = LINEARS
    value = record.load()(**fields)
    assert isinstance(value, Adapter)
    return value


def llama(sizes: Sizes, seed: int, layers: int | None = None) -> Any:
    """The frozen model. Its embeddings' output takes a gradient, so all blocks work alike."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp_width,
        num_hidden_layers=layers or sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=sizes.tokens,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).requires_grad_(False).train()


def twin(base: Any, *, rewritten: bool = False) -> Any:
    """A copy that shares the frozen weights, unless they will be rewritten."""
    memo = {} if rewritten else {id(each): each for each in base.parameters()}
    return copy.deepcopy(base, memo)


def flowing(model: Any) -> Any:
    """The model, whose embeddings' output takes a gradient."""
    model.get_input_embeddings().register_forward_hook(_flows)
    return model


def _flows(module: nn.Module, inputs: Any, output: Tensor) -> None:
    if not output.requires_grad:
        output.requires_grad_()


def with_ours(
    base: Any, name: str, ids: Tensor, *, seed: int, dropout: float = 0.0
) -> tuple[Any, AttachedAdapter]:
    """A copy with our adapter, and the handle."""
    value = value_of(name, dropout)
    model = twin(base, rewritten="rewrites_base" in value.traits)
    data: dict[str, Any] = {}
    if "prepares_from_data" in value.traits:
        # Two batches, as some search on disjoint parts of the data.
        data = {"batches": ids.chunk(2), "loss": _summed}
    attached = value.attach(model, seed=seed, **data)
    return flowing(model.train()), attached


def _summed(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss * ids.numel()
    return loss


def with_theirs(
    base: Any, name: str, *, dropout: float = 0.0, trained: int = 0
) -> tuple[Any, torch.optim.Optimizer] | None:
    """A copy with peft's adapter of that name, and its optimizer; None: it has none.

    Args:
        trained: our numbers, for a rival that is another method: HiRA gets the nearest rank.
    """
    config = _config(base, name, dropout, trained)
    if config is None:
        return None
    model = peft.get_peft_model(twin(base, rewritten=name == "pissa"), config).train()
    if name == "lora_fa":
        optimizer = create_lorafa_optimizer(model, r=16, lora_alpha=16, lr=RATE)
    else:
        optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    flowing(model.get_base_model())
    return model, optimizer


def _config(base: Any, name: str, dropout: float, trained: int) -> Any:
    lora: dict[str, Any] = {
        "r": 16,
        "lora_alpha": 16,
        "lora_dropout": dropout,
        "target_modules": LINEARS,
    }
    match name:
        case "lora" | "lora_fa":
            return peft.LoraConfig(**lora)
        case "rslora":
            return peft.LoraConfig(**lora, use_rslora=True)
        case "pissa":
            return peft.LoraConfig(**lora | {"init_lora_weights": "pissa_niter_4"})
        case "dora":
            return peft.LoraConfig(**lora, use_dora=True)
        case "randlora":
            rank = value_of(name).model_dump()["rank"]
            return peft.RandLoraConfig(r=rank, randlora_dropout=dropout, target_modules=LINEARS)
        case "shira":
            rank = value_of(name).model_dump()["rank"]
            return peft.ShiraConfig(r=rank, target_modules=LINEARS)
        case "qa_hira":
            linears = [m for n, m in base.named_modules() if n.rsplit(".", 1)[-1] in LINEARS]
            a_rank = sum(layer.in_features + layer.out_features for layer in linears)
            rank = max(1, round(trained / a_rank))
            return peft.HiraConfig(r=rank, hira_dropout=dropout, target_modules=LINEARS)
    return None


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every contender but peft's LoRA-FA, which brings its own."""
    return torch.optim.AdamW(list(parameters), lr=RATE, fused=True)


def stepper(
    model: Any, ids: Tensor, optimizer: torch.optim.Optimizer | None
) -> Callable[[], float]:
    """A training step on `model`, which gives its seconds."""

    def run() -> float:
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    return run


def adapter_flops(attached: AttachedAdapter, sizes: Sizes) -> int:
    """Matrix-product work of a step beyond the frozen model's, by the adapter's ledger."""
    method, sites = attached.method, list(attached.sites.values())
    each = sum(method.ledger(AdapterQuery(site, sizes.query)).flops() for site in sites)
    return each + method.shared_ledger(sites).flops()


def frozen_flops(base: Any, ids: Tensor) -> int:
    """Matrix-product work of the frozen step, as PyTorch counts it."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        flowing(twin(base))(input_ids=ids, labels=ids).loss.backward()
    return int(counter.get_total_flops())


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Autocast to bf16, as runs in bf16 have it; nothing in fp32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        yield


def saved_by(model: Any, ids: Tensor, dtype: torch.dtype) -> int:
    """Bytes that autograd saves in a forward pass, by unique storage, parameters apart."""
    apart = [*model.parameters(), *model.buffers()]
    with precision(dtype), saved_bytes(apart) as saved:
        model(input_ids=ids, labels=ids)
    return saved.total

"""Is a ledger without an author true? Ten architectures of transformers, traced and measured.

Each is traced on the meta device and then really trained for an update, with AdamW, in a process of
its own: the meter's peak of tensor bytes against the forecast. Then the seconds that the ledger of
a 7 B and a 70 B configuration takes, the first time, by another process and from the cache.

    python benchmarks/traced_ledger.py                # all; some minutes
    python benchmarks/traced_ledger.py llama vit      # some of them, nothing is written
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from common import alone, say, write_result

SIZES: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
PLAIN = SIZES | {"intermediate_size": 1024}
TOKENS = 256
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("LlamaForCausalLM", GROUPED, 12),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 128}, 12),
    "qwen2": ("Qwen2ForCausalLM", GROUPED, 12),
    "gemma2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 64, "sliding_window": 128}, 8),
    "phi3": ("Phi3ForCausalLM", GROUPED | {"pad_token_id": 0}, 12),
    "mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}, 8),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 2000, "n_embd": 256, "n_layer": 6, "n_head": 4, "n_positions": 512},
        8,
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", PLAIN | {"max_position_embeddings": 512}, 12),
    "opt": (
        "OPTForCausalLM",
        {
            "vocab_size": 2000,
            "hidden_size": 256,
            "ffn_dim": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 256,
            "max_position_embeddings": 512,
        },
        12,
    ),
    "bert": ("BertForMaskedLM", PLAIN, 8),
    "vit": (
        "ViTForImageClassification",
        {name: size for name, size in PLAIN.items() if name != "vocab_size"}
        | {"image_size": 128, "patch_size": 8, "num_labels": 10},
        12,
    ),
}
LLAMA_7B: dict[str, Any] = {"vocabulary_size": 32000, "width": 4096, "layers": 32, "heads": 32}
LLAMA_70B: dict[str, Any] = {
    "vocabulary_size": 32000,
    "width": 8192,
    "layers": 80,
    "heads": 64,
    "kv_heads": 8,
    "mlp_width": 28672,
}
RANKS = 64
# What a process that traces imports before it does, with what fake tensors load.
IMPORTS = (
    "import modicum.models.traced_builds, modicum.models.traced_cache; "
    "from modicum.core.torch_private import fake_tensors\n"
    "with fake_tensors(): print('null')"
)
LARGE_BYTES = 200 * 10**6  # a forecast's error is promised from so many bytes of tensors on


def main() -> None:
    """Measure all, print the table, write the result."""
    wanted = sys.argv[1:]
    rows = []
    with alone():
        print(f"{'':12}{'predicted, MB':>16}{'came, MB':>12}{'ratio':>9}{'traced in s':>13}")
        for name in wanted or ARCHITECTURES:
            say(name)
            row = _apart("architecture", name)
            rows.append(row)
            low, high, came = row["least"] / 1e6, row["most"] / 1e6, row["measured"] / 1e6
            told = f"{high:.1f}" if row["least"] == row["most"] else f"{low:.1f} to {high:.1f}"
            print(
                f"{name:12}{told:>16}{came:12.1f}{row['ratio']:9.4f}{row['seconds']:13.2f}",
                flush=True,
            )
        if wanted:
            return
        plans = [_apart("plan", size) for size in ("7B", "70B")]
    for plan in plans:
        print(json.dumps(plan))
    error = max(abs(row["ratio"] - 1) for row in rows if row["measured"] >= LARGE_BYTES)
    print(f"largest error, from 200 MB of tensors on: {100 * error:.2f} %")
    result = {"largest_error": error, "rows": rows, "plans": plans}
    write_result("traced_ledger", result, {"tokens": TOKENS, "optimizer": "AdamW, fused"})


def _apart(kind: str, name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", kind, name]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def architecture(name: str) -> dict[str, Any]:
    """One architecture's forecast and measurement."""
    import torch
    import transformers

    from modicum.core.contracts.ledger import OptimizerQuery
    from modicum.core.contracts.parameters import trained_shapes
    from modicum.core.machine.memory import TensorMeter, bytes_by_kind
    from modicum.models.traced_ledger import traced_ledger
    from modicum.optim import AdamW

    torch.manual_seed(0)
    made, fields, rows = ARCHITECTURES[name]
    kind = getattr(transformers, made)
    config = kind.config_class(**fields)

    def batch(count: int) -> dict[str, torch.Tensor]:
        if name == "vit":
            images = torch.zeros(count, 3, config.image_size, config.image_size)
            return {"pixel_values": images, "labels": torch.zeros(count, dtype=torch.int64)}
        ids = torch.randint(0, 2000, (count, TOKENS))
        return {"input_ids": ids, "labels": ids.clone()}

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = model(**batch).loss
        return found

    with torch.device("meta"):
        model = kind(config).train()
    began = time.perf_counter()
    both = traced_ledger(model, batch, loss, rows)
    seconds = time.perf_counter() - began
    state = AdamW.value().ledger(OptimizerQuery(trained_shapes(model)))
    least, most = ((ledger + state).peak() for ledger in both)

    real = kind(config).train()
    optimizer = torch.optim.AdamW(real.parameters(), fused=True)

    def update(count: int) -> None:
        given = batch(count)
        loss(real, given).backward()
        optimizer.step()
        optimizer.zero_grad()

    update(1)
    meter = TensorMeter("cpu")
    meter.start(sum(bytes_by_kind(real, optimizer).values()))
    update(rows)
    measured = meter.stop()
    nearest = min(max(measured, least), most)
    return {
        "architecture": name,
        "rows": rows,
        "least": least,
        "most": most,
        "measured": measured,
        "ratio": nearest / measured,
        "seconds": seconds,
    }


def plan(size: str) -> dict[str, Any]:
    """Seconds until the ledgers of a large configuration are there, after imports."""
    import torch

    from modicum.core.machine.child_process import answer_of
    from modicum.core.machine.memory import TensorMeter
    from modicum.core.ranks.layout import Layout
    from modicum.models.traced_cache import StoredLedgers, TraceRequest
    from modicum.parallel.ledger import GatheredGroups, Group, sharded

    config = {"7B": LLAMA_7B, "70B": LLAMA_70B}[size] | {"context": 4096}
    arguments = {"config": config, "tokens": 4096, "half": True}
    request = TraceRequest("modicum.models.traced_builds:decoder", arguments)

    def planned(found: Any) -> int:
        """The smallest peak of a grid of choices, sharded over ranks where there are many."""
        peaks = []
        for recompute in (False, True):
            for sequences in (1, 2, 4, 8):
                ledger = found.ledger(sequences, recompute=recompute)
                if size == "70B":
                    ledger = sharded(
                        ledger,
                        groups(),
                        micro_batches=1,
                        recompute=recompute,
                        slack=found.slack(sequences, recompute=recompute),
                    )
                peaks.append(ledger.peak())
        return min(peaks)

    def groups() -> GatheredGroups:
        from modicum.models.config import ModelConfig

        known = ModelConfig(**config)
        parts: dict[str, list[tuple[int, ...]]] = {p: [] for p in ["", *known.block_prefixes()]}
        for name, shape in known.parameter_shapes().items():
            home = ".".join(name.split(".")[:3]) + "."
            parts[home if home in parts else ""].append(shape)
        root, *blocks = (Group(tuple(shapes)) for shapes in parts.values())
        return GatheredGroups(root, tuple(blocks), Layout(shards=RANKS))

    def seconds(of: Callable[[], object]) -> dict[str, float]:
        """Of the clock, and of processors, which a busy machine hardly changes."""
        began, spent = time.perf_counter(), sum(os.times()[:4])
        of()
        return {"clock": time.perf_counter() - began, "processors": sum(os.times()[:4]) - spent}

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        # What kernels take as scratch is this machine's, and measured once for all plans.
        planned(StoredLedgers(request))
        first = seconds(lambda: planned(request.here()))
        with TensorMeter("cpu") as meter:
            here = seconds(lambda: planned(request.here()))
        request.file.unlink()
        apart = seconds(lambda: planned(StoredLedgers(request)))
        imports = seconds(lambda: answer_of(IMPORTS, None, work="importing"))
        warm = seconds(lambda: planned(StoredLedgers(request)))
    return {
        "size": size,
        "ranks": RANKS if size == "70B" else 1,
        "seconds_here_first": first,  # with the modules that fake tensors load
        "seconds_here": here,
        "seconds_by_another_process": apart,
        "seconds_of_its_imports": imports,  # the least that it takes to do nothing
        "seconds_warm": warm,
        "allocated_bytes": meter.peak,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps({"architecture": architecture, "plan": plan}[sys.argv[2]](sys.argv[3])))
    else:
        main()

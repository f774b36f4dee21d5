"""Plans from a config.json alone: no weights are on this machine, and none are made.

Each plan is made by `modicum plan` in a process of its own, with an empty cache. What it says of
the number of parameters is held against the published number; its processor time and its
largest resident size are those of the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import say, write_result

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
}  # fmt: skip
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_GROUPS = "num_key_value_heads"


def _sized(*sizes: int) -> dict[str, int]:
    return dict(zip((*_SIZES, _GROUPS), sizes, strict=True))


# A config.json, and how many parameters the authors' own files have. The first two are planned by
# arithmetic, the third is transformers' own model, which is traced; with the profile of a machine.
MODELS: dict[str, tuple[dict[str, Any], int, str]] = {
    "Llama 2 7B": (_LLAMA | _sized(4096, 11008, 32, 32, 32), 6_738_415_616, "h100-80g"),
    "Llama 2 70B": (_LLAMA | _sized(8192, 28672, 80, 64, 8), 68_976_648_192, "h100-80g"),
    "Qwen 3 8B": (
        _LLAMA | _sized(4096, 12288, 36, 32, 8)
        | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936,
           "head_dim": 128},
        8_190_735_360,
        "laptop-16g",
    ),
}  # fmt: skip
_SETTINGS = (
    "adapter.method=lora", "linear.method=nf4", "data.sequence_length=512",
    "data.include=[json/**]", "training.steps=100",
)  # fmt: skip


def planned(folder: Path, raw: dict[str, Any], machine: str) -> dict[str, Any]:
    """What `modicum plan` says of a folder with this config.json, and what it took."""
    base = folder / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(raw))
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"model: {{path: {base}}}\n")
    command = [sys.executable, "-m", "modicum", "plan", str(recipe), "--json", "--machine", machine]
    command += [word for setting in _SETTINGS for word in ("--set", setting)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the plan ended with exit code {process.returncode}")
    plan = json.loads(output)
    return {
        "seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "resident_bytes": usage.ru_maxrss * 1024,
        "parameters": plan["parameters"]["total"] - plan["parameters"]["trainable"],
        "peak_bytes": plan["prediction"]["peak_bytes"],
        "ledger": plan["prediction"]["ledger"],
        "weights": plan["weights"],
    }


def main() -> None:
    """Plan each, and write what was seen."""
    found = {}
    for name, (raw, published, machine) in MODELS.items():
        with tempfile.TemporaryDirectory(prefix="modicum-config-plans-") as folder:
            row = planned(Path(folder), raw, machine)
        found[name] = {**row, "machine": machine, "published": published}
        say(f"{name}: {json.dumps(found[name])}")
    rows = found.values()
    figures = {
        "models": found,
        "largest_difference": max(abs(row["parameters"] - row["published"]) for row in rows),
        "seconds": max(row["seconds"] for row in rows),
        "resident_gigabytes": round(max(row["resident_bytes"] for row in rows) / 1e9, 2),
    }
    write_result("config_plans", figures, {"set": list(_SETTINGS)})


if __name__ == "__main__":
    main()

"""What the `adapters` library computes: `parity_adapters.py` runs this in another environment.

    PYTHON -P benchmarks/parity_adapters_worker.py FOLDER

FOLDER has `cases.json`: by name a model's class, sizes and inputs, and an adapter's configuration.
To it go the weights, inputs, outputs and gradients of each, `NUMBER.safetensors`, and
`versions.json`. Nothing of modicum is imported here, and with -P no `adapters.py` next to it.
"""

from __future__ import annotations

import importlib
import json
import sys
from copy import deepcopy
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

ADAPTER = "parity"
STD = 0.3  # of the adapter's numbers, as after training
LIBRARY: Any = importlib.import_module("adapters")  # a type checker would take our benchmark for it
LIBRARIES = ("adapters", "transformers", "torch", "safetensors")


def computed(case: dict[str, Any], number: int) -> dict[str, torch.Tensor]:
    """A model's weights, an adapter's, inputs, outputs with and without it, and its gradients."""
    torch.manual_seed(number)
    model = getattr(transformers, case["model"])(
        getattr(transformers, case["config"])(**case["sizes"], attn_implementation="eager")
    ).eval()
    found = {f"base/{name}": value.clone() for name, value in model.state_dict().items()}
    inputs = {
        name: torch.randint(case["sizes"]["vocab_size"], shape)
        for name, shape in case["inputs"].items()
    }
    with torch.no_grad():
        found["plain"] = model(**inputs).logits
        found["plain in fp64"] = deepcopy(model).double()(**inputs).logits
    LIBRARY.init(model)
    model.add_adapter(ADAPTER, getattr(LIBRARY, case["adapter"])(**case["fields"]))
    model.train_adapter(ADAPTER)
    model.eval()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    trained = {name: each for name, each in trained.items() if ADAPTER in name.split(".")}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.normal_(std=STD)
    outputs = model(**inputs).logits
    outputs.square().mean().backward()
    found["outputs"] = outputs.detach()
    found |= {f"inputs/{name}": value for name, value in inputs.items()}
    for name, parameter in trained.items():
        assert parameter.grad is not None
        found |= {f"trained/{name}": parameter.detach(), f"gradient/{name}": parameter.grad}
    found = {name: value.clone().contiguous() for name, value in found.items()}
    with torch.no_grad():
        return found | {"outputs in fp64": model.double()(**inputs).logits}


def main() -> None:
    """Compute every case of the folder."""
    folder = Path(sys.argv[1])
    transformers.logging.set_verbosity_error()
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    for number, case in enumerate(cases.values()):
        save_file(computed(case, number), folder / f"{number}.safetensors")
    versions = {name: metadata.version(name) for name in LIBRARIES}
    versions |= {"python": sys.version.split()[0]}
    (folder / "versions.json").write_text(json.dumps(versions), encoding="utf-8")


if __name__ == "__main__":
    main()

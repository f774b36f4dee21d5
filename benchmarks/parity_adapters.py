"""Compacter and the bottleneck adapter against the `adapters` library, on the same weights.

The library pins an older transformers, so it is in an environment of its own:

    python -m venv OTHER
    OTHER/bin/pip install torch==2.13.0 adapters
    python benchmarks/parity_adapters.py --python OTHER/bin/python

There `parity_adapters_worker.py` puts the library's adapters on small models in fp32, moves them
from their start and writes weights, inputs, outputs and gradients. Here ours is put on the same
model in our transformers, with the same numbers. Outputs and gradients are compared relative to
the largest of a tensor, outputs in fp64 as they are, which rounding leaves equal (but for T5, of
which parts stay in fp32 that the two transformers round otherwise, without an adapter too), and how
many numbers are trained. Where the library computes something else, that is a departure: named, and
measured, and it must be seen, or the comparison sees nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from common import HERE, say, write_result
from safetensors.torch import load_file
from torch import Tensor

from modicum.adapters import Compacter, MoSA
from modicum.adapters.base import Adapter
from modicum.core.files import write_json

ADAPTER = "parity"  # as the worker calls it
BARS = {"outputs": 1e-6, "gradients": 1e-5, "outputs_fp64": 1e-6}
WIDTH, NARROW = 32, 8
_FACTOR = re.compile(rf"(.+)\.adapters\.{ADAPTER}\.adapter_(down|up)\.(?:0\.)?(\w+)$")
_NAMES = {"weight": "matrix", "bias": "bias", "W_left": "s", "W_right": "t", "b": "bias"}
_TANH = "gelu_new"  # GELU's tanh form


@dataclass(frozen=True)
class Model:
    """A model of transformers: its class, configuration, sizes, and the shapes of its inputs."""

    name: str
    config: str
    sizes: dict[str, Any]
    inputs: dict[str, tuple[int, int]]


LLAMA = Model(
    "LlamaForCausalLM",
    "LlamaConfig",
    {
        "vocab_size": 64,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    {"input_ids": (4, 16)},
)
T5 = Model(
    "T5ForConditionalGeneration",
    "T5Config",
    {
        "vocab_size": 64,
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    {"input_ids": (4, 16), "decoder_input_ids": (4, 12)},
)
# By how the place of an adapter ends there, how the name of its module ends here.
BRANCHES = {".attention_adapters": ".self_attn", ".output_adapters": ".mlp"}
BLOCKS = {".output_adapters": ""}
T5_BRANCHES = {
    "layer.0": "layer.0.SelfAttention",
    "layer.1": "layer.1.DenseReluDense",
    "layer.2": "layer.2.DenseReluDense",
}
T5_LAYERS = ("encoder.block.*.layer.1", "decoder.block.*.layer.2")


@dataclass(frozen=True)
class Case:
    """One adapter in both.

    Args:
        config: the library's class of configurations.
        ours: the same adapter here.
        places: see `BRANCHES`.
        departs: what the library does otherwise; empty: nothing, and the bars hold.
    """

    config: str
    ours: Adapter
    fields: dict[str, Any] = field(default_factory=dict)
    model: Model = LLAMA
    places: Mapping[str, str] = field(default_factory=lambda: BRANCHES)
    departs: str = ""

    def asked(self) -> dict[str, Any]:
        """What the worker is given."""
        return {
            "model": self.model.name,
            "config": self.model.config,
            "sizes": self.model.sizes,
            "inputs": self.model.inputs,
            "adapter": self.config,
            "fields": {"reduction_factor": WIDTH // NARROW, **self.fields},
        }


def compacter(**fields: Any) -> Compacter:
    """Ours, of this benchmark's widths."""
    return Compacter(**{"reduction_factor": WIDTH // NARROW, "phm_dim": 4, **fields})


def bottleneck(**fields: Any) -> MoSA:
    """Ours: one expert is the plain adapter."""
    plain: dict[str, Any] = {"experts": 1, "passes": 1, "bottleneck": NARROW, "place": "after"}
    return MoSA(**{**plain, "scale": 1.0, **fields})


def cases() -> dict[str, Case]:
    """Every adapter that both have, and what the library's own defaults are."""
    tanh = {"non_linearity": _TANH}
    blocks = ("all-blocks",)
    on_t5 = ("SelfAttention", "DenseReluDense")
    wide = {"phm_dim": 2, "phm_rank": 3}
    return {
        "compacter": Case("CompacterConfig", compacter(), tanh),
        "compacter, n 2 and r 3": Case("CompacterConfig", compacter(**wide), tanh | wide),
        "compacter, T5": Case("CompacterConfig", compacter(targets=on_t5), tanh, T5, T5_BRANCHES),
        "compacter++, behind blocks": Case(
            "CompacterPlusPlusConfig", compacter(targets=blocks), tanh, places=BLOCKS
        ),
        "bottleneck": Case("DoubleSeqBnConfig", bottleneck(), tanh),
        "bottleneck, scaled": Case(
            "DoubleSeqBnConfig", bottleneck(scale=0.25), tanh | {"scaling": 0.25}
        ),
        "bottleneck, behind blocks": Case(
            "SeqBnConfig", bottleneck(targets=blocks), tanh, places=BLOCKS
        ),
        "bottleneck, T5": Case(
            "DoubleSeqBnConfig", bottleneck(targets=on_t5), tanh, T5, T5_BRANCHES
        ),
        "bottleneck, parallel, T5": Case(
            "ParBnConfig",
            bottleneck(place="parallel", scale=4.0, targets=T5_LAYERS),
            tanh,
            T5,
            {"layer.1": "layer.1", "layer.2": "layer.2"},
        ),
        "compacter, the library's default": Case(
            "CompacterConfig",
            compacter(),
            departs="GELU by the error function; ours and the authors' code have its tanh form",
        ),
        "compacter++, the library's place": Case(
            "CompacterPlusPlusConfig",
            compacter(targets=("mlp",)),
            tanh,
            places={".output_adapters": ".mlp"},
            departs="it reads the residual stream behind the feed-forward's addition; ours by its "
            "name `mlp`, and the paper, what the feed-forward gives before it is added",
        ),
        "bottleneck, the library's default": Case(
            "DoubleSeqBnConfig",
            bottleneck(),
            departs="SiLU (its `swish`), as SeqBnConfig and ParBnConfig have ReLU; ours GELU",
        ),
        "bottleneck, parallel, before norms": Case(
            "ParBnConfig",
            bottleneck(place="parallel", scale=4.0, targets=("mlp",)),
            tanh,
            places={".output_adapters": ".mlp"},
            departs="its parallel adapter reads the residual stream before the norm; ours what the "
            "module reads, behind the norm where that stands before it",
        ),
    }


# What the library does otherwise, and a case on given numbers does not show.
STARTS = (
    "the library starts W_left and W_right Glorot-normal, and never reads "
    "`hypercomplex_nonlinearity`; ours start Glorot-uniform with gain sqrt 2, as the authors' code",
    "the library starts the bottleneck's matrices at N(0, 0.02^2), or Down Kaiming-uniform and Up "
    "zero (`mam_adapter`), as ours",
)


def converted(found: Mapping[str, Tensor], places: Mapping[str, str]) -> dict[str, Tensor]:
    """The library's tensors of an adapter, or their gradients, by our names and in our layout.

    Ours has for all terms of a sum one matrix of each factor: s [n r, k/n] of W_left [n, k/n, r],
    t [n r, o/n] of W_right [n, r, o/n].

    Raises:
        ValueError: one is of no kind, or at no place, that is known here.
    """
    made: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if name.endswith(f"shared_parameters.{ADAPTER}.phm_rule"):
            made["shared.A"] = tensor
            continue
        match = _FACTOR.match(name)
        end = next((each for each in places if match and match[1].endswith(each)), None)
        if match is None or end is None or match[3] not in _NAMES:
            raise ValueError(f"{name} is no tensor that is known here")
        if match[3] == "W_left":
            tensor = tensor.transpose(1, 2)
        if match[3] in ("W_left", "W_right"):
            tensor = tensor.flatten(0, 1)
        site = match[1].removesuffix(end) + places[end]
        made[f"{site}.{match[2]}_{_NAMES[match[3]]}"] = tensor.contiguous()
    return made


def of(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a kind, as the worker's names begin."""
    return {n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)}


def distances(case: Case, theirs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Largest differences of outputs and gradients, and how many numbers are trained."""
    config = getattr(transformers, case.model.config)(
        **case.model.sizes, attn_implementation="eager"
    )
    model = getattr(transformers, case.model.name)(config).eval()
    missing, unknown = model.load_state_dict(of("base/", theirs), strict=False)
    if missing or unknown:
        raise SystemExit(f"transformers' names have changed: {missing}, {unknown}")
    inputs = of("inputs/", theirs)
    with torch.no_grad():
        plain = model(**inputs).logits
        plain_fp64 = deepcopy(model).double()(**inputs).logits
    adapter = case.ours.attach(model)
    adapter.load_state_dict(converted(of("trained/", theirs), case.places))
    outputs = model(**inputs).logits
    outputs.square().mean().backward()
    wanted = converted(of("gradient/", theirs), case.places)
    gradients = {name: each.grad for name, each in adapter.named_parameters()}
    relative = []
    for name, expected in wanted.items():
        own = gradients.pop(name)
        assert own is not None
        relative.append(_apart(own, expected) / _largest(expected))
    assert not gradients, "a trained tensor of ours is none there"
    with torch.no_grad():
        precise = _apart(model.double()(**inputs).logits, theirs["outputs in fp64"])
    return {
        "outputs": _apart(outputs, theirs["outputs"]) / _largest(theirs["outputs"]),
        "gradients": max(relative),
        "outputs_fp64": precise,
        "largest_output": _largest(theirs["outputs"]),
        "compared_gradients": len(relative),
        "trained_here": sum(parameter.numel() for parameter in adapter.parameters()),
        "trained_there": sum(tensor.numel() for tensor in of("trained/", theirs).values()),
        "without_adapter": _apart(plain, theirs["plain"]),
        "without_adapter_fp64": _apart(plain_fp64, theirs["plain in fp64"]),
        "adapter_does": _apart(theirs["outputs"], theirs["plain"]),
    }


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.detach() - other.detach()).abs().max())


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def summed(
    by_case: Mapping[str, Mapping[str, Any]], departing: Mapping[str, str]
) -> dict[str, Any]:
    """What the result says of all cases: they keep the bars, and those that depart do not."""
    equal = {name: found for name, found in by_case.items() if name not in departing}
    worst = {key: max(found[key] for found in equal.values()) for key in BARS}
    counts = all(found["trained_here"] == found["trained_there"] for found in by_case.values())
    seen = all(any(by_case[name][key] > bar for key, bar in BARS.items()) for name in departing)
    return {
        "largest_difference": worst,
        "same_numbers_trained": counts,
        "departures_are_seen": seen,
        "passed": seen and counts and all(worst[key] <= bar for key, bar in BARS.items()),
        "departures": {
            name: {"what": what, **{key: by_case[name][key] for key in BARS}}
            for name, what in departing.items()
        },
    }


def computed_there(python: str, known: Mapping[str, Case], folder: Path) -> dict[str, str]:
    """Let the worker compute every case into a folder; the versions of its environment."""
    write_json(folder / "cases.json", {name: case.asked() for name, case in known.items()})
    command = [python, "-P", str(HERE / "parity_adapters_worker.py"), str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python} failed:\n{done.stderr}")
    versions: dict[str, str] = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    return versions


def main() -> None:
    """Compare every case, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="of the environment that has `adapters`")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # of transformers, about itself
    known = cases()
    by_case = {}
    with tempfile.TemporaryDirectory(prefix="modicum-parity-") as temporary:
        folder = Path(temporary)
        versions = computed_there(options.python, known, folder)
        for number, (name, case) in enumerate(known.items()):
            by_case[name] = distances(case, load_file(folder / f"{number}.safetensors"))
            say(f"{name}: {by_case[name]}")
    departing = {name: case.departs for name, case in known.items() if case.departs}
    figures = {**summed(by_case, departing), "starts": STARTS, "by_case": by_case}
    settings = {"bars": BARS, "llama": LLAMA.sizes, "t5": T5.sizes, "environment": versions}
    write_result("parity_adapters", figures, settings)


if __name__ == "__main__":
    main()

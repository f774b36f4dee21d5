"""What compiling a block gives: forward and backward, compiled against eager, and what it costs.

One block of the demo's model and wider ones, on rows of several documents, as `modicum train` tries
it before a run. The compiler's cache on disk is left out of it: every block is compiled anew.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial

import torch
from common import alone, interleaved, paired_ratio, say, spread, write_result

from modicum.data.batch import Batch
from modicum.models.config import ModelConfig
from modicum.models.llama import create
from modicum.tasks import CausalLM
from modicum.trainer.compile_trial import CompileTrial

# Width, heads, key heads, rows and tokens; the first is recipes/demo-pretrain.yaml's.
SHAPES = [(192, 6, 2, 16, 128), (512, 8, 8, 8, 256), (1024, 16, 16, 4, 256)]


def trial(shape: tuple[int, ...], precision: str) -> CompileTrial:
    """A block of a new model, with the input it gets."""
    width, heads, kv_heads, rows, tokens = shape
    config = ModelConfig(
        vocabulary_size=2048, width=width, layers=1, heads=heads, kv_heads=kv_heads, context=tokens
    )
    ids = torch.randint(0, 2048, (rows, tokens), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(tokens) > tokens // 3).int().expand(rows, tokens)
    return CompileTrial(
        create(config, seed=0).train(), CausalLM(), Batch(ids, ids, documents), precision
    )


def main() -> None:
    """Measure every shape in both precisions, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    figures = {}
    with alone(), tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        first = trial(SHAPES[0], "fp32")
        first.run(first.compiled)  # the C++ headers, once
        for precision in ("fp32", "bf16"):
            for shape in SHAPES:
                torch.compiler.reset()
                one = trial(shape, precision)
                one.run(one.eager)
                compiling = one.timed(one.compiled)
                contenders = {
                    "eager": partial(one.timed, one.eager),
                    "compiled": partial(one.timed, one.compiled),
                }
                seconds = interleaved(contenders, rounds=arguments.rounds, warm_up=2)
                ratio = paired_ratio(seconds["eager"], seconds["compiled"])
                name = f"{precision}, width {shape[0]}, {shape[3]} x {shape[4]} tokens"
                figures[name] = {
                    "seconds": {key: spread(values) for key, values in seconds.items()},
                    "compiling_seconds": compiling,
                    "eager_over_compiled": ratio,
                }
                say(f"{name}: {ratio['median']:.2f} x as fast, compiled in {compiling:.1f} s")
    write_result("compile", {"block": figures}, vars(arguments))


if __name__ == "__main__":
    main()

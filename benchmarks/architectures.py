"""Which decoders of transformers do what: each tiny random model is run through each column.

A tick is for what was seen, with numbers that could be wrong: losses that fall, logits that are
those of transformers on the same files, runs that resume to the bit. What modicum refuses stands
there with its sentence. No time is measured, so it may run
next to others. The results are the page docs/reference/models.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from architectures_models import LARGE, MODELS, write_model
from common import HERE, RESULTS, say, write_result

import modicum
from modicum.core.errors import InputError, ModicumError
from modicum.core.ranks.ranks import Ranks
from modicum.data.tokenizer import Tokenizer
from modicum.models import saving, traced_cache
from modicum.models.decoders import config_of
from modicum.planner.choose import COMPILE
from modicum.proofs.ranks import RanksFailed, at_ranks
from modicum.serve import load_run
from modicum.tasks.text import packs
from modicum.trainer import continued, train

STEPS = 8
WORDS = (
    "the",
    "a",
    "small",
    "large",
    "red",
    "blue",
    "cat",
    "dog",
    "tree",
    "house",
    "sees",
    "likes",
)
# Where experts stay as they are, or logits are scaled down, adapters must learn long to be seen.
ADAPTED_STEPS = 16
LORA: dict[str, Any] = {
    "adapter": {"method": "lora", "rank": 4},
    "training": {"steps": ADAPTED_STEPS, "learning_rate": 3e-2},
}
SETTINGS = {"steps": STEPS, "adapted_steps": ADAPTED_STEPS}
SECONDS = 600  # of ranks
ROW_SECONDS = 1800  # of a model
RANK = "architectures:sharing"


class NotSeen(AssertionError):
    """A column ran, and its numbers are wrong."""


class Bench:
    """One model in a folder of its own.

    Args:
        folder: where its files and runs are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.base, self.data = folder, folder / "base", folder / "data.jsonl"

    @classmethod
    def made(cls, folder: Path, raw: dict[str, Any]) -> Bench:
        """One whose files are written now, by its config.json."""
        bench = cls(folder)
        write_model(bench.base, raw)
        texts = [cls._text(n) for n in range(300)]
        bench.data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        Tokenizer.train(iter(texts), 300).save(bench.base)
        return bench

    @staticmethod
    def _text(n: int) -> str:
        return " ".join(WORDS[(n * 7 + p * (n % 5 + 1)) % len(WORDS)] for p in range(3 + n % 9))

    def run(self, name: str, stop: int = 0, ranks: Ranks | None = None, **sections: Any) -> Path:
        """Train by a recipe, or up to a step; the run's folder."""
        values: dict[str, Any] = {
            "model": {"path": str(self.base)},
            "data": {"path": str(self.data), "sequence_length": 32, "validation_fraction": 0.1},
            "training": {"steps": STEPS, "batch_size": 8, "micro_batch_size": 4,
                         "learning_rate": 5e-3, "compile": "none"},
            "evaluation": {"every": STEPS, "rows": 8},
            "checkpoint": {"every": 3},
            "samples": {"prompts": ["the cat"], "tokens": 3},
        }  # fmt: skip
        for section, own in sections.items():
            values[section] = values.get(section, {}) | own
        out, ranks = self.folder / name, ranks or Ranks()

        def listener(event: dict[str, Any]) -> None:
            if stop and event["event"] == "step" and event["step"] == stop:
                os.kill(os.getpid(), signal.SIGTERM)

        plan = continued(modicum.Recipe(**values), out, ranks=ranks)
        if values["training"]["compile"] == "blocks":  # also where it takes longer
            plan = plan.chosen(COMPILE, "blocks", "this column asks for it")
        train(plan, out, ranks=ranks, listener=listener)
        return out

    # The columns

    def train(self) -> None:
        """A full training, whose loss falls."""
        falls(self.run("full"))

    def resume(self) -> None:
        """The same, stopped and begun again: the same numbers to the bit."""
        try:
            self.run("resumed", stop=5)
        except ModicumError as error:
            if error.exit_code != 4:
                raise
        again = self.run("resumed")
        if losses(again) != losses(self.folder / "full"):
            raise NotSeen("it resumes with other losses")
        if weights(again) != weights(self.folder / "full"):
            raise NotSeen("it resumes with other weights")

    @torch.no_grad()
    def export(self) -> None:
        """The folder that transformers loads computes what was trained."""
        ours, ids = load_run(self.folder / "full").model, self.ids()
        close(self.theirs(self.folder / "full" / "model")(ids).logits, ours(ids), 1e-5)

    @torch.no_grad()
    def chat(self) -> None:
        """Token for token what transformers generates of the exported folder."""
        talk = load_run(self.folder / "full")
        ids = torch.tensor([talk.tokenizer.encode_prompt("the cat")])
        from modicum.models.generate import generate

        found = list(generate(talk.model, ids, max_tokens=12))
        twin = self.theirs(self.folder / "full" / "model")
        expected = twin.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        if found != expected[0, ids.shape[1] :].tolist():
            raise NotSeen("it writes other tokens than transformers")

    def lora(self) -> None:
        """LoRA on all linear layers."""
        falls(self.run("lora", **LORA))

    @torch.no_grad()
    def merge(self) -> None:
        """The adapter folded in: transformers computes what the adapted model does."""
        self._merge(self.folder / "lora")

    def nf4(self) -> None:
        """LoRA on 4-bit weights."""
        falls(self.run("nf4", linear={"method": "nf4"}, **LORA))

    @torch.no_grad()
    def nf4_merge(self) -> None:
        """The same of the adapter on 4-bit weights, which are written as dense ones."""
        self._merge(self.folder / "nf4")

    def _merge(self, run: Path) -> None:
        talk, ids = load_run(run), self.ids()
        expected = talk.model(ids)
        assert talk.adapter is not None
        talk.adapter.merge(dense=torch.float32)
        talk.adapter.detach()
        folder = saving.save(talk.model, run / "merged")
        close(self.theirs(folder)(ids).logits, expected, 1e-4)

    @torch.no_grad()
    def packing(self) -> None:
        """Documents that share a row are computed as each would be alone, and at once."""
        model, ids = load_run(self.folder / "full").model, self.ids()
        ends = [5, 6, 17]
        documents = torch.tensor([[sum(at >= end for end in ends) for at in range(17)]] * 2)
        alone = [model(part) for part in ids.tensor_split(ends[:-1], dim=1)]
        close(model(ids, documents), torch.cat(alone, dim=1), 1e-5)
        if not packs(config_of(model), ids.shape[1]):
            raise InputError(
                "documents of a row are computed one at a time; data.boundaries: false computes "
                "the row at once, and a document then sees those before it"
            )

    def compress(self) -> None:
        """Low-rank factors, trained; the small folder computes what the dense one does."""
        run = self.run("compressed_run", compress={"method": "fwsvd", "examples": 32})
        falls(run)
        small, dense = run / "compressed", run / "model"
        if not stored_bytes(small) < stored_bytes(dense):
            raise NotSeen("the compressed folder is no smaller")
        with torch.no_grad():
            found, ids = load_run(small).model, self.ids()
            close(self.theirs(dense)(ids).logits, found(ids), 1e-4)

    def fsdp(self) -> None:
        """Two ranks that share the weights: the losses of one."""
        try:
            refused = at_ranks(RANK, 2, {"folder": str(self.folder)}, seconds=SECONDS)[0]
        except RanksFailed as error:
            raise NotSeen(str(error).splitlines()[-1]) from None
        if refused:
            raise ModicumError(refused)
        near(self.folder / "fsdp", self.folder / "full")

    def compile(self) -> None:
        """Compiled blocks: the losses of eager ones."""
        run = self.run("compiled", training={"compile": "blocks"})
        plan = [json.loads(line) for line in (run / "plan.jsonl").read_text().splitlines()][-1]
        made = {choice["field"]: choice for choice in plan["choices"]}[COMPILE]
        if made["value"] != "blocks":
            raise NotSeen(f"it runs eagerly, as {made['why']}")
        near(run, self.folder / "full")

    def forecast(self) -> dict[str, float]:
        """The tensors' peak of the full training next to the plan's."""
        peak = json.loads((self.folder / "full" / "run.json").read_text())["peak_bytes"]
        return {"predicted": peak["predicted"], "measured": peak["measured"]}

    def ids(self) -> torch.Tensor:
        """Two rows of tokens."""
        return torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(1))

    def theirs(self, folder: Path) -> Any:
        """A folder's model as transformers loads it."""
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


COLUMNS = (
    "train",
    "resume",
    "export",
    "chat",
    "lora",
    "merge",
    "nf4",
    "nf4_merge",
    "packing",
    "compress",
    "fsdp",
    "compile",
)
NEEDS = {"resume": "train", "export": "train", "chat": "train", "merge": "lora", "fsdp": "train"}
NEEDS |= {"compile": "train", "packing": "train", "nf4_merge": "nf4"}


def losses(run: Path) -> list[float]:
    """Of each update."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> list[bytes]:
    """The exported files."""
    return [file.read_bytes() for file in sorted((run / "model").glob("*.safetensors"))]


def stored_bytes(folder: Path) -> int:
    """Of a folder's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def falls(run: Path) -> None:
    """Make sure that a run's loss falls."""
    found = losses(run)
    if not found[-1] < found[0] - 0.05:
        raise NotSeen(f"the loss does not fall: {found[0]:.3f} to {found[-1]:.3f}")


def near(run: Path, other: Path) -> None:
    """Make sure that two runs have the same losses but for rounding."""
    worst = max(abs(a - b) for a, b in zip(losses(run), losses(other), strict=True))
    if not worst < 2e-3:
        raise NotSeen(f"losses differ by {worst:.2g}")


def close(found: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    """Make sure that logits are the same but for a share of the largest."""
    far = float((found - expected).abs().max() / expected.abs().max())
    if not far <= share:
        raise NotSeen(f"logits differ by {far:.2g} of the largest")


def apart(work: Callable[[], Any]) -> Any:
    """Do it in a process of its own, which begins without the threads of this one; what it gives.

    Raises:
        NotSeen: it fails, or takes too long.
    """
    context = multiprocessing.get_context("forkserver")
    answers = context.SimpleQueue()
    process = context.Process(target=answer, args=(work, answers))
    process.start()
    try:
        process.join(ROW_SECONDS)
        if process.is_alive() or answers.empty():
            raise NotSeen(f"no answer within {ROW_SECONDS} s, or it died: {process.exitcode}")
        found, failed = answers.get()
    finally:
        process.kill()
        process.join()
    if failed is not None:
        raise NotSeen(failed)
    return found


def answer(work: Callable[[], Any], answers: SimpleQueue[tuple[Any, str | None]]) -> None:
    """Put what it gives, or the words of its error, where the process that asks reads it."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    traced_cache._traced_apart = trace_here
    try:
        answers.put((work(), None))
    except BaseException as error:
        answers.put((None, f"{type(error).__name__}: {error}"[:400]))


def model_row(raw: dict[str, Any], columns: tuple[str, ...] = COLUMNS) -> dict[str, Any]:
    """What was seen of one model, by column."""
    folder = Path(tempfile.mkdtemp(prefix="modicum-architectures-"))
    row: dict[str, Any] = {}
    try:
        bench = Bench.made(folder, raw)
        for column in columns:
            if (needed := NEEDS.get(column)) and row.get(needed) != "seen":
                before = row.get(needed, "")
                refused = before.startswith("refused")
                row[column] = before if refused else f"not tried, as {needed} is not seen"
                continue
            try:
                getattr(bench, column)()
                row[column] = "seen"
            except ModicumError as error:
                row[column] = f"refused: {str(error).replace(str(folder), '...')}"
            except Exception as error:
                row[column] = f"FAILED: {type(error).__name__}: {error}"[:500]
        if row.get("train") == "seen":
            row["forecast"] = bench.forecast()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return row


def large_row(raw: dict[str, Any]) -> dict[str, float]:
    """The forecast of a full training with tensors of more than 200 MB."""
    folder = Path(tempfile.mkdtemp(prefix="modicum-architectures-"))
    try:
        bench = Bench.made(folder, raw)
        training = {"steps": 2, "batch_size": 4, "micro_batch_size": 4}
        bench.run("full", training=training, data={"sequence_length": 128})
        return bench.forecast()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sharing(ranks: Ranks, folder: str) -> str:
    """One rank's part of the column of FSDP2; with what it is refused, if so."""
    traced_cache._traced_apart = trace_here
    try:
        Bench(Path(folder)).run("fsdp", ranks=ranks, parallel={"strategy": "fsdp"})
    except ModicumError as error:
        return str(error)
    return ""


def trace_here(request: Any, wanted: Any) -> dict[str, Any]:
    """Trace in this process: starting another for each plan would take most of the time."""
    arguments = dict(request.arguments)
    given = {"build": request.build, "arguments": arguments, "wanted": wanted}
    found = json.loads(json.dumps(traced_cache.answer(given)))
    if "failed" in found:
        raise traced_cache.TraceFailed(found["failed"])
    return dict(found["passes"])


def main() -> None:
    """Run all models through all columns, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", help="a model's name; may be given several times"
    )
    parser.add_argument("--columns", default=",".join(COLUMNS), help="of the page, with commas")
    parser.add_argument(
        "--without-large", action="store_true", help="leave out the large forecasts"
    )
    options = parser.parse_args()
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # where ranks find this file
    columns = tuple(options.columns.split(","))
    known = results()
    for name in options.only or MODELS:
        row = apart(partial(model_row, MODELS[name], columns))
        row = {"model_type": MODELS[name]["model_type"], **row}
        say(f"{name}: {json.dumps(row)}")
        known["models"][name] = {**known["models"].get(name, {}), **row}
        write_result("architectures", ordered(known), SETTINGS)
    for name in [] if options.without_large else LARGE:
        known["large"][name] = apart(partial(large_row, LARGE[name]))
        say(f"{name}, large: {known['large'][name]}")
        write_result("architectures", ordered(known), SETTINGS)


def ordered(known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The same in the page's order, with how many cells say what."""
    models = {name: known["models"][name] for name in MODELS if name in known["models"]}
    said = [
        row[column].split(":")[0] for row in models.values() for column in COLUMNS if column in row
    ]
    counts = {
        "models": len(models),
        "seen": said.count("seen"),
        "refused": said.count("refused"),
        "neither": sum(each not in ("seen", "refused") for each in said),
    }
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in known["large"].values()]
    worst = {"largest_forecast_error": max(errors)} if errors else {}
    return {**known, "models": models, "counts": counts, **worst}


def results() -> dict[str, dict[str, Any]]:
    """What was seen before, which columns that are run again replace."""
    file = RESULTS / "architectures.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    return {key: dict(before.get(key, {})) for key in ("models", "large")}


if __name__ == "__main__":
    main()

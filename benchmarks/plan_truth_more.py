"""What `plan_truth` adds to what it has drawn: what stands on a base, and how runs read and write.

Adapters on compressed models, dense layers by name, starts from an adapter, parts that are trained
in full next to it, dropout, bases in 16 bits, long samples, streams, exports.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

from modicum.recipe import methods_for

Sections = dict[str, Any]
Change = Callable[[Sections], None]
Method = Callable[..., dict[str, Any]]
# How often each is added where it has a place; in thirty recipes each is there about twice.
ON_COMPRESSED, COMPRESSED, FORMED = 0.5, 0.15, 0.35
STARTED, ALSO, DROPPED, HALF = 0.3, 0.4, 0.4, 0.35
LONG, STREAMED, EXPORTED = 0.25, 0.15, 0.25
# Methods whose files can be made of random numbers.
_FILED = ("lora", "dora", "lora_fa")


def more(
    recipe: Sections,
    raw: Sections | None,
    chance: random.Random,
    method: Method,
    combine: Callable[[Sections], bool],
) -> tuple[Sections, Sections | None]:
    """The recipe of text, and its model, with more of what goes with them.

    Args:
        raw: the config.json of the model's folder, if it has one.
        method: draws a method of a section by a chance.
        combine: whether no rule forbids a recipe.
    """
    for change in _changes(recipe, raw, chance, method):
        changed = copy.deepcopy(recipe)
        change(changed)
        if combine(changed) and not _needs_dense(changed) and not _prunes_others(changed, raw):
            recipe = changed
    if raw is not None and chance.random() < HALF:
        raw = {**raw, "dtype": chance.choice(["bfloat16", "bfloat16", "float16"])}
        training = recipe["training"] | {"precision": chance.choice(["auto", "auto", "bf16"])}
        if combine(recipe | {"training": training}):
            recipe = recipe | {"training": training}
    return recipe, raw


def words_of(recipe: Sections, raw: Sections | None) -> Iterator[str]:
    """What of it there is, at a glance."""
    adapter = recipe.get("adapter", {})
    if "adapter" in recipe.get("model", {}):
        yield "started"
    if "also" in adapter:
        yield "norms in full"
    if "dropout" in adapter:
        yield "dropout"
    if raw is not None and "dtype" in raw:
        yield f"base in {raw['dtype']}"
    if (tokens := recipe.get("samples", {}).get("tokens")) is not None:
        yield f"samples of {tokens}"
    if recipe.get("data", {}).get("streaming"):
        yield "streamed"
    if "export" in recipe:
        yield f"exported in {recipe['export']['dtype']}"


def _changes(
    recipe: Sections, raw: Sections | None, chance: random.Random, method: Method
) -> Iterator[Change]:
    """Changes of a recipe, any of which may be forbidden where the others were made."""
    if raw is not None and "compress" in recipe and chance.random() < ON_COMPRESSED:
        yield lambda made: made.update(adapter=method("adapter", chance))
    elif "adapter" in recipe and "linear" not in recipe and chance.random() < COMPRESSED:
        yield lambda made: made.update(compress=method("compress", chance))
    # Falcon's linear layers are of a class of their own, which no form replaces.
    plain = raw is None or raw["model_type"] != "falcon"
    if "compress" in recipe and plain and chance.random() < FORMED:
        # The one form that goes with compression: fp32, whatever the files hold.
        yield lambda made: made.update(linear={"method": "dense"})
    if "adapter" in recipe and chance.random() < STARTED:
        yield lambda made: _start(made, chance)
    if chance.random() < ALSO:
        yield _train_norms
    if chance.random() < DROPPED:
        yield _drop
    if chance.random() < LONG:
        samples = {"count": chance.choice([1, 2]), "tokens": chance.choice([16, 128, 256])}
        yield lambda made: made.update(samples=samples)
    if raw is not None and chance.random() < STREAMED:  # else a tokenizer is trained on all data
        yield lambda made: made["data"].update(streaming=True)
    if "adapter" not in recipe and chance.random() < EXPORTED:
        export = {"dtype": chance.choice(["bfloat16", "float16"])}
        yield lambda made: made.update({} if "adapter" in made else {"export": export})


def _needs_dense(recipe: Sections) -> bool:
    """Whether the adapter moves entries of weights of which a compressor leaves factors."""
    if "compress" not in recipe or "adapter" not in recipe:
        return False
    record = methods_for("adapter")[recipe["adapter"]["method"]]
    return bool({"writes_base", "rewrites_base"} & set(record.info.traits))


def _prunes_others(recipe: Sections, raw: Sections | None) -> bool:
    """Whether blocks of another model than the built-in one are to be made smaller."""
    method = recipe.get("compress", {}).get("method")
    return method == "structured_pruning" and raw is not None and raw["model_type"] != "llama"


def _start(made: Sections, chance: random.Random) -> None:
    """Begin with an adapter of a file, which is made for the model; its fields are the file's."""
    if "compress" in made:  # which leaves layers of other shapes
        return
    made["model"] = {**made["model"], "adapter": "{adapter}"}
    made["adapter"] = {"method": chance.choice(_FILED)}


def _train_norms(made: Sections) -> None:
    if "adapter" in made and "adapter" not in made["model"]:  # of which the file says what is
        made["adapter"]["also"] = ["{norm}"]


def _drop(made: Sections) -> None:
    adapter = made.get("adapter", {})
    if "dropout" in methods_for("adapter")[adapter.get("method", "lora")].fields and adapter:
        adapter["dropout"] = 0.1

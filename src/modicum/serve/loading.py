"""Loading what is served: a run or a model folder, and more adapters of the same base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from modicum.adapters import base_model_of, load
from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan
from modicum.core.weight_digests import BASE_WEIGHTS, changed_weights, read_digests
from modicum.data.chat_template import ChatTemplate
from modicum.data.tokenizer import Tokenizer
from modicum.models import huggingface
from modicum.models.decoders import config_of
from modicum.serve.conversation import Conversation, base_forms, load_run, template_of
from modicum.serve.served_models import ServedModel, ServedModels

ADAPTER, BASE, MERGED = "adapter", "base", "merged"
_OWN = "default"  # the engine's name of the run's own adapter


def load_served(
    path: str | Path,
    adapters: Mapping[str, str | Path] | None = None,
    *,
    merge: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> ServedModels:
    """What a run made, or a model folder, ready to be served.

    A run with an adapter is served as `adapter` and, without it, as `base`. Anything else has its
    folder's name, which is a run's own, or is `base` where adapters are given.

    Args:
        adapters: folders of more adapters of the same base, or runs that made them, by name.
        merge: fold the run's adapter into its base, which is served as `merged`.
        trust_remote_code: as `load_run` takes it.

    Raises:
        InputError: as `load_run`; a name is taken or no name; or an adapter is for another base,
            tokenizer or form of its weights.
    """
    run, more = Path(path), {name: Path(folder) for name, folder in (adapters or {}).items()}
    if merge and more:
        raise InputError(
            "a merged base is not the one that other adapters are for; serve them without it",
            field="--merge",
        )
    conversation = load_run(run, device=device, trust_remote_code=trust_remote_code)
    plain = ServedModel(template=conversation.template)
    if merge:
        _merge(conversation, run)
        names = {MERGED: plain}
    elif conversation.adapter is not None:
        names = {ADAPTER: ServedModel(_OWN, conversation.template), BASE: plain}
    else:
        names = {BASE if more else _own_name(run): plain}
    served = ServedModels(conversation.model, conversation.tokenizer, names, ends=conversation.ends)
    if conversation.adapter is not None and not merge:
        served.adapters[_OWN] = conversation.adapter
    for name, folder in more.items():
        _add(served, name, folder, _base_of(run), trust_remote_code)
    return served


def _own_name(run: Path) -> str:
    """A folder's name as one that requests can say."""
    words = "-".join(run.resolve().name.split())
    return "".join(c for c in words if c.isprintable()) or BASE


def _merge(conversation: Conversation, run: Path) -> None:
    if conversation.adapter is None:
        raise InputError("this has no adapter that could be merged", file=run, field="--merge")
    conversation.adapter.merge(dense=next(conversation.model.parameters()).dtype)
    conversation.adapter.detach()


def _base_of(run: Path) -> Path:
    """The folder with the base's weights."""
    if (run / "adapter").is_dir() and (base := base_model_of(run / "adapter")) is not None:
        return huggingface.resolve(base)
    return huggingface.resolve(run)


def _add(served: ServedModels, name: str, folder: Path, base: Path, trusted: bool) -> None:
    """Attach one more adapter, and serve it by its name.

    Args:
        trusted: whether a plugin that its recipe names may say the forms of its base.

    Raises:
        InputError: the name is taken or no name, or the adapter is for another model.
    """
    if not name or name in served.names or not name.isprintable() or " " in name:
        raise InputError(
            "an adapter needs a name of its own, without blanks",
            field="--adapter",
            value=name,
            allowed=f"any but {', '.join(served.names)}",
        )
    inner = folder / "adapter" if (folder / "adapter").is_dir() else folder
    if not inner.is_dir():
        raise InputError("no such folder of an adapter", file=folder, field="--adapter")
    _check_base(inner, base)
    if (folder / "recipe.yaml").is_file():
        _check_forms(folder, base, config_of(served.model).forms, trusted)
    template, ends = _template_and_ends(served, folder)
    own = f"added-{len(served.adapters)}"
    served.adapters[own] = load(served.model, inner, name=own)
    served.names[name] = ServedModel(own, template, ends)


def _check_base(adapter: Path, base: Path) -> None:
    """Refuse an adapter that is known to be for another base."""
    file = adapter / BASE_WEIGHTS
    if file.is_file():
        other = bool(changed_weights(base, read_digests(file)))
    else:
        said = base_model_of(adapter)
        # A name of the hub says nothing of a folder; the user does, who names both.
        other = said is not None and Path(said).is_dir() and not Path(said).samefile(base)
    if other:
        raise InputError(
            "this adapter was trained on another base model than the one that is served",
            file=adapter,
            field="--adapter",
            value=str(base),
        )


def _check_forms(run: Path, base: Path, served: FormPlan, trusted: bool) -> None:
    """Refuse an adapter whose run held the base's weights in another form."""
    if base_forms(run / "recipe.yaml", base, trusted=trusted) != served:
        raise InputError(
            "this adapter was trained on base weights in another form (`linear` of its recipe) "
            "than those that are served; serve its run by itself",
            file=run,
            field="--adapter",
        )


def _template_and_ends(
    served: ServedModels, folder: Path
) -> tuple[ChatTemplate | None, frozenset[int]]:
    """The template and the end of text of an adapter's own tokenizer.

    Without one, the template of what is served, and no other end than that has.

    Raises:
        InputError: its tokenizer has other tokens.
    """
    place = next(
        (p for p in (folder / "tokenizer", folder) if (p / "tokenizer.json").is_file()), None
    )
    if place is None:
        return next(iter(served.names.values())).template, frozenset()
    own = Tokenizer.load(place)
    if own.inner.get_vocab() != served.tokenizer.inner.get_vocab():
        raise InputError(
            "this adapter was trained with another tokenizer than the one that is served",
            file=place,
            field="--adapter",
        )
    return template_of(folder, own), frozenset({own.eos_id})

"""A run's model, ready to write: the base, its adapter if it has one, and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from modicum.adapters import AttachedAdapter, base_folder_of, load
from modicum.core.errors import InputError
from modicum.core.files import json_object, read_json
from modicum.core.layers.form_plan import FormPlan
from modicum.core.machine import pick_device
from modicum.core.run_folders import is_adapter, no_run
from modicum.core.weight_digests import BASE_WEIGHTS, changed_weights, read_digests
from modicum.data.chat_template import ChatTemplate, Message
from modicum.data.tokenizer import Tokenizer
from modicum.models import huggingface
from modicum.models.decoders import Decoder, config_of
from modicum.models.generate import generate
from modicum.models.transformers.trusted import has_own_code, trust
from modicum.recipe import Recipe
from modicum.recipe_yaml import load as load_recipe
from modicum.serve.text_stream import TextStream
from modicum.tasks.text import formed


@dataclass
class Conversation:
    """A model that continues text, or answers; what was written before is its context.

    Without a template the model continues what it is given. With one, what it is given is a turn
    of the user, and it writes the assistant's. A longer context than the model's is truncated at
    its beginning.
    """

    model: Decoder
    tokenizer: Tokenizer
    adapter: AttachedAdapter | None = None
    template: ChatTemplate | None = None
    history: list[int] = field(default_factory=list)
    turns: list[Message] = field(default_factory=list)
    more_ends: frozenset[int] = frozenset()

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text: the tokenizer's, and others that the model's files name."""
        return self.more_ends | {self.tokenizer.eos_id}

    def forget(self) -> None:
        """Begin anew."""
        self.history.clear()
        self.turns.clear()

    def write(
        self,
        prompt: str,
        *,
        max_tokens: int = 128,
        temperature: float = 0.7,
        top_p: float = 0.95,
        seed: int | None = None,
    ) -> Iterator[str]:
        """What follows `prompt`, in pieces as it is written.

        Args:
            prompt: text to continue, or the user's turn; it joins the history, and so does what
                is written.
            max_tokens: at most so many tokens.
            temperature: 0 takes the most likely token every time.
            top_p: draws among the likeliest tokens that together reach this probability.
            seed: the same seed and history write the same; None draws one.
        """
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        self._take(prompt)
        written: list[int] = []
        text = TextStream(self.tokenizer, after=() if self.template else self.history)
        try:
            for token in self._tokens(max_tokens, temperature, top_p, generator):
                written.append(token)
                yield text.add(token)
            if rest := text.finish():
                yield rest
        finally:  # an answer that was broken off is a turn, too
            if self.template is not None:
                answer = self.tokenizer.decode(written)
                self.turns.append({"role": "assistant", "content": answer})

    def _take(self, prompt: str) -> None:
        """Let a prompt join the history; a turn makes all of it be written anew."""
        if self.template is not None:
            self.turns.append({"role": "user", "content": prompt})
            text = self.template.render(self.turns, generation=True)
            ((self.history, _),) = self.tokenizer.encode_marked([text], [()])
        elif self.history:
            self.history += self.tokenizer.encode(prompt)
        else:
            self.history += self.tokenizer.encode_prompt(prompt)

    def _tokens(
        self, count: int, temperature: float, top_p: float, generator: torch.Generator
    ) -> Iterator[int]:
        """The next `count` tokens or fewer; where the context is full its older half is dropped."""
        context = config_of(self.model).context
        device = next(self.model.parameters()).device
        while count > 0:
            ids = self.history
            if len(ids) >= context:
                ids = ids[-max(context // 2, context - count) :]
            limit, before = min(count, context - len(ids)), len(self.history)
            for token in generate(
                self.model,
                torch.tensor([ids], device=device),
                max_tokens=limit,
                temperature=temperature,
                top_p=top_p,
                eos_id=self.ends,
                generator=generator,
            ):
                self.history.append(token)
                yield token
            if len(self.history) - before < limit:
                return  # the model ended its text
            count -= limit


def load_run(
    path: str | Path, *, device: str = "auto", trust_remote_code: bool = False
) -> Conversation:
    """The model of a run folder (with its adapter on its base), or of a model folder.

    Args:
        trust_remote_code: whether Python files of the model's folder are run, with a warning, and
            a plugin that its recipe names.

    Raises:
        InputError: nothing was exported there yet, or the adapter's base is gone or has changed; or
            a plugin makes the forms of its weights.
    """
    folder = Path(path)
    where = pick_device(device)
    check_run(folder)
    if not (folder / "adapter").is_dir():
        inner = huggingface.resolve(folder)
        if trust_remote_code:
            trust(inner)
        model = huggingface.load(inner, device=where)
        tokenizer = Tokenizer.load(inner)
        template = template_of(folder, tokenizer)
        return Conversation(model.eval(), tokenizer, None, template, more_ends=_ends(inner))
    base, recipe = base_folder_of(folder / "adapter"), folder / "recipe.yaml"
    check_base(folder / "adapter" / BASE_WEIGHTS, base)
    if trust_remote_code:
        trust_base(base, recipe)
    forms = base_forms(recipe, base, trusted=trust_remote_code)
    model = huggingface.load(base, device=where, linear=forms)
    adapter = load(model, folder / "adapter")
    tokenizer = Tokenizer.load(folder / "tokenizer")
    template, ends = template_of(folder, tokenizer), _ends(huggingface.resolve(base))
    return Conversation(model.eval(), tokenizer, adapter, template, more_ends=ends)


def check_run(folder: Path) -> None:
    """See that `load_run` finds a model that writes text, before anything large is read.

    Raises:
        InputError: nothing was exported there yet, the adapter's base is gone, or what was trained
            writes no text.
    """
    if not folder.is_dir() or is_adapter(folder):
        raise no_run(folder, models=True)
    if not (folder / "adapter").is_dir():
        if (folder / "run.json").exists() and not (folder / "model").is_dir():
            problem = f"this run has exported no model yet; `modicum train RECIPE --out {folder}`"
            raise InputError(f"{problem}, as it began, resumes it", file=folder)
        inner = huggingface.resolve(folder)
        _check_writes(inner)
        huggingface.read_config(inner)
        return
    recipe = folder / "recipe.yaml"
    if recipe.is_file() and (task := load_recipe(recipe).task) is not None:
        raise _writes_nothing(folder, task["method"])
    base_folder_of(folder / "adapter")


def _ends(folder: Path) -> frozenset[int]:
    """The tokens that a model folder's files say end a text, as transformers reads them."""
    for name in ("generation_config.json", huggingface.CONFIG):
        values = read_json(folder / name) if (folder / name).is_file() else {}
        named = values.get("eos_token_id") if isinstance(values, dict) else None
        ends = named if isinstance(named, list) else [named]
        if found := frozenset(each for each in ends if type(each) is int):
            return found
    return frozenset()


def _check_writes(folder: Path) -> None:
    """Refuse a classifier, which has no logits of next tokens."""
    file = folder / huggingface.CONFIG
    named = json_object(file).get("architectures") if file.is_file() else None
    listed = named if isinstance(named, list) else []
    if any(str(name).endswith("ForSequenceClassification") for name in listed):
        raise _writes_nothing(folder, "text_classes")


def _writes_nothing(folder: Path, task: str) -> InputError:
    return InputError(
        f"the task {task} trains no model that writes text, and only such are loaded here; "
        "transformers and PEFT read what it exports",
        file=folder,
    )


def template_of(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a model folder, and of a run folder if it was trained on conversations."""
    if (folder / "run.json").is_file():
        data = json_object(folder / "run.json").get("data")
        if not isinstance(data, dict) or not data.get("conversations"):
            return None
    return tokenizer.chat_template


def check_base(file: Path, base: Path) -> None:
    """Refuse a base model that has changed since an adapter was trained on it, if that is known."""
    if not file.is_file():
        return
    if changed := changed_weights(base, read_digests(file)):
        raise InputError(
            f"the base model has changed since this adapter was trained on it ({changed[0]}); put "
            "it back as it was, or train the adapter anew",
            file=base,
        )


def trust_base(base: Path, recipe: Path) -> None:
    """Run the code of a base's folder; where a recipe's plugins are meant, it may have none.

    Nor has one that still names code though transformers itself has such a model by now.
    """
    inner = huggingface.resolve(base)
    plugins = load_recipe(recipe).plugins if recipe.is_file() else ()
    if not plugins or has_own_code(json_object(inner / huggingface.CONFIG)):
        trust(inner)


def check_plugins(recipe: Recipe, file: Path, *, trusted: bool) -> None:
    """Make sure that no code is run because a stranger's run names it as a plugin.

    Args:
        file: of the recipe.
        trusted: whether somebody has asked for it.

    Raises:
        InputError: a plugin makes the task, or the forms of the weights.
    """
    methods = recipe.methods()
    for slot in ("task", "linear"):
        if slot in methods and methods[slot].runs_file and not trusted:
            raise InputError(
                "this is a plugin's, whose code is run with trust_remote_code alone "
                "(--trust-remote-code on the command line)",
                file=file,
                field=f"{slot}.method",
                value=str(methods[slot].file),
            )


def base_forms(recipe: Path, base: str | Path, *, trusted: bool = False) -> FormPlan:
    """The forms in which a run held its base weights; of another base, those of its folder.

    Args:
        trusted: whether a plugin that the recipe names may make them.

    Raises:
        InputError: one would, and may not.
    """
    config = huggingface.read_config(base)
    if not recipe.is_file() or _trained_on_another(recipe.parent):
        return config.forms
    asked = load_recipe(recipe)
    check_plugins(asked, recipe, trusted=trusted)
    return formed(asked, config, ["linear"]).forms


def _trained_on_another(run: Path) -> bool:
    """Whether a run's adapter is for another model than the one that it was trained on."""
    record, digests = run / "run.json", run / "adapter" / BASE_WEIGHTS
    if not (record.is_file() and digests.is_file()):
        return False
    content = read_json(record)
    inputs = content.get("inputs") if isinstance(content, dict) else None
    trained_on = inputs.get("model") if isinstance(inputs, dict) else None
    return bool(trained_on) and trained_on != read_json(digests)

"""The task of predicting the next token, with modicum's decoder, on packed text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.core.contracts.ledger import Entry, Ledger, ModelQuery
from modicum.core.contracts.surgery import Surgery
from modicum.core.errors import InputError
from modicum.core.files import read_json
from modicum.core.layers.form_plan import DENSE_FORM, FormPlan, LayerForm
from modicum.core.layers.linear_forms import forms_of, undense
from modicum.core.layers.saved_tensors import Shares
from modicum.core.layers.small_forms import small_forms_of
from modicum.core.progress import StageProgress
from modicum.core.random import derive_seed
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.data.batch import Batch
from modicum.data.rows import Rows
from modicum.data.text_rows import TextRows
from modicum.data.tokenizer import Tokenizer
from modicum.data.view import document_digests
from modicum.models import huggingface, plan_headers, saving
from modicum.models.config import ModelConfig
from modicum.models.decoder_config import DecoderConfig
from modicum.models.decoders import Decoder, config_of, decoder_of
from modicum.models.generate import NotFinite, generate
from modicum.models.ledger import AdapterActivations, held, kept_by_block, slack
from modicum.models.ledger import ledger as model_ledger
from modicum.models.states_bytes import states_bytes
from modicum.models.transformers.held import held_by_transformers
from modicum.recipe import Recipe, SamplesSection
from modicum.tasks import text, text_stream
from modicum.tasks.base import BlockSample, Data, Task, Tensors
from modicum.tasks.metrics import perplexity, right_answers
from modicum.tasks.modes import evaluating
from modicum.tasks.text import TextData, TextInputs

# A trial's model has few tokens: their embedding has no part in a block's time.
_TRIAL_VOCABULARY = 257
_BEGINNING = 32  # tokens of a validation row that a sample continues, at most


class CausalLM(Task[Decoder, Batch, TextInputs]):
    """Cross-entropy of the next token, in nats, over the tokens that are trained."""

    name = "causal_lm"
    unit = "tokens"
    metrics = ("loss", "token_accuracy", "perplexity")
    called = ("continued",)
    rounds = True

    # Planning

    def look(self, recipe: Recipe) -> TextInputs:
        """Check paths, headers and the data's first 1,000 rows."""
        return text.look(recipe)

    def check_weights(self, inputs: TextInputs) -> None:
        """Refuse a folder of config.json without weights."""
        if inputs.model_folder is not None:
            plan_headers.check_weights(inputs.model_folder)

    def data_files(self, recipe: Recipe, inputs: TextInputs) -> Iterable[Path]:
        """Those of all sources."""
        return text.data_files(recipe, inputs)

    def survey(self, recipe: Recipe, inputs: TextInputs) -> Mapping[str, Any]:
        """Rows, tokens and too long examples: of all data where that is little, else about."""
        return text.surveyed(recipe, inputs)

    def check_layout(self, recipe: Recipe, inputs: TextInputs, layout: Layout) -> None:
        """Refuse sharded weights where documents are computed one at a time."""
        text.check_layout(recipe, inputs.config, layout)

    def why_eager(self, recipe: Recipe, inputs: TextInputs) -> str | None:
        """Why blocks are not compiled: documents of any length are computed one at a time."""
        return text.why_eager(recipe, inputs.config)

    def uncompressed(self, config: DecoderConfig, inputs: TextInputs) -> DecoderConfig:
        """The decoder with its layers as the folder holds them."""
        return replace(config, forms=inputs.forms)

    def compressed(self, inputs: TextInputs, folder: Path) -> TextInputs:
        """The inputs with that model, and with the forms that its layers have there."""
        there = FormPlan.from_json(read_json(folder / "config.json").get("forms", {}))
        forms = replace(inputs.config.forms, default=there.default, layers=there.layers)
        config = replace(inputs.config, forms=forms)
        return replace(inputs, model_folder=folder, config=config)

    def reshaped(self, config: DecoderConfig, surgery: Surgery) -> DecoderConfig:
        """The decoder whose layers have the surgery's arguments, such as a rank, or are dense."""
        changed = {}
        for name, arguments in surgery.layers.items():
            form = config.forms.of(name)
            if not arguments or not arguments.keys() <= form.arguments.keys():
                raise InputError(
                    f"this layer's form, {form.name}, has no such arguments",
                    field=f"surgery.{name}",
                    value=dict(arguments),
                    allowed=", ".join(form.arguments) or "none",
                    candidates=config.forms.layers,
                    word=name,
                )
            changed[name] = LayerForm(form.name, {**form.arguments, **arguments})
        changed |= dict.fromkeys(surgery.dense, DENSE_FORM)
        return replace(config, forms=config.forms.with_forms(changed))

    def reconfigured(self, inputs: TextInputs, recipe: Recipe) -> DecoderConfig:
        """The configuration of the model that a changed recipe would have."""
        if inputs.model_folder is not None:
            return text.formed(recipe, replace(inputs.config, forms=inputs.forms))
        config = text.formed(recipe, text.new_config(recipe))
        assert isinstance(config, ModelConfig)
        if inputs.tokenizer is not None:
            config = replace(config, vocabulary_size=inputs.config.vocabulary_size)
        return config

    def row(self, recipe: Recipe) -> ModelQuery:
        """One row: a batch of rows with one document each has no mask; the worst batch counts."""
        return ModelQuery(1, recipe.data.sequence_length, segments=recipe.data.boundaries)

    def ledger(
        self,
        config: DecoderConfig,
        shape: ModelQuery,
        *,
        adapted: AdapterActivations | None = None,
        recompute: bool = False,
        shares: Shares | None = None,
    ) -> Ledger | None:
        """What the decoder spends at the shape of a micro-batch; no policy works on text.

        None for a decoder of transformers, which is traced.
        """
        if not isinstance(config, ModelConfig):
            return None
        return model_ledger(config, shape, adapted=adapted, recompute=recompute)

    def example(self, config: DecoderConfig, shape: ModelQuery) -> Batch:
        """Rows of zeros, of documents where the shape has them."""
        size = (shape.sequences, shape.tokens)
        ids, labels = (torch.zeros(size, dtype=torch.int64) for _ in range(2))
        # Documents that are computed one at a time take no more than a row that is one document.
        together = shape.segments and text.packs(config, shape.tokens)
        documents = torch.zeros(size, dtype=torch.int32) if together else None
        return Batch(ids, labels, documents)

    def sampled(self, recipe: Recipe, config: DecoderConfig, shape: ModelQuery) -> Ledger:
        """Keys and values of the longest text that is written; of one layer as it grows, twice.

        A model that has none reads its text anew, which is not counted.
        """
        tokens = min(_longest(recipe.samples), config.context)
        if not tokens:
            return Ledger()
        total, layer = states_bytes(config, tokens, shape.weight_bytes)
        held = Entry("buffer", total + 2 * layer, ("evaluation",), "keys and values of samples")
        return Ledger.of(held.in_tensors([layer // 2] * (2 * total // max(layer, 1) + 4)))

    def slack(
        self,
        config: DecoderConfig,
        shape: ModelQuery,
        *,
        adapted: AdapterActivations | None = None,
        recompute: bool = False,
    ) -> int:
        """How far the begin of the blocks' backward passes is below the worst of phase `loss`."""
        assert isinstance(config, ModelConfig)
        return slack(config, shape, adapted=adapted, recompute=recompute)

    def kept_by_block(
        self,
        config: DecoderConfig,
        shape: ModelQuery,
        *,
        adapted: AdapterActivations | None = None,
        recompute: bool = False,
    ) -> list[int]:
        """Bytes that each block keeps until its backward pass is over."""
        assert isinstance(config, ModelConfig)
        return kept_by_block(config, shape, adapted=adapted, recompute=recompute)

    def held(self, config: DecoderConfig, item_bytes: int) -> dict[str, Tensors]:
        """Of each parameter, the tensors that represent it: codes and scales, where it is coded."""
        if isinstance(config, ModelConfig):
            return held(config, item_bytes)
        return held_by_transformers(config, item_bytes)

    def largest_bytes(self, config: DecoderConfig, shape: ModelQuery) -> int:
        """Of the logits."""
        return 4 * shape.positions * config.vocabulary_size

    # Building

    def model(self, config: DecoderConfig) -> Decoder:
        """The decoder."""
        return decoder_of(config)

    def fill(self, model: Decoder, inputs: TextInputs, skip: Collection[str] = ()) -> None:
        """Read the folder's weights into a model that has memory."""
        assert inputs.model_folder is not None
        huggingface.fill(model, inputs.model_folder, skip)

    def weights(self, inputs: TextInputs) -> Callable[[str], Tensor] | None:
        """The folder's, read when they are asked for."""
        folder = inputs.model_folder
        return None if folder is None else huggingface.reader(folder)

    def prepare(
        self,
        recipe: Recipe,
        inputs: TextInputs,
        folder: Path,
        progress: StageProgress,
        ranks: Ranks,
    ) -> TextData:
        """Read and check all text, tokenize it once, and pack it; or open it as a stream."""
        if recipe.data.streaming:
            return text_stream.streamed(recipe, inputs, folder, progress, ranks)
        return text.prepared(recipe, inputs, folder, progress, ranks)

    def digests(self, rows: Rows[Batch]) -> Iterator[bytes]:
        """One of each document's tokens."""
        return document_digests(rows) if isinstance(rows, TextRows) else iter(())

    def config(self, inputs: TextInputs, data: Data[Batch]) -> DecoderConfig:
        """The model's configuration, its special tokens those of the tokenizer where it is new."""
        config = inputs.config
        if not isinstance(config, ModelConfig) or inputs.model_folder is not None:
            return config
        eos = _text(data).tokenizer.eos_id
        return replace(config, bos_token_id=eos, eos_token_id=eos, pad_token_id=eos)

    def trial(self, config: DecoderConfig, batch: Batch) -> BlockSample[Batch]:
        """A decoder of one block and few tokens."""
        tried = replace(batch, input_ids=batch.input_ids % _TRIAL_VOCABULARY)
        if not isinstance(config, ModelConfig):
            return BlockSample(config.shortened(_TRIAL_VOCABULARY), tried)
        first = config.block_prefixes()[0]
        small = replace(
            config,
            layers=1,
            forms=config.forms.within([first]),
            vocabulary_size=_TRIAL_VOCABULARY,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return BlockSample(small, tried)

    # In a step

    def outputs(self, model: Decoder, batch: Batch) -> Tensor:
        """Logits [rows, tokens, vocabulary]."""
        logits: Tensor = model(batch.input_ids, batch.documents)
        return logits

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The sum, over the batch's trained tokens, of -log p(label): fp32, one element.

        `batch.count` is the count that belongs to it.
        """
        scores, labels = outputs.flatten(0, 1).float(), batch.labels.flatten()
        return F.cross_entropy(scores, labels, ignore_index=-100, reduction="sum")

    @torch.no_grad()
    def evaluate(self, model: Decoder, batch: Batch) -> dict[str, float]:
        """The sum of losses, and of how many tokens the likeliest is the right one."""
        logits = self.outputs(model, batch)
        right = right_answers(logits, batch.labels)
        return {"loss": float(self.loss_of(logits, batch)), "token_accuracy": right}

    def measures(self, sums: Mapping[str, float], count: int) -> dict[str, Any]:
        """Means over the trained tokens, and the perplexity."""
        means = super().measures(sums, count)
        return {**means, "perplexity": perplexity(means["loss"])}

    # Afterwards

    def samples(
        self, recipe: Recipe, model: Decoder, data: Data[Batch], ranks: Ranks
    ) -> list[dict[str, Any]]:
        """What the model writes after each prompt; the same weights and seed write the same."""
        section, tokenizer = recipe.samples, _text(data).tokenizer
        device = next(model.parameters()).device
        found = []
        with evaluating(model):
            for prompt in prompts(section, tokenizer, _text(data).validation):
                seed = derive_seed(recipe.training.seed, f"sample/{prompt}")
                ids = tokenizer.encode_prompt(prompt)[-(config_of(model).context - 1) :]
                written = generate(
                    model,
                    torch.tensor([ids], device=device),
                    max_tokens=section.tokens,
                    temperature=section.temperature,
                    eos_id=tokenizer.eos_id,
                    generator=torch.Generator().manual_seed(seed),
                    agreed=ranks.broadcast,
                )
                tokens = list[int]()
                with suppress(NotFinite):  # it has diverged, which losses tell; nothing follows
                    tokens.extend(written)
                found.append({"prompt": prompt, "text": tokenizer.decode_after(ids, tokens)})
        return found

    def export(
        self,
        model: Decoder,
        data: Data[Batch],
        folder: Path,
        *,
        write: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a Hugging Face folder; of other forms the dense weights, where there are any."""
        end = _text(data).tokenizer.eos_id
        saving.save(model, folder, files=data.files, write=write, dtype=dtype, end=end)

    def export_small(
        self,
        model: Decoder,
        data: Data[Batch],
        folder: Path,
        *,
        write: bool = True,
        dtype: torch.dtype | None = None,
        every: bool = False,
    ) -> bool:
        """Write a folder of the model as it is, if `export` writes layers of it in another form.

        Layers that are larger in their form than dense are dense here too, unless it is `every`.
        """
        forms = forms_of(model) if every else small_forms_of(model)
        small = forms != undense(forms_of(model))
        if small:
            how: Any = {"write": write, "dtype": dtype, "end": _text(data).tokenizer.eos_id}
            saving.save(model, folder, files=data.files, forms=forms, **how)
        return small


def prompts(section: SamplesSection, tokenizer: Tokenizer, data: TextRows | None) -> list[str]:
    """The recipe's prompts, else the beginnings of validation rows."""
    if section.prompts:
        return list(section.prompts)
    if data is None or not section.count:
        return []
    stride = max(1, len(data) // section.count)
    found = []
    for row in range(0, min(len(data), stride * section.count), stride):
        ids = data.batch([row]).input_ids[0]
        found.append(tokenizer.decode(ids[: min(_BEGINNING, len(ids) // 2)].tolist()))
    return [prompt for prompt in found if prompt]


def _longest(section: SamplesSection) -> int:
    """Tokens of the longest text that is written, its beginning too; 0: none is.

    How many a prompt has is not known before the tokenizer is; two bytes are more than a token.
    """
    if not section.prompts and not section.count:
        return 0
    given = (len(prompt.encode()) // 2 + 1 for prompt in section.prompts)
    return max(given, default=_BEGINNING) + section.tokens


def _text(data: Data[Batch]) -> TextData:
    assert isinstance(data, TextData)
    return data

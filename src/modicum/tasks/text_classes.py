"""The task of telling texts apart, with a classifier of transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from modicum.core.contracts.ledger import ModelQuery
from modicum.core.contracts.method import Info, Method
from modicum.core.errors import InputError
from modicum.core.machine.record import Reads
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.batch import IGNORED
from modicum.data.class_view import row_digests
from modicum.data.pair_tokenizer import PairTokenizer
from modicum.data.rows import Rows
from modicum.data.text_classes import Padding, TextClassBatch, TextClassRows
from modicum.models import plan_headers, saving
from modicum.models.huggingface import ModelHeader, fill_from, reader_of
from modicum.models.transformers.classes import (
    begin_heads,
    check_kind,
    classifier_header,
    longest,
    stored_classes,
)
from modicum.models.transformers.config import TransformersConfig
from modicum.models.transformers.held import held_by_transformers
from modicum.models.transformers.kinds import described
from modicum.models.transformers.model import TransformersClassifier, build
from modicum.recipe import Recipe
from modicum.tasks.base import BlockSample, Data, Inputs, Task, Tensors
from modicum.tasks.metrics import class_metrics, class_sums, right_answers
from modicum.tasks.model_origins import model_folder
from modicum.tasks.text_class_checks import (
    check_asked,
    classifier_shape,
    formed_classifier,
    head_words,
    own_tokenizer,
)
from modicum.tasks.text_class_data import LabelledTexts, labelled_texts, prepared

_TRIAL_VOCABULARY = 257


class TextClasses(Method):
    """Texts, or pairs of texts, into classes, by a model of transformers with a head for that.

    Any architecture that `AutoModelForSequenceClassification` has: encoders such as BERT, RoBERTa
    and DistilBERT, and decoders, which look at the last token that is no padding. The head is the
    architecture's own. Where the folder's head is for these classes it is kept, else a new one
    begins as a function of the seed.

    Args:
        text_columns: the column with the text; two for pairs of texts.
        label_column: the column with the class: a name or an integer.
        classes: their names, in the order of their numbers; empty means all labels, sorted.
        pad_token: what fills rows, for a model whose files do not say; GPT-2's
            `<|endoftext|>`, for instance.
        length_buckets: whether the texts of one update are of similar length, so that little of a
            batch is padding; else they are drawn freely.

    >>> TextClasses(text_columns=("question", "answer")).label_column
    'label'
    """

    info = Info(
        name="text_classes",
        title="Classes of texts, with a model of transformers",
        room="tasks",
        paper="BERT: Pre-training of Deep Bidirectional Transformers, arXiv 1810.04805",
        claim="a task for encoders and decoders of transformers",
        traits=("exact_resume", "varies_length"),
    )

    text_columns: Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=2)] = (
        "text",
    )
    label_column: str = "label"
    classes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    pad_token: str | None = None
    length_buckets: bool = True

    def bind(self, context: Any) -> TextClassTask:  # type: ignore[override]
        """The task; it asks nothing of a context."""
        return TextClassTask(self)


@dataclass(frozen=True)
class TextClassInputs(Inputs):
    """A recipe's model and labelled texts.

    Args:
        header: where the folder's tensors lie.
        new: the parameters that no file holds, which begin by the seed.
        dense: the shape of the model before the recipe's linear forms.
    """

    config: TransformersConfig
    texts: LabelledTexts
    tokenizer: PairTokenizer
    header: ModelHeader
    new: tuple[str, ...]
    dense: TransformersConfig
    seed: int

    @property
    def reads(self) -> Reads:
        """Texts, with the folder's tokenizer."""
        return "tokenizer"


class TextClassTask(Task[TransformersClassifier, TextClassBatch, TextClassInputs]):
    """Cross-entropy of a text's class, in nats, and the share of right answers."""

    name = "text_classes"
    unit = examples = "texts"
    rounds = True
    metrics = ("loss", "accuracy", "macro_f1")

    def __init__(self, asked: TextClasses) -> None:
        self.asked = asked
        self._names: tuple[str, ...] = ()

    # Planning

    def look(self, recipe: Recipe) -> TextClassInputs:
        """Read the labels of all rows, the header of the model, and its tokenizer.

        Raises:
            InputError: with the recipe's field, or the file and line at fault.
        """
        if recipe.model.path is None:
            raise InputError(
                "classes of texts start from a model of transformers; name its folder, as the "
                "ready-made recipe functions-full does",
                field="model.path",
            )
        check_asked(recipe)
        folder = model_folder(recipe)
        try:
            check_kind(folder)
        except InputError as error:
            raise error.located(field="model.path") from None
        tokenizer = own_tokenizer(recipe, folder)
        texts = labelled_texts(recipe, self.asked)
        self._names = texts.names
        dense = classifier_shape(self.asked, folder, tokenizer, texts.names)
        known = stored_classes(folder)
        try:
            header, new = classifier_header(folder, dense, keep_head=known == texts.names)
        except InputError as error:
            raise error.located(field="model.path") from None
        most = longest(dense)
        if recipe.data.sequence_length > most:
            alike = dense.rope_limits.alike(recipe.data.sequence_length)
            rows = "the model's context" if alike else "rows that are alike in every batch"
            raise InputError(
                f"longer than {rows} ({most})",
                field="data.sequence_length",
                value=recipe.data.sequence_length,
                allowed=f"at most {most}",
            )
        words = texts.described + head_words(known, texts, new)
        return TextClassInputs(
            formed_classifier(recipe, dense), folder, words, texts, tokenizer, header, new, dense,
            recipe.training.seed, weights=bool(header.tensors), dtypes=header.dtypes,
        )  # fmt: skip

    def check_weights(self, inputs: TextClassInputs) -> None:
        """Refuse a folder of config.json without weights."""
        assert inputs.model_folder is not None
        plan_headers.check_weights(inputs.model_folder)

    def data_files(self, recipe: Recipe, inputs: TextClassInputs) -> Iterable[Path]:
        """Those of all rows."""
        return inputs.texts.files

    def survey(self, recipe: Recipe, inputs: TextClassInputs) -> Mapping[str, Any]:
        """How many rows are trained, and how many of each class; before what is too long."""
        return {**inputs.texts.counts(), "exact": recipe.data.too_long != "drop"}

    def uncompressed(
        self, config: TransformersConfig, inputs: TextClassInputs
    ) -> TransformersConfig:
        """The classifier with its layers as the folder holds them."""
        return inputs.dense

    def reconfigured(self, inputs: TextClassInputs, recipe: Recipe) -> TransformersConfig:
        """The configuration of the model that a changed recipe would have."""
        check_asked(recipe)
        return formed_classifier(recipe, inputs.dense)

    def row(self, recipe: Recipe) -> ModelQuery:
        """One row, as long as the recipe allows."""
        return ModelQuery(1, recipe.data.sequence_length)

    def example(self, config: TransformersConfig, shape: ModelQuery) -> TextClassBatch:
        """Rows of zeros, as long as the shape has them."""
        size = (shape.sequences, shape.tokens)
        ids, mask = torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.int64)
        labels = torch.zeros(shape.sequences, dtype=torch.int64)
        padding = self._padding(config)
        types = torch.zeros_like(ids) if padding.types else None
        return TextClassBatch(ids, labels, mask if padding.masks else None, types)

    def _padding(self, config: TransformersConfig) -> Padding:
        pairs = len(self.asked.text_columns) > 1
        types = pairs and getattr(described(config.raw), "type_vocab_size", 0) > 1
        return Padding(int(config.raw["pad_token_id"]), config.packing == "mask", types)

    def held(self, config: TransformersConfig, item_bytes: int) -> dict[str, Tensors]:
        """Of each parameter, the tensors that represent it: codes and scales, where it is coded."""
        return held_by_transformers(config, item_bytes)

    def largest_bytes(self, config: TransformersConfig, shape: ModelQuery) -> int:
        """Of the widest thing in a block: what its MLP has inside, or the scores of attention."""
        known = described(config.raw)
        heads, width = known.num_attention_heads, known.hidden_size
        return 4 * shape.positions * max(4 * width, heads * shape.tokens)

    # Building

    def model(self, config: TransformersConfig) -> TransformersClassifier:
        """The classifier."""
        made: TransformersClassifier = build(config)
        return made

    def fill(
        self, model: TransformersClassifier, inputs: TextClassInputs, skip: Collection[str] = ()
    ) -> None:
        """Read the folder's weights into a model that has memory; new ones begin by the seed."""
        fill_from(model, inputs.header, skip)
        begin_heads(model, inputs.new, inputs.seed, skip)

    def weights(self, inputs: TextClassInputs) -> Callable[[str], Tensor] | None:
        """The folder's, read when they are asked for."""
        return reader_of(inputs.header)

    def prepare(
        self,
        recipe: Recipe,
        inputs: TextClassInputs,
        folder: Path,
        progress: StageProgress,
        ranks: Ranks,
    ) -> Data[TextClassBatch]:
        """Tokenize all rows once."""
        padding = self._padding(inputs.config)
        return prepared(
            recipe, inputs.texts, inputs.tokenizer, padding, folder, progress, ranks,
            buckets=self.asked.length_buckets, vocabulary=inputs.config.vocabulary_size,
        )  # fmt: skip

    def digests(self, rows: Rows[TextClassBatch]) -> Iterator[bytes]:
        """One of each row's tokens."""
        assert isinstance(rows, TextClassRows)
        return row_digests(rows)

    def trial(
        self, config: TransformersConfig, batch: TextClassBatch
    ) -> BlockSample[TextClassBatch]:
        """A classifier of one block and few tokens."""
        small = config.shortened(_TRIAL_VOCABULARY)
        assert isinstance(small, TransformersConfig)
        small = replace(small, raw={**small.raw, "pad_token_id": 0})
        return BlockSample(small, replace(batch, input_ids=batch.input_ids % _TRIAL_VOCABULARY))

    # In a step

    def outputs(self, model: TransformersClassifier, batch: TextClassBatch) -> Tensor:
        """Logits [rows, classes]."""
        logits: Tensor = model(batch.input_ids, batch.mask, batch.types)
        return logits

    def loss_of(self, outputs: Tensor, batch: TextClassBatch) -> Tensor:
        """The sum of -log p(label) over the trained labels: fp32, one element."""
        return F.cross_entropy(outputs.float(), batch.labels, ignore_index=IGNORED, reduction="sum")

    @torch.no_grad()
    def evaluate(self, model: TransformersClassifier, batch: TextClassBatch) -> dict[str, float]:
        """The sum of losses, how many answers are right, and counts of each class."""
        logits = self.outputs(model, batch)
        loss, right = float(self.loss_of(logits, batch)), right_answers(logits, batch.labels)
        return {"loss": loss, "accuracy": right, **class_sums(logits, batch.labels)}

    def measures(self, sums: Mapping[str, float], count: int) -> dict[str, Any]:
        """Means of loss and right answers, macro F1, and the accuracy by class."""
        means = super().measures({name: sums[name] for name in ("loss", "accuracy")}, count)
        classes = sum(name.startswith("labelled ") for name in sums)
        return {**means, **class_metrics(sums, self._names or tuple(map(str, range(classes))))}

    # Afterwards

    def export(
        self,
        model: TransformersClassifier,
        data: Data[TextClassBatch],
        folder: Path,
        *,
        write: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a folder that `AutoModelForSequenceClassification` reads, classes named in it."""
        saving.save(model, folder, files=data.files, write=write, dtype=dtype)

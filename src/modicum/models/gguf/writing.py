"""A model as one GGUF file, written tensor by tensor."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.core.files import publish_file
from modicum.core.units import format_bytes
from modicum.data.chat_template import ChatTemplate
from modicum.data.tokenizer import Tokenizer
from modicum.models.decoders import Decoder
from modicum.models.gguf.architectures import (
    TensorNames,
    frequency_factors,
    full_config,
    hyper_parameters,
)
from modicum.models.gguf.vocabulary import portable, vocabulary
from modicum.models.saving import stored

DataType = Literal["f32", "f16", "bf16", "q8_0"]
DTYPES: tuple[DataType, ...] = ("f32", "f16", "bf16", "q8_0")
_FILE_TYPES = {"f32": "ALL_F32", **{name: f"MOSTLY_{name.upper()}" for name in DTYPES[1:]}}
_GROUP = 32  # numbers that share a scale in q8_0
_LARGEST = {"F16": 65504.0, "Q8_0": 65504.0 * 127}  # a scale is a number of fp16
_FACTORS = "rope_freqs.weight"
_SPARE = 1 << 20  # bytes that keys and padding take, and more


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file: its name and shape there, and its type's name (F32, Q8_0...)."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def kind(self) -> Any:
        """The type as the library has it."""
        return _gguf().GGMLQuantizationType[self.type]

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        block, size = _gguf().GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // int(block) * int(size)

    def coded(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The numbers of a tensor as the file holds them.

        Raises:
            InputError: one of them is not finite, or too large for the type.
        """
        values = tensor.detach().cpu().float().contiguous().numpy()
        largest = float(np.abs(values).max(initial=0.0))
        if not largest <= _LARGEST.get(self.type, np.finfo(np.float32).max):
            allowed = f"at most {_LARGEST[self.type]:g}" if self.type in _LARGEST else "finite"
            problem = f"a weight has no value in {self.type.lower()}; take another --dtype"
            raise InputError(problem, field=self.name, value=largest, allowed=allowed)
        coded: np.ndarray[Any, Any] = _gguf().quantize(values, self.kind)
        return coded


def write_model(
    model: Decoder,
    tokenizer: Tokenizer,
    file: str | Path,
    *,
    dtype: DataType = "f16",
    template: ChatTemplate | None = None,
    name: str | None = None,
) -> Path:
    """Write a model, its tokenizer and its chat template as one GGUF file, atomically.

    At its peak it takes the model and two tensors more; of a decoder of transformers, a block
    more. Adapters that are attached are not in it: merge them first. Norms and biases are fp32 in
    every file.

    Args:
        dtype: of the matrices; `q8_0` is 8 bits with an fp16 scale for each 32 numbers of a row,
            and rows that are no multiple of 32 are fp16 there.
        template: what the model was trained to answer in.
        name: of the model, for people.

    Raises:
        InputError: llama.cpp is not known to compute this model, or to read its tokenizer, as it
            was trained; the library `gguf` is missing; or the disk is full or cannot be written.
    """
    plain, groups = stored(model)
    raw = full_config(model, plain)
    names, factors = TensorNames(raw), frequency_factors(raw)
    words = vocabulary(tokenizer, raw["vocab_size"])
    tensors = [
        planned(names.of(each), shape, dtype)
        for group in groups
        for each, shape in group.shapes.items()
    ]
    if factors is not None:
        tensors.insert(0, planned(_FACTORS, tuple(factors.shape), "f32"))
    with opened(Path(file), names.architecture.name, tensors) as (writer, write):
        writer.add_type("model")
        if name:
            writer.add_name(name)
        writer.add_file_type(int(_gguf().LlamaFileType[_FILE_TYPES[dtype]]))
        writer.add_quantization_version(_gguf().GGML_QUANT_VERSION)
        hyper_parameters(writer, raw)
        words.write(writer)
        if template is not None:
            writer.add_chat_template(portable(template.source))
        if factors is not None:
            write(factors)
        for group in groups:
            made = group.make()
            for each in group.shapes:
                write(names.change(each)(made[each]))
    return Path(file)


def planned(name: str, shape: tuple[int, ...], dtype: DataType) -> GgufTensor:
    """A tensor with the type that it has in a file of `dtype`."""
    if len(shape) == 1:
        return GgufTensor(name, shape, "F32")
    if dtype == "q8_0" and shape[-1] % _GROUP:
        return GgufTensor(name, shape, "F16")
    return GgufTensor(name, shape, dtype.upper())


@contextmanager
def opened(
    file: Path, architecture: str, tensors: Sequence[GgufTensor]
) -> Iterator[tuple[Any, Any]]:
    """A `gguf.GGUFWriter` for keys, and what writes the next of `tensors`, given its numbers.

    All keys are added before the first tensor is written. The file is there when the block ends
    well, and otherwise as it was.

    Raises:
        InputError: the disk is full or cannot be written.
    """
    with publish_file(file) as temporary:
        _check_room(file, sum(tensor.bytes for tensor in tensors))
        writer = _gguf().GGUFWriter(temporary, architecture)
        left = iter(tensors)
        begun = False

        def write(numbers: Tensor) -> None:
            nonlocal begun
            if not begun:
                _begin(writer, tensors)
                begun = True
            writer.write_tensor_data(next(left).coded(numbers))

        try:
            yield writer, write
        finally:
            writer.close()


def _begin(writer: Any, tensors: Sequence[GgufTensor]) -> None:
    """Write what stands before the numbers: keys, and the name, shape and place of each tensor."""
    for each in tensors:
        plain = np.dtype(np.float32)  # the shape is that of numbers, not of coded bytes
        writer.add_tensor_info(each.name, each.shape, plain, each.bytes, raw_dtype=each.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _check_room(file: Path, needed: int) -> None:
    # NumPy says of a full disk only how many numbers it has written.
    free = shutil.disk_usage(file.parent).free
    if free < needed + _SPARE:
        problem = f"the disk is full: {format_bytes(needed)} are needed, {format_bytes(free)} free"
        raise InputError(problem, file=file)


def _gguf() -> Any:
    return library("gguf", "gguf", "a GGUF file")

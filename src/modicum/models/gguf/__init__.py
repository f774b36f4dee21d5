"""Models as GGUF, the files of llama.cpp: one file with weights, tokenizer and chat template.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and llama.cpp's own converters.
"""

from modicum.models.gguf.adapter import write_adapter
from modicum.models.gguf.writing import DTYPES, write_model

__all__ = ["DTYPES", "write_adapter", "write_model"]

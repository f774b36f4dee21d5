"""Text to token ids and back, over Hugging Face's `tokenizers`; trained here or loaded."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.errors import InputError
from modicum.core.files import json_object, read_text, write_text
from modicum.data.chat_template import (
    TOOL_FILE,
    ChatTemplate,
    flattened,
    own_template,
    special_tokens,
)
from modicum.data.named_templates import END
from modicum.data.tokenizer_files import CONFIGURATION, MODEL, end_of_text, model_file

if TYPE_CHECKING:
    import tokenizers

_BYTES = 256  # each is a token; with an end, the smallest vocabulary has one more
# Kept next to the model as they were found, so that a saved tokenizer is the one that was loaded.
_TEMPLATE = "chat_template.jinja"
_COMPANIONS = (CONFIGURATION, "special_tokens_map.json", _TEMPLATE, TOOL_FILE)
# Text is encoded in pieces of about this many characters: bounds the scratch memory, and gives
# every core something to do on a long document.
_PIECE = 1 << 17
# Between a line's end and the next line's first letter no byte-level split rule has a word.
_SEAM = re.compile(r"(?<=\S\n)(?=\S)")


class Tokenizer:
    """A fast tokenizer with an end-of-text token.

    Args:
        inner: the `tokenizers.Tokenizer` that does the work.
        eos_id: the token that ends every document.
        companions: the texts of files that belong next to tokenizer.json, by name.

    >>> tokenizer = Tokenizer.train(iter(["to be or not to be"] * 9), vocabulary_size=260)
    >>> tokenizer.decode(tokenizer.encode("or not"))
    'or not'
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, eos_id: int, companions: dict[str, str] | None = None
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        self.inner, self.eos_id, self.companions = inner, eos_id, dict(companions or {})

    @classmethod
    def train(
        cls,
        texts: Iterator[str],
        vocabulary_size: int,
        progress: Callable[[int, int | None], None] | None = None,
        *,
        template: ChatTemplate | None = None,
    ) -> Tokenizer:
        """Byte-level BPE on `texts`: the same texts give the same tokenizer, on any machine.

        Fewer tokens than `vocabulary_size` come out when the texts hold too few repeated pairs.
        `progress` is called with the bytes read so far.

        Args:
            template: what wrote the texts; the tokenizer gets it, with its special tokens, and
                ends texts as it ends a turn.

        Raises:
            InputError: the vocabulary is too small, or `tokenizers` is not installed.
        """
        tokens = {"eos_token": END} if template is None else {"eos_token": END, **template.tokens}
        end = tokens["eos_token"]
        special = list(dict.fromkeys([end, *(template.special if template is not None else ())]))
        if vocabulary_size < _BYTES + len(special):
            raise InputError(
                f"a byte-level vocabulary needs at least {_BYTES + len(special)} tokens, one for "
                f"each byte and {', '.join(special)}",
                value=vocabulary_size,
            )
        between = re.compile("|".join(map(re.escape, special)))
        library = _library()

        def pieces() -> Iterator[str]:
            done = 0
            for text in texts:
                done += len(text.encode())
                for part in between.split(text):
                    yield from split(part)
                if progress is not None:
                    progress(done, None)

        inner = library.Tokenizer(library.models.BPE())
        inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            min_frequency=2,
            special_tokens=special,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(pieces(), trainer)
        configuration = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **tokens,
            "pad_token": end,
            "clean_up_tokenization_spaces": False,
        }
        companions = {CONFIGURATION: json.dumps(configuration, indent=2) + "\n"}
        if template is not None:
            companions[_TEMPLATE] = template.source
        return cls(inner, inner.token_to_id(end), companions)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder, or of one tokenizer.json and what is next to it.

        Raises:
            InputError: there is none, it is of another kind or broken, or nothing says which
                token ends a text.
        """
        file = Path(path).expanduser()
        if file.is_dir():
            file = model_file(file)
        elif not file.is_file():
            raise InputError("there is no such tokenizer file or folder", file=file)
        library = _library()
        try:
            inner = library.Tokenizer.from_str(read_text(file))
        except (InputError, KeyboardInterrupt, SystemExit):
            raise
        # The library raises plain `Exception` for what is wrong, and where Rust panics another.
        except BaseException as error:
            raise InputError(f"this is no tokenizer: {error}", file=file) from error
        beside = ((name, file.parent / name) for name in _COMPANIONS)
        companions = {name: read_text(there) for name, there in beside if there.is_file()}
        for name in companions.keys() - {_TEMPLATE, TOOL_FILE}:
            json_object(file.parent / name)
        return cls(inner, end_of_text(file, inner), flattened(companions))

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and its companions, as `transformers.AutoTokenizer` loads them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        configuration = json.loads(self.companions.get(CONFIGURATION, "{}"))
        companions = self.companions
        if not configuration.get("eos_token"):
            configuration["eos_token"] = self.token(self.eos_id)
            companions = companions | {CONFIGURATION: json.dumps(configuration, indent=2) + "\n"}
        for name, text in companions.items():
            write_text(folder / name, text)
        write_text(folder / MODEL, self.inner.to_str(pretty=True))

    @cached_property
    def vocabulary_size(self) -> int:
        """One more than the largest token id, added tokens among them."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def begin_ids(self) -> tuple[int, ...]:
        """The tokens that this tokenizer puts before every text, such as Llama's `<s>`."""
        encoding = self.inner.encode("a", add_special_tokens=True)
        special = sum(takewhile(bool, encoding.special_tokens_mask))
        return tuple(encoding.ids[:special])

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and so on, as chat templates name them.

        Where the files next to the tokenizer spell no end, it is the one that ends every text:
        GPT-2's files give its number alone.
        """
        known, end = special_tokens(self.companions), self.token(self.eos_id)
        return known if end is None else {"eos_token": end, **known}

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """What writes conversations for the model, if its files have one.

        Raises:
            InputError: they have several.
        """
        return own_template(self.companions, self.special_tokens)

    def with_template(self, source: str) -> Tokenizer:
        """The same tokenizer with this chat template."""
        if self.chat_template is not None and self.chat_template.source == source:
            return self
        companions = self.companions | {_TEMPLATE: source}
        return Tokenizer(self.inner, self.eos_id, companions)

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of all that decides the ids of a text."""
        text = f"{self.inner.to_str()}\n{self.eos_id}"
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone, with nothing before or after it."""
        return self.encode_batch([text])[0]

    def encode_prompt(self, text: str) -> list[int]:
        """The ids that a model is given to continue `text`: `begin_ids`, then the text's."""
        return [*self.begin_ids, *self.encode(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text; all cores work on them."""
        pieces = [split(text) for text in texts]
        flat = [piece for parts in pieces for piece in parts]
        encoded = iter(self.inner.encode_batch_fast(flat, add_special_tokens=False))
        return [[token for _ in parts for token in next(encoded).ids] for parts in pieces]

    def encode_marked(
        self, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> list[tuple[list[int], bytes]]:
        """The ids of each text, and for each id a byte: 1 where it has a character of a span.

        Special tokens that a text names are these tokens; nothing is put before it.
        """
        found = []
        encodings = self.inner.encode_batch(list(texts), add_special_tokens=False)
        for encoding, marked in zip(encodings, spans, strict=True):
            flags = bytearray(len(encoding.ids))
            # Both are in the order of the text.
            left = iter(marked)
            start, end = next(left, (0, 0))
            for place, (first, last) in enumerate(encoding.offsets):
                while end <= first and end:
                    start, end = next(left, (0, 0))
                flags[place] = first < end and last > start
            found.append((encoding.ids, bytes(flags)))
        return found

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no complete character become U+FFFD."""
        return self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text that `ids` add to that of the tokens before them.

        Some decoders drop a blank at the begin of a text, which is none in the middle of one.
        """
        known = self.decode(before)
        text = self.decode([*before, *ids])
        return text[len(known) :] if text.startswith(known) else self.decode(ids)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of one id, or None when it has no such id."""
        return self.inner.id_to_token(token_id)


def split(text: str) -> list[str]:
    """`text` in pieces of about 130,000 characters, split where no token is, if possible.

    >>> "".join(split("a line\\n" * 50_000)) == "a line\\n" * 50_000
    True
    """
    pieces, start = [], 0
    while len(text) - start > _PIECE:
        seams = (seam.start() for seam in _SEAM.finditer(text, start + _PIECE // 2, start + _PIECE))
        end = max(seams, default=start + _PIECE)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise InputError(
            "tokenizers is not installed, and reading text needs it: pip install modicum[cli]"
        ) from error
    return tokenizers

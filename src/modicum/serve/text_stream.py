"""Tokens to text as they come: characters of several tokens, and strings at which to stop."""

from __future__ import annotations

from collections.abc import Sequence

from modicum.data.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 16  # tokens that are decoded again with the next one, so that their text is as in one


class TextStream:
    """The text of tokens, given out as soon as it is certain.

    What may be the beginning of a character, or of a stop string, is held back until more comes.

    Args:
        stops: the text ends before the first of these that appears.

    Attributes:
        stopped: whether one has appeared.
        length: characters of the tokens so far, of what may begin a stop string too.
        unfinished: whether the last tokens are no complete character yet.

    >>> tokenizer = Tokenizer.train(iter(["to be or not to be"] * 9), vocabulary_size=260)
    >>> stream = TextStream(tokenizer, ["not"])
    >>> "".join(stream.add(token) for token in tokenizer.encode("to be or not"))
    'to be or '
    >>> stream.stopped
    True
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._ids: list[int] = []  # the last tokens; the text of the first ones was given out
        self._known = ""  # the text of those that are complete
        self._held = ""
        self.stopped = self.unfinished = False
        self.length = 0

    def add(self, token: int) -> str:
        """Take one token; the text that is certain now.

        Raises:
            ValueError: the text has ended.
        """
        if self.stopped:
            raise ValueError("a stop string has ended this text")
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        self.unfinished = text.endswith(REPLACEMENT)
        if self.unfinished:
            return ""
        new = text[len(self._known) :]
        self._known = text
        if len(self._ids) > 2 * _WINDOW:
            self._shorten()
        return self._released(new)

    def finish(self) -> str:
        """The text that was held back, now that no more tokens come."""
        if self.stopped:
            return ""
        rest = self._released(self._tokenizer.decode(self._ids)[len(self._known) :])
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        return rest

    def _shorten(self) -> None:
        """Forget tokens whose text was given out, but not within a character."""
        kept = self._ids[-_WINDOW:]
        text = self._tokenizer.decode(kept)
        if self._known.endswith(text):
            self._ids, self._known = kept, text

    def _released(self, new: str) -> str:
        """Of what is held and what is new, that which is no beginning of a stop string."""
        self.length += len(new)
        text = self._held + new
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        most = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - most :]
        return text[: len(text) - most]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text begin a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)

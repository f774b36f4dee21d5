"""Tokens to text as they come: characters of several tokens, and strings at which to stop."""

from __future__ import annotations

from collections.abc import Sequence

from modicum.data.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 16  # tokens that are decoded again with the next one, so that their text is as in one
_PATIENCE = 8  # tokens that may be no complete character; it has four bytes at most
_UNSURE = 3  # of bytes that are none, the characters at the end that later bytes may change


class TextStream:
    """The text of tokens, given out as soon as it is certain.

    What may be the beginning of a character, or of a stop string, is held back until more comes.

    Args:
        stops: the text ends before the first of these that appears.
        after: tokens of the text that this one continues: some decoders drop a blank at the begin.

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

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), after: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        # The last tokens; the text of the first ones was given out.
        self._ids = list(after[-_WINDOW:])
        # Their text, as far as it is certain.
        self._known = tokenizer.decode(self._ids) if self._ids else ""
        self._held = ""
        self.stopped = self.unfinished = False
        self.length = self._waiting = 0

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
        self._waiting = self._waiting + 1 if self.unfinished else 0
        end = len(text)
        if self.unfinished:  # a longer run of bytes is no character, but its end may begin one
            end = len(text) - _UNSURE if self._waiting > _PATIENCE else 0
            if end <= len(self._known):
                return ""
        new = text[len(self._known) : end]
        self._known = text[:end]
        if len(self._ids) > 2 * _WINDOW:
            self._shorten(text)
        return self._released(new)

    def finish(self) -> str:
        """The text that was held back, now that no more tokens come."""
        if self.stopped:
            return ""
        rest = self._released(self._tokenizer.decode(self._ids)[len(self._known) :])
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        return rest

    def _shorten(self, text: str) -> None:
        """Forget tokens whose text was given out, but not within a character.

        Args:
            text: of all tokens that are kept so far.
        """
        kept, unknown = self._ids[-_WINDOW:], len(text) - len(self._known)
        own = self._tokenizer.decode(kept)
        if text.endswith(own) and len(own) >= unknown and not (unknown and self._may_become(kept)):
            self._ids, self._known = kept, own[: len(own) - unknown]

    def _may_become(self, ids: list[int]) -> bool:
        """Whether these are characters and the beginning of one, which some decoders show as none.

        They take a run of bytes for characters only where all of it is.
        """
        decode, places = self._tokenizer.decode, range(1, _UNSURE + 1)
        return not all(decode(ids[:-place]).endswith(REPLACEMENT) for place in places)

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

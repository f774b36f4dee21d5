"""Serving: text from the model that a run made."""

from modicum.serve.conversation import Conversation, load_run

__all__ = ["Conversation", "load_run"]

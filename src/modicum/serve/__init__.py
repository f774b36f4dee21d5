"""Serving: what a run made, loaded: text that it writes, or the model with its adapter."""

from modicum.serve.adapted import load_adapted
from modicum.serve.conversation import Conversation, load_run

__all__ = ["Conversation", "load_adapted", "load_run"]

"""Runs followed in a browser while they train: a small server that only reads their folders."""

from __future__ import annotations

from modicum.report.watch.followed import FollowedRuns
from modicum.report.watch.server import watch

__all__ = ["FollowedRuns", "watch"]

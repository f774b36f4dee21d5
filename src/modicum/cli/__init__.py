"""The `modicum` command."""

"""`modicum schema`: what a recipe may hold, as JSON schema."""

from __future__ import annotations


def schema() -> None:
    """Print the recipe's JSON schema, for editors."""
    from modicum.cli.tables import print_json
    from modicum.recipe.json_schema import json_schema

    print_json(json_schema())

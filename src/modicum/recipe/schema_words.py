"""What a field takes, in words: read from the JSON schema of its section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORDS = {"string": "text", "boolean": "true or false"}


def words_of(value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """The type that a field's schema describes.

    Args:
        value: of the field.
        schema: where what it refers to is described.

    >>> words_of({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {})
    'integer or null'
    >>> words_of({"enum": ["nf4", "fp4"]}, {})
    '`nf4`, `fp4`'
    """
    value = section_of(value, schema)
    if "anyOf" in value:
        return " or ".join(words_of(option, schema) for option in value["anyOf"])
    if "enum" in value:
        return ", ".join(f"`{word}`" for word in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if "prefixItems" in value:
        return f"list: {', '.join(words_of(item, schema) for item in value['prefixItems'])}"
    if value.get("type") == "array":
        return f"list of {words_of(value['items'], schema)}"
    kinds: list[str] = value["type"] if isinstance(value["type"], list) else [value["type"]]
    return " or ".join(WORDS.get(kind, kind) for kind in kinds)


def section_of(value: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a reference points to; of alternatives, the one that is a section."""
    if "$ref" in value:
        target: dict[str, Any] = schema["$defs"][value["$ref"].removeprefix("#/$defs/")]
        return target
    for option in value.get("anyOf", ()):
        target = dict(section_of(option, schema))
        if "properties" in target:
            return target
    return value

from __future__ import annotations

import subprocess
import sys

import pytest

import modicum.data


def test_looking_at_data_imports_neither_torch_nor_tokenizers(tmp_path):
    (tmp_path / "a.txt").write_text("some words\n")
    program = (
        "import sys, modicum.data as data\n"
        f"print(data.inspect(data.open_source({str(tmp_path)!r})).documents)\n"
        "import modicum.data.store, modicum.data.tokenizer\n"
        "print([name for name in ('torch', 'tokenizers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["1", "[]"]


@pytest.mark.parametrize("name", modicum.data.__all__)
def test_every_public_name_is_there(name):
    assert getattr(modicum.data, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Pakced'"):
        modicum.data.Pakced  # noqa: B018 - looking it up is the test

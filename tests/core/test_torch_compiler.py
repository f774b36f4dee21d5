"""Settings of torch's compiler, which hold while a context lasts and leave nothing."""

from __future__ import annotations

import threading

import pytest
import torch._inductor.config as inductor
import torch.compiler.config as cached

from modicum.core import torch_compiler


def settings() -> torch_compiler.AbstractContextManager[None]:
    return torch_compiler.compiler_settings({"recompile_limit": 77}, {"deterministic": True})


def test_settings_hold_while_the_context_lasts() -> None:
    import torch._dynamo.config as dynamo

    before = dynamo.recompile_limit, inductor.deterministic, cached.cache_key_tag
    for _ in range(2):
        with settings():
            assert (dynamo.recompile_limit, inductor.deterministic) == (77, True)
        assert (dynamo.recompile_limit, inductor.deterministic, cached.cache_key_tag) == before


def test_a_thread_makes_each_patch_once() -> None:
    def enter() -> None:
        with settings():
            pass

    enter()
    before = torch_compiler._patch.cache_info().currsize
    for _ in range(5):
        enter()
    assert torch_compiler._patch.cache_info().currsize == before
    other = threading.Thread(target=enter)
    other.start()
    other.join()
    assert torch_compiler._patch.cache_info().currsize > before


def test_a_tag_of_the_user_s_stays_a_part_of_the_key() -> None:
    kernel = torch_compiler._kernels_of_loops()
    if kernel is None or "aggregate_reduction_buffers" not in vars(kernel):
        pytest.skip("this version of torch has no such kernels")
    with cached.patch(cache_key_tag="mine"), settings():
        assert cached.cache_key_tag == "mine sums within rows"
    with settings():
        assert cached.cache_key_tag == "sums within rows"

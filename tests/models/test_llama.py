from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from modicum.models import Llama, ModelConfig, create
from modicum.models.rope import document_positions
from modicum.proofs.bench.meters import saved_bytes

LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def lively(config: ModelConfig, seed: int = 0) -> Llama:
    """A model in which every parameter matters: no zero bias, no norm of ones."""
    model = create(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return model


def theirs(model: Llama) -> torch.nn.Module:
    """The same model in transformers."""
    raw = model.config.to_hf()
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    twin = twin.to_empty(device="cpu")
    # Non-persistent buffers were made on meta too: make them anew.
    twin.model.rotary_emb = type(twin.model.rotary_emb)(twin.config)
    missing = twin.load_state_dict(model.state_dict(), strict=False)
    assert not missing.unexpected_keys
    twin.tie_weights()
    return twin.eval()


def small(**changes: Any) -> ModelConfig:
    sizes = {"vocabulary_size": 29, "width": 16, "layers": 2, "heads": 4, "context": 48}
    return ModelConfig(**(sizes | {"mlp_width": 24, "kv_heads": 2} | changes))


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (4, 2), (6, 3)]),
    head_width=st.sampled_from([2, 4, 10]),
    layers=st.integers(1, 3),
    length=st.integers(1, 40),
    tied=st.booleans(),
    biases=st.tuples(st.booleans(), st.booleans()),
    scaling=st.sampled_from([None, LINEAR, LLAMA3]),
    model_type=st.sampled_from(["llama", "llama", "mistral", "qwen2"]),
    theta=st.sampled_from([100.0, 10000.0, 5e5]),
)
def test_logits_equal_those_of_transformers(
    heads: tuple[int, int],
    head_width: int,
    layers: int,
    length: int,
    tied: bool,
    biases: tuple[bool, bool],
    scaling: dict[str, Any] | None,
    model_type: str,
    theta: float,
) -> None:
    llama = model_type == "llama"
    config = small(
        width=12,
        layers=layers,
        heads=heads[0],
        kv_heads=heads[1],
        head_width=head_width,
        tied_embeddings=tied,
        attention_bias=biases[0] if llama else model_type == "qwen2",
        mlp_bias=llama and biases[1],
        rope_scaling=scaling,
        rope_theta=theta,
        model_type=model_type,
        hf_extra={"sliding_window": None},
    )
    model = lively(config)
    ids = torch.randint(0, 29, (2, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        expected = theirs(model)(ids).logits
        assert (model(ids) - expected).abs().max() < 1e-5
    assert expected.std() > 0.05


def test_gradients_equal_those_of_transformers() -> None:
    model = lively(small())
    twin = theirs(model)
    ids = torch.randint(0, 29, (2, 12), generator=torch.Generator().manual_seed(0))
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    F.cross_entropy(twin(ids).logits.flatten(0, 1), ids.flatten()).backward()
    expected = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name].grad, atol=1e-5), name


def packed() -> tuple[torch.Tensor, torch.Tensor, list[list[tuple[int, int]]]]:
    """Two rows of documents of different lengths, and where each document lies."""
    lengths = [[5, 1, 9, 3], [12, 6]]
    documents = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in lengths])
    ids = torch.randint(0, 29, documents.shape, generator=torch.Generator().manual_seed(1))
    spans = [[(sum(row[:i]), sum(row[: i + 1])) for i in range(len(row))] for row in lengths]
    return ids, documents.int(), spans


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_packed_documents_do_not_see_each_other(kv_heads: int, recompute: bool) -> None:
    model = lively(small(kv_heads=kv_heads))
    model.recompute = recompute
    ids, documents, spans = packed()
    together = model(ids, documents)
    for row, places in enumerate(spans):
        for start, end in places:
            alone = model(ids[row : row + 1, start:end])[0]
            assert (together[row, start:end] - alone).abs().max() < 1e-5


def test_positions_restart_with_each_document() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 0, 0]])
    assert document_positions(documents).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1]]


@pytest.mark.parametrize("chunks", [[1] * 11, [4, 1, 3, 3], [11]])
def test_cached_steps_equal_the_full_pass(chunks: list[int]) -> None:
    model = lively(small(rope_scaling=LLAMA3)).eval()
    ids = torch.randint(0, 29, (2, 11), generator=torch.Generator().manual_seed(2))
    states, pieces = model.new_states(2, 11), []
    with torch.no_grad():
        for piece in ids.split(chunks, dim=1):
            logits, states = model(piece, states=states)
            pieces.append(logits)
        assert (torch.cat(pieces, 1) - model(ids)).abs().max() < 1e-5
        assert states.position == 11
        with pytest.raises(ValueError, match="12 tokens in a state that holds 11"):
            model(ids[:, :1], states=states)


def test_documents_and_states_together_are_refused() -> None:
    model = create(small(), 0)
    ids = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="cannot be split into documents"):
        model(ids, ids, states=model.new_states(1))


@pytest.mark.parametrize("autocast", [False, True])
def test_recomputed_gradients_are_the_same_bits(autocast: bool) -> None:
    ids, documents, _ = packed()
    gradients = []
    for recompute in (False, True):
        model = lively(small())
        model.recompute = recompute
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(ids, documents)
        F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))


def kept_bytes(model: Llama, ids: torch.Tensor) -> int:
    with saved_bytes(model.parameters()) as saved:
        model(ids)
    return saved.total


def test_recomputing_keeps_one_input_a_block() -> None:
    model = lively(small(layers=4))
    ids = torch.zeros(2, 32, dtype=torch.long)
    kept = kept_bytes(model, ids)
    model.recompute = True
    block_input = 2 * 32 * 16 * 4
    assert kept_bytes(model, ids) < 4 * block_input + 0.15 * kept


def test_bfloat16_stays_near_float32() -> None:
    model = lively(small())
    ids, documents, _ = packed()
    exact = model(ids, documents)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(ids, documents)
    low = model.to(torch.bfloat16)(ids, documents)
    assert mixed.dtype == low.dtype == torch.bfloat16
    for logits in (mixed, low):
        assert (logits - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_model_on_meta_allocates_nothing_and_computes_right_afterwards() -> None:
    huge = ModelConfig(vocabulary_size=10**6, width=2**15, layers=4, heads=32)
    with torch.device("meta"):
        model = Llama(huge)
        logits = model(torch.zeros(2, 8, dtype=torch.long))
    assert logits.shape == (2, 8, 10**6)
    tensors = [*model.parameters(), *model.buffers(), logits]
    assert all(tensor.is_meta for tensor in tensors)
    config = small(rope_scaling=LLAMA3)
    with torch.device("meta"):
        model = Llama(config)
        model(torch.zeros(1, 4, dtype=torch.long))
    weights = lively(config)
    model.to_empty(device="cpu").load_state_dict(weights.state_dict())
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(model(ids), weights(ids))


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    first, again, other = (create(small(), seed).state_dict() for seed in (3, 3, 4))
    deeper = create(small(layers=3), 3).state_dict()
    name = "model.layers.1.self_attn.q_proj.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])
    assert torch.equal(first[name], deeper[name])


def test_initial_weights_have_the_promised_spread() -> None:
    model = create(ModelConfig(200, 64, 8, 4, attention_bias=True, initializer_range=0.05), 0)
    values = dict(model.named_parameters())
    assert values["model.embed_tokens.weight"].std().item() == pytest.approx(0.05, rel=0.03)
    residual = values["model.layers.3.mlp.down_proj.weight"].std().item()
    assert residual == pytest.approx(0.05 / 4, rel=0.05)
    assert (values["model.layers.0.self_attn.q_proj.bias"] == 0).all()
    assert (values["model.norm.weight"] == 1).all()


def test_initialising_what_has_no_memory_is_refused() -> None:
    with torch.device("meta"):
        model = Llama(small())
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight has no memory"):
        model.initialise(0)


def test_tied_embeddings_are_one_parameter_and_learn_from_both_ends() -> None:
    model = lively(small(tied_embeddings=True))
    assert model.lm_head is None
    assert "lm_head.weight" not in model.state_dict()
    ids = torch.tensor([[1, 2]])
    model(ids).logsumexp(-1).sum().backward()
    gradient = model.model.embed_tokens.weight.grad
    assert (gradient.abs().sum(1) > 0).all()

"""Rows of one batch with different adapters, and weights: against PEFT, other places, refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import Adapter, Compacter, LoRA, PiSSA, SHiRA, adapter_names, load
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import llama, numbers, stir, tokens

NAMES = ("law", None, "code", "law")


def two(model: nn.Module, **fields: object) -> None:
    for name in ("law", "code"):
        stir(LoRA(rank=2, **fields).attach(model, name=name))


RANKS = {"law": LoRA(rank=2), "code": LoRA(rank=3, alpha=5.0)}
STABILIZED = {"law": LoRA(rank=3, rank_stabilized=True), "code": LoRA(rank=1)}


@pytest.mark.parametrize("methods", [RANKS, STABILIZED], ids=["ranks", "rslora"])
def test_rows_are_those_of_peft(methods: Mapping[str, LoRA], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=29,
    )
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()
    plain.save_pretrained(tmp_path / "base")

    def fresh() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()

    for name, method in methods.items():
        adapter = stir(method.attach(model := fresh(), name=name))
        adapter.save(tmp_path / name)
    theirs = peft.PeftModel.from_pretrained(fresh(), tmp_path / "law", adapter_name="law")
    theirs.load_adapter(tmp_path / "code", "code")
    ours = fresh()
    for name in methods:
        load(ours, tmp_path / name, name=name)
    ids = tokens(4)
    with torch.no_grad(), adapter_names(ours, NAMES):
        found = ours(ids).logits
    with torch.no_grad():
        expected = theirs(ids, adapter_names=[name or "__base__" for name in NAMES]).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(found, model(ids).logits, atol=1e-2)


def test_gradients_are_those_of_each_row_alone() -> None:
    model, ids = llama().double(), tokens(4)
    two(model)
    adapters = {n: value for n, value in model.named_parameters() if "layers_by_adapter" in n}
    for parameter in adapters.values():
        parameter.requires_grad_(True)

    def gradients(work: Sequence[tuple[tuple[str | None, ...], Tensor]]) -> dict[str, Tensor]:
        model.zero_grad()
        for names, rows in work:
            with adapter_names(model, names):
                model(rows).square().sum().backward()
        return {n: torch.zeros_like(v) if v.grad is None else v.grad for n, v in adapters.items()}

    together = gradients([(NAMES, ids)])
    alone = [((name,), ids[row : row + 1]) for row, name in enumerate(NAMES) if name is not None]
    apart = gradients(alone)
    for name, value in apart.items():
        torch.testing.assert_close(together[name], value)
        assert value.any()


@pytest.mark.parametrize("also", [("*norm",), ("lm_head",)])
def test_rows_use_their_own_copies(also: tuple[str, ...]) -> None:
    model, ids = llama().double(), tokens(4)
    two(model, also=also)
    alone = {}
    for name in NAMES:
        with adapter_names(model, [name] * 4):
            alone[name] = model(ids)
    with adapter_names(model, NAMES):
        found = model(ids)
    for row, name in enumerate(NAMES):
        torch.testing.assert_close(found[row], alone[name][row])


def test_a_method_on_slices_and_one_behind_blocks_share_a_batch() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=29, n_positions=32)
    torch.manual_seed(0)
    model, ids = transformers.GPT2LMHeadModel(config).eval().double(), tokens(4)
    stir(LoRA(rank=2, targets=("q_proj", "v_proj")).attach(model, name="law"))
    behind = Compacter(targets=("all-branches",), reduction_factor=2, phm_dim=2)
    stir(behind.attach(model, name="code"))
    alone = {}
    for name in set(NAMES):
        with adapter_names(model, [name] * 4):
            alone[name] = model(ids).logits
    assert not torch.allclose(alone["law"], alone["code"])
    with adapter_names(model, NAMES):
        found = model(ids).logits
    for row, name in enumerate(NAMES):
        torch.testing.assert_close(found[row], alone[name][row])


def test_what_was_active_is_active_again_after_an_error() -> None:
    model, ids = llama(), tokens(4)
    two(model)
    before = model(ids)
    said = "whose first dimension is not a row for each name"
    with pytest.raises(InputError, match=said), adapter_names(model, NAMES[:3]):
        model(ids)
    assert torch.equal(model(ids), before)
    assert not any("row_groups" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "needs a name for each row"),
        (("law", "laws"), "no adapter on this model has this name"),
        (("law", None), "is merged into the weights"),
    ],
)
def test_names_that_cannot_be(names: tuple[str | None, ...], said: str) -> None:
    model = llama()
    two(model)
    if "merged" in said:
        stir(LoRA(rank=2).attach(model, name="third")).merge()
    with pytest.raises(InputError, match=said), adapter_names(model, names):
        pass


def test_a_module_of_several_tensors_with_copies_is_refused() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.linear = nn.Linear(4, 4)

        def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
            output: Tensor = self.linear(inputs * self.scale * mask)
            return output

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, inputs: Tensor) -> Tensor:
            output: Tensor = self.pair(inputs, inputs)
            return output

    model = Model()
    LoRA(rank=1, also=("pair.scale",)).attach(model, name="law")
    names = ["law", None]
    with pytest.raises(InputError, match="takes several tensors"), adapter_names(model, names):
        model(numbers(2, 4))


# Weights


def test_weights_add_up_and_are_merged() -> None:
    model, ids = llama().double(), tokens(4)
    law, code = (stir(LoRA(rank=2).attach(model, name=name)) for name in ("law", "code"))
    law.activate(0.7)
    code.activate(-0.3, alone=False)
    assert (law.weighting, code.weighting) == (0.7, -0.3)
    found = model(ids)
    changes = {
        name: 0.7 * layer.delta() - 0.3 * other.delta()
        for (name, layer), (_, other) in zip(law.layers(), code.layers(), strict=True)
    }
    plain = llama().double()
    with torch.no_grad():
        for name, change in changes.items():
            plain.get_submodule(name).get_parameter("weight").add_(change)
    torch.testing.assert_close(found, plain(ids))
    law.merge()
    code.merge()
    torch.testing.assert_close(model(ids), plain(ids))
    with pytest.raises(InputError, match=r"merged with 0\.7"):
        law.activate(0.5)
    code.unmerge()
    law.unmerge()
    torch.testing.assert_close(model(ids), found)
    law.activate()
    assert law.weighting == 1


@pytest.mark.parametrize("method", [LoRA(rank=2), PiSSA(rank=2), SHiRA(rank=1)])
def test_a_weight_scales_gradients_and_copies(method: Adapter) -> None:
    model, ids = llama().double(), tokens(4)
    adapter = stir(method.with_fields(also=("*norm",)).attach(model))
    adapter.activate(0.5)
    model(ids).square().sum().backward()
    layer = next(layer for _, layer in adapter.everywhere() if layer.copies())
    own = layer.layer.get_parameter("weight")
    torch.testing.assert_close(layer.used_copies()["weight"], (own + layer.copies()["weight"]) / 2)
    for parameter in adapter.parameters():
        assert parameter.grad is not None
        epsilon, direction = 1e-6, torch.randn_like(parameter)
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * epsilon)
                losses.append(model(ids).square().sum())
                parameter.sub_(direction, alpha=sign * epsilon)
        expected = (losses[0] - losses[1]) / (2 * epsilon)
        torch.testing.assert_close(
            (parameter.grad * direction).sum(), expected, rtol=1e-3, atol=1e-4
        )


def test_a_state_merged_with_another_weight_is_refused() -> None:
    states = []
    for weight in (0.5, 1.0):
        model = llama()
        adapter = stir(LoRA(rank=2).attach(model))
        adapter.activate(weight)
        adapter.merge()
        states.append(model.state_dict())
    with pytest.raises(InputError, match="another weight"):
        model.load_state_dict(states[0])
    model.load_state_dict(states[1])


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_is_finite(weight: float) -> None:
    model = llama()
    adapter = LoRA(rank=2).attach(model)
    with pytest.raises(InputError, match="not a finite number"):
        adapter.activate(weight)
    assert adapter.active
    assert adapter.weighting == 1

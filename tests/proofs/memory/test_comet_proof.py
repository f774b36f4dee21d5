from __future__ import annotations

import math

import pytest
import torch

from modicum.core.contracts.catalog import find
from modicum.core.random import normal_
from modicum.memory import COMET
from modicum.models.convnet import ConvNetConfig, create
from modicum.proofs.base import ProofRun
from modicum.proofs.memory.comet import less_than_fixed_bits, noise_as_predicted
from modicum.proofs.memory.rivals import Everything, FixedBits, FixedBound
from modicum.proofs.memory.texture_bench import ArmOutcome, TextureBench, TextureSize, noise_ratios

SMALL = TextureSize(
    images=64,
    held_out=16,
    config=ConvNetConfig(classes=4, widths=(4, 4)),
    batch_size=8,
    steps=6,
    seeds=(0,),
    check_every=2,
)


def proof_run(*, null: bool = False) -> ProofRun:
    return ProofRun(find("comet"), null=null, full=False)


def outcome(held: float, accuracy: float = 90.0, ratio: float = 1.0) -> ArmOutcome:
    return ArmOutcome(accuracy, held, held, 1000.0, held, 1000.0, 0.1, {"a": [ratio], "b": [1.0]})


@pytest.mark.parametrize(
    ("bits", "stochastic", "each"), [(4, False, 4), (2, False, 2), (1, True, 2)]
)
def test_fixed_bits_count_codes_and_scales(bits: int, stochastic: bool, each: int) -> None:
    tensor = normal_(torch.empty(4, 4, 16, 16), seed=0, name="a").relu()
    codec = FixedBits(bits=bits, stochastic=stochastic).codec()
    record = codec.compress(tensor, 1.0)
    assert record.nbytes == tensor.numel() * each // 8 + 2 * tensor.numel() // 256
    restored = codec.decompress(record)
    assert torch.equal(restored > 0, tensor > 0)
    groups = tensor.view(-1, 256)
    off = (restored.view(-1, 256) - groups).abs() / groups.amax(1, keepdim=True)
    levels = 2**bits - 1
    # An element is moved by a level at most: small ones up to the first, or at random.
    assert float(off.max()) <= 1 / levels + 0.02
    distinct = [len(group[group > 1e-20].unique()) for group in restored.view(-1, 256)]
    assert max(distinct) <= levels


def test_random_rounding_is_unbiased() -> None:
    tensor = torch.full((1 << 16,), 0.3)
    tensor[::256] = 1.0
    codec = FixedBits(bits=1, stochastic=True).codec()
    torch.manual_seed(0)
    restored = codec.decompress(codec.compress(tensor, 1.0))
    plain = torch.ones_like(tensor, dtype=torch.bool)
    plain[::256] = False
    assert float(restored[plain].mean()) == pytest.approx(0.3, rel=0.05)


def test_arms_are_what_they_say() -> None:
    testbed = TextureBench(proof_run(), SMALL)
    exact = testbed.mean(Everything(), "exact")
    comet = testbed.mean(COMET(warmup=1, every=2), "comet")
    fixed = testbed.mean(FixedBound(bound=0.1), "fixed")
    # Eight images, a ReLU before a convolution and one that is pooled, of 4 channels.
    assert exact.plain == comet.plain == 2 * 8 * 4 * 32 * 32 * 4
    assert exact.as_plain.held == exact.plain
    assert comet.held <= comet.most < exact.plain / 4
    assert fixed.held < exact.plain / 4
    assert set(comet.ratios) == {"blocks.1.conv"}
    assert exact.ratios == {}
    again = testbed.mean(COMET(warmup=1, every=2), "comet")
    assert (again.accuracy, again.held, again.ratios) == (comet.accuracy, comet.held, comet.ratios)


def test_measured_noise_is_near_the_laws_on_textures() -> None:
    model = create(ConvNetConfig(classes=4, widths=(8, 8, 8)), 0)
    runtime = COMET().attach(model)
    ratios: dict[str, list[float]] = {}
    for step in range(6):
        images = normal_(torch.empty(8, 3, 32, 32), seed=0, name="images", step=step)
        for layer in runtime.layers[1:]:
            layer.bound = 0.1
        labels = torch.arange(8) % 4
        for name, ratio in noise_ratios(model, runtime, images, labels).items():
            ratios.setdefault(name, []).append(ratio)
    assert set(ratios) == {"blocks.1.conv", "blocks.2.conv"}
    for found in ratios.values():
        assert 0.8 < math.fsum(found) / len(found) < 1.2


@pytest.mark.parametrize(("null", "passed"), [(False, [True, True]), (True, [False, True])])
def test_a_law_without_its_root_is_noticed(null: bool, passed: list[bool]) -> None:
    run = proof_run(null=null)
    factor = run.contender(1.0, null=3**0.5, null_is="another law")
    noise_as_predicted(run, outcome(100.0), factor)
    assert [criterion.passed for criterion in run.conclude().criteria] == passed


@pytest.mark.parametrize(
    ("held", "best", "passes"), [(100.0, 120.0, True), (100.0, 90.0, False), (1000.0, 120.0, False)]
)
def test_the_fewest_fixed_bits_that_are_as_good_decide(
    held: float, best: float, passes: bool
) -> None:
    class Told(TextureBench):
        def mean(self, policy: object, name: str) -> ArmOutcome:
            # One bit takes fewest bytes, and loses more than is allowed.
            return {"1 random bit": outcome(10.0, 80.0), "2 bits": outcome(best)}.get(
                name, outcome(200.0)
            )

    run = proof_run()
    mine = run.contender(outcome(held), null=outcome(1000.0), null_is="exact")
    less_than_fixed_bits(run, mine, outcome(1000.0), Told(run, SMALL))
    proof = run.conclude()
    assert [criterion.passed for criterion in proof.criteria] == [passes]
    assert vars(proof.against) == {"result": "better" if passes else "worse", "rival": "2 bits"}

"""The proof of COMET: fewer bytes at the accuracy of exact training, and the law of its noise.

The paper trains five networks on ImageNet. What carries over is a classifier of textures without
norms: bytes of convolutions' inputs and ReLUs' outputs, with the policy and without it, against
accuracy; and whether the noise in weight gradients is what the law says, from which bounds follow.
Rivals are simple quantizations of the same tensors, in the bytes that their codes would take; the
best simple alternative is the one with the fewest bytes that loses as little accuracy.

`--full` is the specified experiment with all its arms and seeds, and less of everything else: 4,096
images instead of 16,384 in batches of 64 instead of 128, three passes instead of six, and channels
from 12 to 48. It adds a classifier with norms, of whose saved tensors the policy covers less.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from modicum.memory.comet import COMET
from modicum.models.convnet import ConvNetConfig
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.memory.rivals import Everything, FixedBits, FixedBound
from modicum.proofs.memory.texture_bench import ArmOutcome, TextureBench, TextureSize

QUICK = TextureSize(
    images=2048,
    held_out=400,
    config=ConvNetConfig(classes=4, widths=(8, 16, 32, 32)),
    batch_size=32,
    steps=80,
    seeds=(0, 1),
    learning_rate=5e-3,
    check_every=15,
)
FULL = TextureSize(
    images=4096,
    held_out=1000,
    config=ConvNetConfig(classes=10, widths=(12, 12, 24, 24, 48, 48)),
    batch_size=64,
    steps=192,
    seeds=(0, 1, 2),
    learning_rate=3e-3,
    warmup=20,
    check_every=24,
)
# Runs are a tenth and less as long as the paper's, so bounds are set ten times as often and more.
METHOD, LOOSER = COMET(warmup=5, every=10), COMET(warmup=5, every=10, tolerance=0.1)


def prove(run: ProofRun) -> None:
    """Train exactly, with COMET and with its rivals; compare bytes, accuracy and noise."""
    testbed = TextureBench(run, FULL if run.full else QUICK)
    exact = testbed.mean(Everything(), "exact").as_plain
    comet = testbed.mean(METHOD, "COMET")
    null_is = "exact training in COMET's place"
    fewer_bytes(run, run.contender(comet, null=exact, null_is=null_is), exact)
    less_than_fixed_bits(run, run.contender(comet, null=exact, null_is=null_is), exact, testbed)
    factor = run.contender(
        1.0, null=3**0.5, null_is="a law that leaves out the variance of a uniform error"
    )
    noise_as_predicted(run, comet, factor)
    if run.full:
        other_arms(run, testbed, exact)


def fewer_bytes(run: ProofRun, mine: ArmOutcome, exact: ArmOutcome) -> None:
    """Six times fewer bytes, and the accuracy of exact training."""
    run.figure(
        "bytes of convolutions' inputs and ReLUs' outputs",
        method=mine.held,
        baseline=exact.plain,
        claimed="up to 13.5 times fewer (five networks on ImageNet)",
    )
    run.figure(
        "bytes of all saved tensors, with where maxima were",
        method=mine.all_held,
        baseline=exact.all_plain,
    )
    run.figure(
        "accuracy (%)",
        method=mine.accuracy,
        baseline=exact.accuracy,
        claimed="little or no loss (ImageNet)",
    )
    run.figure("seconds of an update", method=mine.seconds, baseline=exact.seconds)
    most = run.figure(
        "the same in the update that holds most", method=mine.most, baseline=exact.plain
    )
    each = ratios(exact.each("most"), mine.each("most"))
    sentence = "times fewer bytes, also in the update that holds most"
    run.at_least(sentence, 1 / most.ratio, 6.0, seeds=each)
    lost = exact.accuracy - mine.accuracy
    pairs = zip(exact.each("accuracy"), mine.each("accuracy"), strict=True)
    each = [plain - kept for plain, kept in pairs]
    # Of the claim, this is the condition: exact training meets it and saves nothing.
    run.at_most("accuracy lost (points)", lost, _allowed(run), part="check", seeds=each)


def less_than_fixed_bits(
    run: ProofRun, mine: ArmOutcome, exact: ArmOutcome, testbed: TextureBench
) -> None:
    """At the published tolerance, fewer bytes than the fewest fixed bits that lose as little.

    A looser tolerance is noted in addition and decides nothing: it would be a knob that is turned
    until it wins.
    """
    rivals = {"4 bits": FixedBits(bits=4), "2 bits": FixedBits(bits=2)}
    rivals["1 random bit"] = FixedBits(bits=1, stochastic=True)
    if run.full:
        rivals["8 bits"] = FixedBits(bits=8)
        rivals["2 random bits"] = FixedBits(bits=2, stochastic=True)
    _compare(run, "a tolerance of 0.1", testbed.mean(LOOSER, "a tolerance of 0.1"), exact)
    outcomes = {}
    for name, rival in rivals.items():
        outcomes[name] = testbed.mean(rival, name)
        _compare(run, name, outcomes[name], exact)
    name, best = min(_as_good(run, outcomes, exact).items(), key=lambda item: item[1].held)
    run.figure(
        "bytes of what is as good, against fixed bits",
        method=mine.held,
        baseline=best.held,
        claimed="1.8 times fewer than JPEG-ACT (ImageNet)",
    )
    over_best = ratios(mine.each("held"), best.each("held"))
    run.against(name, "bytes, of those of the fewest fixed bits as good", over_best)


def noise_as_predicted(run: ProofRun, comet: ArmOutcome, factor: float) -> None:
    """Measured over predicted noise, the mean of every layer."""
    means = [statistics.mean(found) / factor for found in comet.ratios.values()]
    run.figure("noise over the law's, layers' mean", method=statistics.mean(means), baseline=1.0)
    seeds = [
        [statistics.mean(found) / factor for found in each.ratios.values()] for each in comet.seeds
    ]
    quietest, loudest = (
        "noise over the law's, the quietest layer",
        "noise over the law's, the loudest layer",
    )
    run.at_least(quietest, min(means), 0.85, part="check", seeds=[min(each) for each in seeds])
    run.at_most(loudest, max(means), 1.15, part="check", seeds=[max(each) for each in seeds])


def other_arms(run: ProofRun, testbed: TextureBench, exact: ArmOutcome) -> None:
    """Fixed bounds, a network with norms, and digits, whose large even areas the law leaves out."""
    for bound in (0.02, 0.1, 0.5):
        outcome = testbed.mean(FixedBound(bound=bound), f"a fixed bound of {bound}")
        _compare(run, f"a fixed bound of {bound}", outcome, exact)
    config = replace(testbed.size.config, norm="group")
    normed = TextureBench(run, replace(testbed.size, config=config, seeds=(0,)))
    plain = normed.mean(Everything(), "exact, with norms").as_plain
    _compare(run, "COMET, with norms", normed.mean(METHOD, "COMET, with norms"), plain)
    config = replace(testbed.size.config, channels=1)
    even = replace(testbed.size, data="digits", config=config, seeds=(0,), held_out=400)
    ratios = TextureBench(run, even).mean(METHOD, "COMET, digits").ratios
    loudest = max(statistics.mean(found) for found in ratios.values())
    run.figure("noise over the law's on digits, the loudest layer", method=loudest, baseline=1.0)
    run.seeds = testbed.size.seeds


def _allowed(run: ProofRun) -> float:
    """Points of accuracy that may be lost; a point is four images of the quick experiment."""
    return 0.5 if run.full else 1.5


def _as_good(
    run: ProofRun, outcomes: dict[str, ArmOutcome], exact: ArmOutcome
) -> dict[str, ArmOutcome]:
    """Those that lose as little as is allowed; if none does, exact training itself."""
    bar = exact.accuracy - _allowed(run)
    good = {name: each for name, each in outcomes.items() if each.accuracy >= bar}
    return good or {"exact training": exact}


def _compare(run: ProofRun, name: str, outcome: ArmOutcome, exact: ArmOutcome) -> None:
    run.figure(f"bytes: {name}", method=outcome.held, baseline=exact.plain)
    run.figure(
        f"bytes of all saved tensors: {name}",
        method=outcome.all_held,
        baseline=exact.all_plain,
    )
    run.figure(f"accuracy (%): {name}", method=outcome.accuracy, baseline=exact.accuracy)

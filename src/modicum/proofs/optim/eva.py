"""The proof of Eva: its memory and time next to K-FAC's, and the steps that momentum is spared.

Memory and time are of the layers of a ResNet-20 and of a decoder of width 256 (for K-FAC's time,
512), with gradients and statistics put in by hand. On the ResNet, whose layers have a few thousand
weights, calls and not arithmetic take the time; it is reported and not judged.

Convergence is that of a deep tanh autoencoder, the paper's, with widths divided by four and digits
of 8x8 in place of MNIST, and in the full proof of a tanh network of 20 layers; no images, no
network with normalization, and no ImageNet, where the claim was made. Every rule has a grid of
learning rates of its own and the same linear schedule. The claim is of time, so steps count, and
steps times the time of one. The best simple alternative is momentum with Eva's clip and scale but
without its curvature: what that does too, no curvature is needed for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from modicum.core.machine.memory import tensor_bytes
from modicum.optim.eva import Eva, EvaRuntime
from modicum.optim.sgd import SGD
from modicum.optim.transform import TransformContext
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.meters import in_turns
from modicum.proofs.optim.digits_curves import (
    AUTOENCODER,
    DAMPING,
    DEEP,
    KL_CLIP,
    MOMENTUM,
    CurveRule,
    CurveTask,
)

PLAIN = CurveRule("momentum")
CLIPPED = CurveRule("momentum with the clip alone", clipped=True)
WITH_EVA = CurveRule("Eva and momentum", Eva(damping=DAMPING, kl_clip=KL_CLIP))
VARIANTS = (
    CurveRule("Eva-f and momentum", Eva(damping=DAMPING, kl_clip=KL_CLIP, variant="f")),
    CurveRule("Eva-s and momentum", Eva(damping=DAMPING, kl_clip=KL_CLIP, variant="s")),
)


def prove(run: ProofRun) -> None:
    """State, time of a pass, steps to momentum's loss."""
    memory(run)
    speed(run)
    convergence(run)


# Memory


def resnet() -> nn.ModuleList:
    """The layers of a ResNet-20 for images of 32x32: three stages of 16, 32 and 64 channels."""
    widths = [16] * 7 + [32] * 6 + [64] * 6
    pairs = zip([3, *widths], widths, strict=False)
    convolutions = [nn.Conv2d(i, o, 3, bias=False) for i, o in pairs]
    return nn.ModuleList([*convolutions, nn.Linear(64, 10)])


def decoder(width: int, blocks: int) -> nn.ModuleList:
    """The linear layers of a decoder."""
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Linear(width, width) for _ in range(4)]
        layers += [nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
    return nn.ModuleList(layers)


def with_gradients(layers: nn.ModuleList) -> tuple[SGD, EvaRuntime]:
    """Momentum and Eva on layers that have gradients, Eva with means too."""
    optimizer = SGD(layers.parameters(), lr=0.1, momentum=MOMENTUM)
    runtime = Eva().bind(TransformContext(layers, optimizer=optimizer))
    for parameter in layers.parameters():
        parameter.grad = torch.randn_like(parameter)
    runtime.means.sums.fill_(1.0)
    return optimizer, runtime


def factors(layers: nn.ModuleList) -> list[tuple[Tensor, Tensor]]:
    """K-FAC's two factors of each layer, positive definite as damped ones are."""
    found = []
    for layer in layers:
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        assert weight is not None
        sides = len(weight), weight[0].numel() + (bias is not None)
        g, a = (torch.randn(side, 2 * side) / side**0.5 for side in sides)
        found.append((g @ g.T + DAMPING**0.5 * torch.eye(len(g)), a @ a.T + torch.eye(len(a))))
    return found


def memory(run: ProofRun) -> None:
    """The state's bytes: exactly in + 1 + out numbers a layer, and little of K-FAC's factors."""
    run.progress("counting bytes")
    for name, layers in (("ResNet-20", resnet()), ("decoder of width 256", decoder(256, 4))):
        _, runtime = with_gradients(layers)
        runtime.apply()
        dense = sum(tensor_bytes([g, a]) for g, a in factors(layers))
        state = [v for v in runtime.state_dict().values() if isinstance(v, Tensor)]
        held = run.contender(tensor_bytes(state), null=dense, null_is="K-FAC's factors as state")
        sides = [(len(p), p[0].numel()) for p in layers.parameters() if p.ndim > 1]
        formula = 4 * sum(o + i + 1 for o, i in sides)
        figure = run.figure(
            f"bytes of state, {name}", method=held, baseline=dense, claimed="sublinear"
        )
        off, sentence = abs(held - formula), f"bytes beyond 4 (in + 1 + out) a layer, {name}"
        run.at_most(sentence, off, 0, part="check")
        run.at_most(f"bytes of K-FAC's factors, {name}", figure.ratio, 0.02, part="check")


# Time


def speed(run: ProofRun) -> None:
    """The time of a pass over the gradients: next to momentum's update, and next to K-FAC's."""
    run.progress("timing passes")
    repeats = 41 if run.full else 15
    judged = "decoder of width 256"
    for name, layers in (("ResNet-20", resnet()), (judged, decoder(256, 4))):
        optimizer, runtime = with_gradients(layers)
        inverse = preconditioner(layers)
        null_is = "K-FAC's pass in Eva's place"
        contender: Callable[[], None] = run.contender(runtime.apply, null=inverse, null_is=null_is)
        passes = {"mine": contender, "momentum": optimizer.step}
        times = in_turns(passes, 3 if run.null else repeats)
        ratio = run.figure(
            f"milliseconds of a pass and of momentum's update, {name}",
            method=1e3 * times["mine"].median,
            baseline=1e3 * times["momentum"].median,
        ).ratio
        if name == judged:
            sentence = f"time of a pass, of momentum's update, {name}"
            run.at_most(sentence, ratio, 2.0, part="check")
    layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))
    _, runtime = with_gradients(layers)
    inverse = preconditioner(layers)
    contender = run.contender(runtime.apply, null=inverse, null_is="K-FAC's pass in Eva's place")
    times = in_turns({"mine": contender, "K-FAC": inverse}, 3 if run.null else repeats)
    figure = run.figure(
        "milliseconds of a pass, K-FAC's inverting every step, width 512",
        method=1e3 * times["mine"].median,
        baseline=1e3 * times["K-FAC"].median,
        claimed="2.42x less in all",
    )
    run.at_least("times K-FAC's pass is longer, width 512", 1 / figure.ratio, 5.0)


def preconditioner(layers: nn.ModuleList) -> Callable[[], None]:
    """K-FAC's pass: invert both factors of each layer, multiply its gradient with them."""
    sides, gradients = factors(layers), [joined(layer) for layer in layers]

    def step() -> None:
        for (g, a), gradient in zip(sides, gradients, strict=True):
            half = torch.cholesky_solve(gradient, torch.linalg.cholesky(g))
            torch.cholesky_solve(half.T, torch.linalg.cholesky(a))

    return step


def joined(layer: nn.Module) -> Tensor:
    """A layer's gradient, that of its bias as the last column."""
    parts = [p.grad.flatten(1) if p.ndim > 1 else p.grad[:, None] for p in layer.parameters()
             if p.grad is not None]  # fmt: skip
    return torch.cat(parts, 1)


def convergence(run: ProofRun) -> None:
    """Steps until the training loss that momentum ends with, each rule at its best rate."""
    run.seeds = (0, 1, 2) if run.full else (0, 1)
    epochs = 20 if run.full else 12
    tasks = [CurveTask("autoencoder", AUTOENCODER, epochs, run)]
    if run.full:
        tasks.append(CurveTask("20 layers", DEEP, epochs, run))
    over_clipped: list[float] = []
    for task in tasks:
        plain = task.ends(PLAIN)
        contender = run.contender(WITH_EVA, null=PLAIN, null_is="momentum in Eva's place")
        clipped = task.reaches(CLIPPED, plain, baseline=True)
        mine = task.reaches(contender, plain)
        over_clipped += ratios(mine, clipped)
        for other in VARIANTS if run.full else ():
            label = f"steps to momentum's last loss, {other.name}, {task.name}"
            needed = statistics.mean(task.reaches(other, plain))
            run.figure(label, method=needed, baseline=task.steps)
        label = f"steps to momentum's last loss, {task.name}"
        needed = statistics.mean(mine)
        steps = run.figure(label, method=needed, baseline=task.steps, claimed="2.05x less time")
        alone = statistics.mean(clipped)
        run.figure(f"{label}, and the clip's alone", method=needed, baseline=alone)
        step = run.figure(
            f"milliseconds a step, {task.name}",
            method=1e3 * task.seconds(contender),
            baseline=1e3 * task.seconds(PLAIN),
        )
        if task is tasks[0]:
            each = [one / task.steps for one in mine]
            run.at_most(f"steps, of momentum's, {task.name}", steps.ratio, 0.75, seeds=each)
            sentence = f"time to momentum's last loss, of momentum's, {task.name}"
            each = [step.ratio * one for one in each]
            run.at_most(sentence, step.ratio * steps.ratio, 0.95, seeds=each)
    run.against("momentum with the clip alone", "steps to momentum's last loss", over_clipped)

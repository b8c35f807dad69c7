"""Trained networks in a few bits: as trained, equalised layer by layer, by
AIMET, and in the chosen gauge.

`python -m benchmarks.equalise [PART ...]` from `tests/`; rows go to `docs/data/equalise.json`, the
page is written again. The part `aimet` runs the toolkit itself and needs it
(`benchmarks/aimet.py`); without names, all others run.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.signals import ANTIBODY, frames
from zoo.trained import antibody_tokens, load

import pathspace as ps
from benchmarks.figures import keep, page_of, write
from benchmarks.figures import load as load_figures
from pathspace.fitting.quantise import quantised_weights, weight_axes

NAME, PAGE = "equalise", "equalise.md"
Row = dict[str, Any]
LITE0 = {"model": "EfficientNet-Lite0"}
FORMATS = [(bits, per) for per in ("tensor", "channel") for bits in (8, 6, 4)]


def images(count: int, size: int, seed: int) -> Tensor:
    """Crops of two photographs, at random places and sizes, mirrored or not."""
    generator = torch.Generator().manual_seed(seed)
    photographs = load_sample_images().images
    pictures = [torch.from_numpy(p.copy()).permute(2, 0, 1).float() / 255 for p in photographs]
    crops = []
    for i in range(count):
        picture = pictures[i % 2]
        side = int(torch.randint(120, 427, (1,), generator=generator))
        top, left = (
            int(torch.randint(0, n - side + 1, (1,), generator=generator))
            for n in picture.shape[1:]
        )
        crop = picture[None, :, top : top + side, left : left + side]
        crop = crop.flip(3) if float(torch.rand((), generator=generator)) < 0.5 else crop
        crops.append(F.interpolate(crop, size=(size, size), mode="bilinear", antialias=True))
    return 2 * torch.cat(crops) - 1


def rounded(model: nn.Module, bits: int, per: str) -> nn.Module:
    """A copy with rounded weights."""
    net = copy.deepcopy(model)
    own = quantised_weights(dict(net.named_parameters()), weight_axes(net), bits, per)
    net.load_state_dict({**net.state_dict(), **own})
    return net


def decibels(wanted: Tensor, found: Tensor) -> float:
    """Signal over noise."""
    return float(10 * (wanted.square().sum() / (found - wanted).square().sum()).log10())


def chains(model: Any) -> list[list[nn.Conv2d]]:
    """Convolutions one after the other, with nothing but an activation between them."""
    found = []
    for block in model._blocks:
        own = [block._expand_conv] if hasattr(block, "_expand_conv") else []
        found.append([*own, block._depthwise_conv, block._project_conv])
    found[0].insert(0, model._conv_stem)
    return found


@torch.no_grad()
def cross_layer_equalised(model: nn.Module) -> nn.Module:
    """The published algorithm on a folded network, with the bounds of ReLU6 moved along.

    The channels between layers of a chain get the geometric mean of the ranges of
    the weights around them.

    Reference:
        Nagel et al.: Data-free quantization through weight equalization and bias correction (2019).
    """
    net = ps.lift_clips(model, lite0_images()[0])
    bounds = _bounds(net)
    for chain in chains(net):
        ranges = []
        for layer in chain:
            deep = layer.groups > 1
            by_output = layer.weight.abs().amax((1, 2, 3))
            by_input = by_output if deep else layer.weight.abs().amax((0, 2, 3))
            ranges.append((by_input, by_output))
        if len(chain) == 3:
            one, two, three = ranges[0][1], ranges[1][1], ranges[2][0]
            mean = (one * two * three) ** (1 / 3)
            scales = [one / mean, mean / three]
        else:
            one, two = ranges[0][1], ranges[1][0]
            scales = [one / (one * two).sqrt()]
        for scale, first, second in zip(scales, chain, chain[1:], strict=False):
            scale = torch.where((scale > 0) & scale.isfinite(), scale, 1)
            first.weight.div_(scale[:, None, None, None])
            first.bias.div_(scale)
            second.weight.mul_(
                scale[:, None, None, None] if second.groups > 1 else scale[None, :, None, None]
            )
            for bound in bounds.get(id(first), []):
                bound.div_(scale[:, None, None])
    return net


def _bounds(net: nn.Module) -> dict[int, list[nn.Parameter]]:
    """The bounds of the clip that follows each convolution, found by running the network."""
    order: list[nn.Module] = []
    kinds = [
        m for m in net.modules() if isinstance(m, nn.Conv2d) or type(m).__name__ == "LiftedClip"
    ]
    hooks = [m.register_forward_hook(lambda m, args, out: order.append(m)) for m in kinds]
    net(images(1, 64, 0))
    for hook in hooks:
        hook.remove()
    found: dict[int, list[nn.Parameter]] = {}
    calls: dict[int, int] = {}
    for before, module in pairwise(order):
        if type(module).__name__ == "LiftedClip":
            place = calls.get(id(module), 0)
            calls[id(module)] = place + 1
            found[id(before)] = [module.high[place]]
    return found


def lite0_images(size: int = 96) -> tuple[Tensor, Tensor]:
    """Crops to choose on, and others to judge."""
    return images(16, size, 1), images(32, size, 2)


@torch.no_grad()
def lite0() -> list[Row]:
    """EfficientNet-Lite0: signal over noise of its outputs on images not chosen on."""
    trained = load("efficientnet-lite0")[0]
    x, held = lite0_images()
    folded = ps.fold_norms(trained, x)
    model = ps.lift_clips(folded, x)
    wanted, graph = trained(held), ps.trace(model, x[:1])
    layers, rows = cross_layer_equalised(folded), []
    for bits, per in FORMATS:
        with torch.enable_grad():
            found = ps.equalise(model, graph, bits, per, x)
        row: Row = {**LITE0, "bits": bits, "per": per, "changed": found.helped}
        row["change"] = float((found.model(held) - wanted).abs().max() / wanted.abs().max())
        nets = {"as trained": model, "layer by layer": layers, "chosen gauge": found.model}
        for name, net in nets.items():
            row |= judged(name, wanted, rounded(net, bits, per)(held))
        print(row, flush=True)
        rows.append(row)
    return rows


def judged(name: str, wanted: Tensor, outputs: Tensor) -> Row:
    """Signal over noise, and the share of images that are seen as the same thing."""
    same = float((outputs.argmax(1) == wanted.argmax(1)).float().mean())
    return {name: decibels(wanted, outputs), f"{name}: same class": same}


@torch.no_grad()
def aimet() -> list[Row]:
    """EfficientNet-Lite0 by the toolkit: as it stands, and with ReLU6 replaced by ReLU."""
    from benchmarks.aimet import equalised

    trained = load("efficientnet-lite0")[0]
    x, held = lite0_images()
    wanted, rows = trained(held), []
    nets = {
        f"AIMET {kind}": equalised(trained, x[:1], kind == "ReLU") for kind in ("as it is", "ReLU")
    }
    for bits, per in FORMATS:
        row: Row = {**LITE0, "bits": bits, "per": per, "version": version("aimet-torch")}
        for name, net in nets.items():
            row |= judged(name, wanted, rounded(net, bits, per)(held))
        row["AIMET ReLU: by its own outputs"] = decibels(net(held), rounded(net, bits, per)(held))
        rows.append(row)
    return rows


@torch.no_grad()
def crepe() -> list[Row]:
    """CREPE, tiny: share of notes heard within half a semitone, at pitches not chosen on."""
    model = load("crepe-tiny")[0]
    notes = [50.0 * 2 ** (k / 80) for k in range(320)]
    x, held, truth = frames(*notes[::10]), frames(*notes[1::2]), torch.tensor(notes[1::2])

    def heard(net: nn.Module) -> float:
        pitch = 10 * 2 ** ((20 * net(held).argmax(1) + 1997.3794084376191) / 1200)
        return float(((pitch / truth).log2().abs() < 1 / 24).float().mean())

    graph = ps.trace(model, x[:2])
    return [tasked("CREPE, tiny", model, graph, x, heard, lambda net: net(held), len(truth))]


# heavy chains' variable domains of medicines: trastuzumab, adalimumab, rituximab
ANTIBODIES = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
    "QVQLQQPGAELVKPGASVKMSCKASGYTFTSYNMHWVKQTPGRGLEWIGAIYPGNGDTSYNQKFKGKATLTADKSSSTAYMQLSSLTSEDSAVYYCARSTYYGGDWYFNVWGAGTTVTVSA",
)
# one residue in so many is masked
MASKED = 8


def masked(sequence: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Inputs with each residue masked in one of :data:`MASKED` copies, true tokens, the mask."""
    copies = [
        "".join("_" if i % MASKED == k else r for i, r in enumerate(sequence))
        for k in range(MASKED)
    ]
    tokens, truth = antibody_tokens(*copies), antibody_tokens(sequence)
    return (
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)},
        truth.expand_as(tokens),
        tokens != truth,
    )


@torch.no_grad()
def antiberty() -> list[Row]:
    """AntiBERTy: share of masked residues guessed right, of antibodies not chosen on."""
    model = load("antiberty")[0]
    x, _, _ = masked(ANTIBODY)
    held = [masked(sequence) for sequence in ANTIBODIES]

    def right(net: nn.Module) -> float:
        found = [
            (net(**own).prediction_logits.argmax(-1) == truth)[hidden]
            for own, truth, hidden in held
        ]
        return float(torch.cat(found).float().mean())

    x = {key: value[::4] for key, value in x.items()}
    graph, cases = ps.trace(model, kwargs=x), sum(map(len, ANTIBODIES))

    def scores(net: nn.Module) -> Tensor:
        return net(**held[0][0]).prediction_logits

    return [tasked("AntiBERTy", model, graph, x, right, scores, cases, 4)]


def tasked(
    name: str,
    model: nn.Module,
    graph: ps.ReductionGraph,
    x: Any,
    right: Callable[[nn.Module], float],
    outputs: Callable[[nn.Module], Tensor],
    cases: int,
    trials: int = 80,
) -> Row:
    """How often a network is right in eight bits."""
    with torch.enable_grad():
        found = ps.equalise(model, graph, 8, "tensor", x, trials=trials)
    row: Row = {"model": name, "bits": 8, "per": "tensor", "changed": found.helped, "cases": cases}
    wanted, row["float"] = outputs(model), right(model)
    row["change"] = float((outputs(found.model) - wanted).abs().max() / wanted.abs().max())
    for key, net in {"as trained": model, "chosen gauge": found.model}.items():
        small = rounded(net, 8, "tensor")
        row[key], row[f"{key}: right"] = decibels(wanted, outputs(small)), right(small)
    print(row, flush=True)
    return row


PARTS: dict[str, Callable[[], list[Row]]] = {
    "lite0": lite0,
    "crepe": crepe,
    "antiberty": antiberty,
    "aimet": aimet,
}
COLUMNS = {
    "as trained": "as trained",
    "AIMET as it is": "AIMET",
    "AIMET ReLU": "AIMET, ReLU6 replaced",
    "layer by layer": "layer by layer, bounds moved",
    "chosen gauge": "chosen gauge",
}


def table(held: dict[str, list[Row]]) -> str:
    """The figures as tables of the page."""
    rows = [own | other for own, other in zip(held["lite0"], held["aimet"], strict=True)]
    return page_of("equalise", rows=rows, held=held, columns=COLUMNS).rstrip()


def main(parts: list[str]) -> None:
    """Measure, keep, write the page."""
    held = load_figures(NAME)
    for part in parts or [name for name in PARTS if name != "aimet"]:
        held[part] = PARTS[part]()
        keep(NAME, held)
    write(PAGE, NAME, table(held))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Trained networks in a few bits: as trained, by cross-layer equalisation as published, and in the chosen gauge.

`python -m benchmarks.equalise [PART ...]` from `tests/`; rows go to `docs/data/equalise.json`, the page is written
again.

The published algorithm (Nagel et al., Data-free quantization through weight equalization and bias correction, 2019, as
the AIMET toolkit applies it): batch norms are folded, ReLU6 becomes ReLU, and the channels between layers of a chain
get the geometric mean of the ranges of the weights around them.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.signals import ANTIBODY, frames
from zoo.trained import antibody_tokens, load

import pathspace as ps
from pathspace.quantise import quantised_weights, weight_axes

DATA = Path(__file__).resolve().parents[2] / "docs" / "data" / "equalise.json"
PAGE = DATA.parents[1] / "equalise.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
Row = dict[str, Any]


def images(count: int, size: int, seed: int) -> Tensor:
    """Crops of two photographs, at random places and sizes, mirrored or not."""
    generator = torch.Generator().manual_seed(seed)
    pictures = [torch.from_numpy(i.copy()).permute(2, 0, 1).float() / 255 for i in load_sample_images().images]
    crops = []
    for i in range(count):
        picture = pictures[i % 2]
        side = int(torch.randint(120, 427, (1,), generator=generator))
        top, left = (int(torch.randint(0, n - side + 1, (1,), generator=generator)) for n in picture.shape[1:])
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
    found = [[block._expand_conv] if hasattr(block, "_expand_conv") else [] for block in model._blocks]
    for own, block in zip(found, model._blocks, strict=True):
        own += [block._depthwise_conv, block._project_conv]
    found[0].insert(0, model._conv_stem)
    return found


@torch.no_grad()
def cross_layer_equalised(model: nn.Module, clips: str) -> nn.Module:
    """The published algorithm on a folded network; ``clips`` is ``"relu"``, or ``"lifted"`` to move their bounds."""
    net = copy.deepcopy(model) if clips == "relu" else ps.lift_clips(model)
    bounds: dict[int, list[nn.Parameter]] = {}
    if clips == "relu":
        for module in net.modules():
            for name, child in module.named_children():
                if isinstance(child, nn.ReLU6):
                    setattr(module, name, nn.ReLU())
    else:
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
            second.weight.mul_(scale[:, None, None, None] if second.groups > 1 else scale[None, :, None, None])
            for bound in bounds.get(id(first), []):
                bound.div_(scale[:, None, None])
    return net


def _bounds(net: nn.Module) -> dict[int, list[nn.Parameter]]:
    """The bounds of the clip that follows each convolution, found by running the network."""
    order: list[nn.Module] = []
    kinds = [m for m in net.modules() if isinstance(m, nn.Conv2d) or type(m).__name__ == "LiftedClip"]
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


@torch.no_grad()
def lite0(size: int = 96) -> list[Row]:
    """EfficientNet-Lite0: signal over noise of its outputs on images that the gauge was not chosen on."""
    trained = load("efficientnet-lite0")[0]
    folded = ps.fold_norms(trained)
    model = ps.lift_clips(folded)
    x, held = images(16, size, 1), images(32, size, 2)
    wanted = trained(held)
    graph = ps.trace(model, x[:1])
    baselines = {"equalised layer by layer, ReLU": cross_layer_equalised(folded, "relu"),
                 "equalised layer by layer, bounds moved": cross_layer_equalised(folded, "lifted")}  # fmt: skip
    rows = []
    for bits, per in ((8, "tensor"), (4, "tensor"), (6, "tensor"), (8, "channel"), (6, "channel"), (4, "channel")):
        with torch.enable_grad():
            found = ps.equalise(model, graph, bits, per, x)
        nets = {"as trained": model, **baselines, "chosen gauge": found.model}
        row: Row = {"model": "EfficientNet-Lite0", "bits": bits, "per": per, "changed": found.helped}
        row["change"] = float((found.model(held) - wanted).abs().max() / wanted.abs().max())
        for name, net in nets.items():
            outputs = rounded(net, bits, per)(held)
            row[name] = decibels(wanted, outputs)
            row[f"{name}: same class"] = float((outputs.argmax(1) == wanted.argmax(1)).float().mean())
        print(row, flush=True)
        rows.append(row)
    return rows


@torch.no_grad()
def crepe() -> list[Row]:
    """CREPE, tiny: share of synthesised notes that are heard within half a semitone."""
    model = load("crepe-tiny")[0]
    notes = [50.0 * 2 ** (k / 40) for k in range(160)]
    x, held, truth = frames(*notes[::5]), frames(*notes[1::2]), torch.tensor(notes[1::2])
    graph = ps.trace(model, x[:2])

    def heard(net: nn.Module) -> float:
        pitch = 10 * 2 ** ((20 * net(held).argmax(1) + 1997.3794084376191) / 1200)
        return float(((pitch / truth).log2().abs() < 1 / 24).float().mean())

    with torch.enable_grad():
        found = ps.equalise(model, graph, 8, "tensor", x)
    row: Row = {"model": "CREPE, tiny", "bits": 8, "per": "tensor", "changed": found.helped, "float": heard(model)}
    row["change"] = float((found.model(held) - model(held)).abs().max())
    for name, net in {"as trained": model, "chosen gauge": found.model}.items():
        row[name], row[f"{name}: right"] = (
            decibels(model(held), rounded(net, 8, "tensor")(held)),
            heard(rounded(net, 8, "tensor")),
        )
    print(row, flush=True)
    return [row]


@torch.no_grad()
def antiberty() -> list[Row]:
    """AntiBERTy: share of masked residues that it guesses right."""
    model = load("antiberty")[0]
    places = list(range(1, len(ANTIBODY) - 1, 4))
    masked = antibody_tokens(*[f"{ANTIBODY[:i]}_{ANTIBODY[i + 1 :]}" for i in places])
    truth = antibody_tokens(ANTIBODY)[0]
    mask = torch.ones_like(masked)
    batches = [{"input_ids": masked[i : i + 2], "attention_mask": mask[i : i + 2]} for i in (0, 10)]
    graph = ps.trace(model, kwargs=batches[0])

    def right(net: nn.Module) -> float:
        logits = net(input_ids=masked, attention_mask=mask).prediction_logits
        return sum(int(logits[row, i + 1].argmax()) == int(truth[i + 1]) for row, i in enumerate(places)) / len(places)

    with torch.enable_grad():
        found = ps.equalise(model, graph, 8, "tensor", batches)
    row: Row = {"model": "AntiBERTy", "bits": 8, "per": "tensor", "changed": found.helped, "float": right(model)}
    wanted = model(**batches[1]).prediction_logits
    row["change"] = float((found.model(**batches[1]).prediction_logits - wanted).abs().max() / wanted.abs().max())
    for name, net in {"as trained": model, "chosen gauge": found.model}.items():
        small = rounded(net, 8, "tensor")
        row[name], row[f"{name}: right"] = decibels(wanted, small(**batches[1]).prediction_logits), right(small)
    print(row, flush=True)
    return [row]


PARTS: dict[str, Callable[[], list[Row]]] = {"lite0": lite0, "crepe": crepe, "antiberty": antiberty}


def table(rows: list[Row]) -> str:
    """The figures as tables of the page."""
    wide = [row for row in rows if row["model"] == "EfficientNet-Lite0"]
    names = ["as trained", "equalised layer by layer, ReLU", "equalised layer by layer, bounds moved", "chosen gauge"]
    lines = [f"| bits | step per | {' | '.join(names)} |", f"| --- | --- |{' --- |' * len(names)}"] if wide else []
    for row in wide:
        cells = (f"{row[name]:.1f} dB, {row[f'{name}: same class']:.0%}" for name in names)
        lines.append(f"| {row['bits']} | {row['per']} | {' | '.join(cells)} |")
    lines += [
        *[""][: len(wide)],
        "| network, 8 bits per tensor | float | as trained | chosen gauge |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        if "float" in row:
            cells = (f"{row[f'{name}: right']:.1%} ({row[name]:.1f} dB)" for name in ("as trained", "chosen gauge"))
            lines.append(f"| {row['model']} | {row['float']:.1%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(parts: list[str]) -> None:
    """Measure, keep, write the page."""
    held = json.loads(DATA.read_text()) if DATA.exists() else {}
    for part in parts or PARTS:
        held[part] = PARTS[part]()
        DATA.write_text(json.dumps(held, indent=1) + "\n")
    text = PAGE.read_text()
    start, rest = text.split(BEGIN)
    figures = table([row for part in PARTS for row in held.get(part, [])])
    PAGE.write_text(f"{start}{BEGIN}\n{figures}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main(sys.argv[1:])

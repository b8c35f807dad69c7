"""What a run would use, read from its task, model, optimizer and trainer: nothing here knows the
recipes, or how runs are described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pathspace.training import PathSpace
from pathspace.training.experiments.models import (
    CifarResNet,
    DeepResNet,
    RecurrentCNN,
    ReluRNN,
    StackedReluLM,
    Translator,
    VisionTransformer,
)
from pathspace.training.experiments.models.transformer import Scores
from pathspace.training.experiments.recipe import crop_and_flip
from pathspace.training.experiments.trainer import Training
from tests.training.test_training_data import write_cifar, write_mnist

IMAGES, PHOTOGRAPHS, TOKENS, PLACES = 24, 100, 40_000, 100


def stand_in(folder: Path) -> Path:
    """Write small data of the shapes of all the papers' data in one folder.

    There are more tokens to translate than the vocabulary takes, in sentences of the longest
    length. One image of twelve, or photograph of a hundred, is to be held out.
    """
    write_mnist(folder, train=IMAGES)
    for classes, name in ((10, "cifar-10-batches-py"), (100, "cifar-100-python")):
        (folder / name).mkdir()
        write_cifar(folder / name, classes)
    for name, ending in (("ptb", "txt"), ("ptb.char", "txt"), ("wiki", "tokens")):
        for part in ("train", "valid", "test"):
            (folder / f"{name}.{part}.{ending}").write_text("a b c d e\n" * 60)
    (folder / "enwik8").write_bytes(b"abcdefghijklmnopqrstuvwxyz " * 200)
    words = [f"w{i}" for i in range(TOKENS)]
    lines = [" ".join(words[i : i + PLACES]) for i in range(0, TOKENS, PLACES)]
    for part, rows in (("train", lines), ("valid", lines[:2]), ("test", lines[:2])):
        for language in ("en", "de"):
            (folder / f"{part}.{language}").write_text("\n".join(rows))
    for part, count in (("train", PHOTOGRAPHS), ("val", 2)):
        np.save(folder / f"{part}-images.npy", np.zeros((count, 3, 224, 224), np.uint8))
        np.save(folder / f"{part}-labels.npy", np.arange(count))
    return folder


class Built:
    """A run before its first step.

    Args:
        training: holds all of it.
    """

    def __init__(self, training: Training) -> None:
        self.trainer, self.task = training, training.task
        self.outer: Any = training.model
        self.net: Any = getattr(self.outer, "network", self.outer)
        optimizer = training.optimizer
        self.groups = optimizer.param_groups
        # (a shell around one optimizer of torch is one optimizer)
        shell = isinstance(optimizer, PathSpace)
        self.parts: list[Any] = list(
            optimizer.optimizers if not shell and hasattr(optimizer, "optimizers") else [optimizer]
        )

    def one(self, name: str) -> Any:
        """Return the only value of a setting of the optimizer, ``none`` where it has none."""
        values = {
            tuple(v) if isinstance(v := g[name], list) else v for g in self.groups if name in g
        }
        return values.pop() if len(values) == 1 else values or "none"


def _only(values: Iterable[Any]) -> Any:
    found = set(values)
    return found.pop() if len(found) == 1 else found


def _swin(net: Scores) -> Any:
    return net.classifier.swin  # type: ignore[union-attr]


def _kernels(module: nn.Module) -> list[nn.Conv2d]:
    """Convolutions but for those of skips."""
    found = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    return [part for part in found if part.kernel_size != (1, 1)]


def _layers_of(net: Translator) -> list[Any]:
    assert len(net.encoder) == len(net.decoder)
    return [*net.encoder, *net.decoder]


# network -> its name, and how its width and its layers are read from it
NETWORKS: dict[type[nn.Module], tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    ReluRNN: ("ReLU RNN", lambda n: n.rnn.hidden_size, lambda n: n.rnn.num_layers),
    StackedReluLM: ("stacked ReLU RNN", lambda n: n.rnn.hidden_size, lambda n: n.rnn.num_layers),
    RecurrentCNN: (
        "recurrent CNN",
        lambda n: _only(kernel.out_channels for kernel in _kernels(n)),
        lambda n: 1 + sum(hasattr(x, "norms") for x in n.body),
    ),
    CifarResNet: (
        "ResNet of He et al. for CIFAR-10",
        lambda n: n.stem[0].out_channels,
        lambda n: len(_kernels(n)) + 1,
    ),
    DeepResNet: (
        "ResNet of He et al. for ImageNet",
        lambda n: n.stem[0].out_channels,
        # convolutions of branches, stem and read-out
        lambda n: (
            2 + sum(isinstance(m, nn.Conv2d) for block in n.blocks for m in block.branch.modules())
        ),
    ),
    VisionTransformer: (
        "ViT of Dosovitskiy et al.",
        lambda n: n.readout.in_features,
        lambda n: len(n.blocks),
    ),
    Scores: (
        "Swin transformer of Liu et al.",
        lambda n: _swin(n).embeddings.patch_embeddings.projection.out_channels,
        lambda n: sum(len(stage.blocks) for stage in _swin(n).encoder.layers),
    ),
    Translator: (
        "transformer of Vaswani et al.",
        lambda n: n.embedding.embedding_dim,
        lambda n: _only((len(n.encoder), len(n.decoder))),
    ),
}


def _held_out(b: Built) -> str:
    given = {"mnist": IMAGES, "cifar10": 60, "cifar100": 12, "imagenet": PHOTOGRAPHS}.get(
        b.task.name.split("-")[0]
    )
    train, valid = len(b.task.train), len(b.task.valid)
    if given is None:
        return "none"
    assert train + valid == given
    return f"1 of {given // valid}"


def _optimizer(b: Built) -> str:
    names = {"GSGD": "G-SGD", "PathSGD": "Path-SGD", "GAdam": "G-Adam"}
    kinds = [type(part).__name__ for part in b.parts]
    return names.get(kinds[0], kinds[0])


def _path_space(b: Built) -> str:
    kinds = [type(part).__name__ for part in b.parts]
    if kinds[0] not in ("GSGD", "GAdam", "PathSGD"):
        return "none"
    if len(kinds) == 1:
        return "none" if kinds == ["PathSGD"] else "all weights"
    mine = {id(p) for group in b.parts[0].param_groups for p in group["params"]}
    assert kinds[1:] == ["SGD"] and mine == {id(p) for p in b.net.rnn.parameters()}
    return "recurrent modules"


def _schedule(b: Built) -> tuple[str, float]:
    """Name a factor by its values, and say when it is largest first."""
    factor = b.trainer.schedule
    if factor is None:
        return "constant", 0.0
    shares = [i / 2000 for i in range(2000)]
    values = [factor(share) for share in shares]
    top = shares[int(np.argmax(values))]
    drops = [s for s, v, w in zip(shares[1:], values, values[1:], strict=False) if w < 0.11 * v]
    if drops:
        assert values[0] == 1.0 and len({round(v, 9) for v in values}) == len(drops) + 1
        return f"drops {' '.join(f'{s:g}' for s in drops)}", 0.0
    end, half = factor(1.0), factor((1 + top) / 2)
    if abs(end) < 1e-9 and abs(half - 0.5) < 1e-2:
        return "cosine", top * b.trainer.epochs
    assert abs(end - top**0.5) < 1e-3
    return "inverse-root", top * b.trainer.epochs


def _smoothing(b: Built) -> float:
    """Read it from the loss of scores that are right and far apart."""
    if isinstance(b.net, StackedReluLM | Translator):
        scores, target = torch.zeros(1, 1, 5), torch.tensor([[2]])
    else:
        scores, target = torch.zeros(1, 5), torch.tensor([2])
    scores[..., 2] = 50.0
    return round(b.task.loss(scores, target).item() / 50 * 5 / 4, 6)


def _start(b: Built) -> str:
    from pathspace.training.experiments.recipe import Recipe, find_skeleton

    # (a matrix without an entry of 1 or -1 has none on the skeleton: no graph is needed)
    if not any(bool((w.abs() == 1).any()) for w in b.outer.parameters() if w.dim() > 1):
        return "default"
    masks = find_skeleton(b.task, Recipe(seed=b.trainer.seed)).masks
    state = dict(b.outer.named_parameters())
    unit = all(bool((state[n][m.bool()].abs() == 1).all()) for n, m in masks.items())
    return "unit skeleton" if unit else "default"


def _tau(b: Built) -> float:
    connection = getattr(b.outer, "penal_connection", None)
    if connection is None:
        return 0.0
    return float(connection.tau)


def _path_sgd_has_no_decay(b: Built) -> float:
    decay = b.one("weight_decay")
    return 0.0 if decay == "none" else decay


METERS: dict[str, Callable[[Built], Any]] = {
    "held_out": _held_out,
    "model": lambda b: NETWORKS[type(b.net)][0],
    "width": lambda b: NETWORKS[type(b.net)][1](b.net),
    "layers": lambda b: NETWORKS[type(b.net)][2](b.net),
    "optimizer": _optimizer,
    "momentum": lambda b: (
        "none"
        if "Adam" in _optimizer(b)
        else 0.0
        if b.one("momentum") == "none"
        else b.one("momentum")
    ),
    "betas": lambda b: list(v) if (v := b.one("betas")) != "none" else v,
    "eps": lambda b: b.one("eps"),
    # of the parameters that are not in path space, where there are any
    "rates": lambda b: b.parts[-1].param_groups[0]["lr"],
    "scaling": lambda b: (
        "the mean of kappa at the start, in the recurrent modules"
        if isinstance(b.one("lr"), set)
        else "none"
    ),
    "schedule": lambda b: _schedule(b)[0],
    "warmup": lambda b: _schedule(b)[1],
    "epochs": lambda b: b.trainer.epochs,
    "batch": lambda b: b.trainer.batch_size,
    "decay": _path_sgd_has_no_decay,
    "clip": lambda b: "none" if b.trainer.clip is None else b.trainer.clip,
    "augmentation": lambda b: {None: "none", crop_and_flip: "crop-flip"}[b.trainer.augment],
    "smoothing": _smoothing,
    "tau": _tau,
    "start": _start,
    "path_space": _path_space,
    "device": lambda b: {"cpu": "one thread of a processor"}[b.trainer.device.type],
}

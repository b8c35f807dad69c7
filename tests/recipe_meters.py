"""What a run would use, read from its task, model, optimizer and trainer, field by field: nothing
here knows the recipes, or how runs are described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
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

    def of(self, field: str) -> Any:
        """Return what the network says of a field, ``none`` where it says nothing."""
        found = NETWORKS[type(self.net)].get(field, "none")
        return found(self.net) if callable(found) else found

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


def _dropouts(module: nn.Module) -> list[float]:
    return [part.p for part in module.modules() if isinstance(part, nn.Dropout)]


def _attentions(module: nn.Module) -> list[nn.MultiheadAttention]:
    return [part for part in module.modules() if isinstance(part, nn.MultiheadAttention)]


def _kernels(module: nn.Module) -> list[nn.Conv2d]:
    """Convolutions but for those of skips."""
    found = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    return [part for part in found if part.kernel_size != (1, 1)]


def _patches(kernel: nn.Conv2d) -> str:
    assert kernel.stride == kernel.kernel_size
    return f"patches of {kernel.kernel_size[0]} x {kernel.kernel_size[1]}"


def _layers_of(net: Translator) -> list[Any]:
    assert len(net.encoder) == len(net.decoder)
    return [*net.encoder, *net.decoder]


def _halves_recurrent(net: RecurrentCNN) -> str:
    pools = [place for place, part in enumerate(net.body) if isinstance(part, nn.MaxPool2d)]
    assert all(net.body[place].stride == 2 for place in pools)
    kernel = _only(net.body[place].kernel_size for place in pools)
    after = [str(place + 1 - done) for done, place in enumerate(pools)]
    return f"by maxima over {kernel} x {kernel} after layers {' and '.join(after)}"


def _halves_cifar(net: CifarResNet) -> str:
    blocks = list(net.blocks)
    places = [i // (len(blocks) // 3) for i, block in enumerate(blocks) if block.stride == 2]
    return {(1, 2): "by strides at the second and third stage"}[tuple(places)]


def _halves_deep(net: DeepResNet) -> str:
    strides = [m.stride for m in net.stem if isinstance(m, nn.Conv2d | nn.MaxPool2d)]
    assert len(strides) == 2 or strides == [(1, 1)]
    widths = [kernel.out_channels for kernel in _kernels(net.blocks) if 2 in kernel.stride]
    first = net.stem[0].out_channels
    assert widths == [2 * first, 4 * first, 8 * first]
    stem = {1: "", 2: "twice before the first stage, "}[len(strides)]
    return f"{stem}by strides at the second to fourth stage"


def _halves_swin(net: Scores) -> str:
    merged = [stage.downsample is not None for stage in _swin(net).encoder.layers]
    assert merged == [True, True, True, False]
    return "by merging patches before the second to fourth stage"


def _tied(net: Any) -> str:
    return "the embedding's" if net.readout.weight is net.embedding.weight else "its own"


def _norms_of_translator(net: Translator) -> str:
    first = _only(layer.norm_first for layer in _layers_of(net))
    last = _only((type(net.encoder_norm), type(net.decoder_norm)))
    return {
        (True, nn.LayerNorm): "layer norm inside the branch",
        (False, nn.Identity): "layer norm after the sum",
    }[first, last]


def _ends(net: Translator) -> float:
    """Dropout of embedded tokens and at the ends of branches."""
    named = ("dropout1", "dropout2", "dropout3")
    rates = [getattr(x, n).p for x in _layers_of(net) for n in named if hasattr(x, n)]
    return float(_only([net.dropout.p, *rates]))


def _inside(net: Translator) -> Any:
    inner = [layer.dropout.p for layer in _layers_of(net)]
    return _only([*inner, *(attention.dropout for attention in _attentions(net))])


BATCH_NORM, INSIDE = "batch norm", "layer norm inside the branch"
# network -> field -> what it has, or how that is read from it
NETWORKS: dict[type[nn.Module], dict[str, Any]] = {
    ReluRNN: {
        "model": "ReLU RNN",
        "width": lambda n: n.rnn.hidden_size,
        "layers": lambda n: n.rnn.num_layers,
    },
    StackedReluLM: {
        "model": "stacked ReLU RNN",
        "width": lambda n: n.rnn.hidden_size,
        "layers": lambda n: n.rnn.num_layers,
        "embedding": lambda n: n.embedding.embedding_dim,
        "readout": _tied,
        "dropout_inputs": lambda n: n.enter.p,
        "dropout_layers": lambda n: n.rnn.dropout,
        "dropout_words": lambda n: n.dropout_words,
        "weight_drop": lambda n: n.weight_drop,
        # a state that is carried would be a buffer
        "carried_state": lambda n: bool(list(n.buffers())),
    },
    RecurrentCNN: {
        "model": "recurrent CNN",
        "width": lambda n: _only(kernel.out_channels for kernel in _kernels(n)),
        "layers": lambda n: 1 + sum(hasattr(x, "norms") for x in n.body),
        "unfold": lambda n: _only(len(x.norms) - 1 for x in n.body if hasattr(x, "norms")),
        "halving": _halves_recurrent,
    },
    CifarResNet: {
        "model": "ResNet of He et al. for CIFAR-10",
        "width": lambda n: n.stem[0].out_channels,
        "layers": lambda n: len(_kernels(n)) + 1,
        "halving": _halves_cifar,
    },
    DeepResNet: {
        "model": "ResNet of He et al. for ImageNet",
        "width": lambda n: n.stem[0].out_channels,
        # convolutions of branches, stem and read-out
        "layers": lambda n: (
            2 + sum(isinstance(m, nn.Conv2d) for block in n.blocks for m in block.branch.modules())
        ),
        "halving": _halves_deep,
    },
    VisionTransformer: {
        "model": "ViT of Dosovitskiy et al.",
        "width": lambda n: n.readout.in_features,
        "layers": lambda n: len(n.blocks),
        "embedding": lambda n: _patches(n.patches),
        "inner": lambda n: _only(x.mlp[0].out_features for x in n.blocks),
        "heads": lambda n: _only(x.heads for x in n.blocks),
        "readout": "its own",
        "dropout_inner": 0.0,
    },
    Scores: {
        "model": "Swin transformer of Liu et al.",
        "width": lambda n: _swin(n).embeddings.patch_embeddings.projection.out_channels,
        "layers": lambda n: sum(len(stage.blocks) for stage in _swin(n).encoder.layers),
        "embedding": lambda n: _patches(_swin(n).embeddings.patch_embeddings.projection),
        "inner": lambda n: _swin(n).encoder.layers[0].blocks[0].mlp.fc1.out_features,
        "heads": lambda n: n.classifier.config.num_heads[0],
        "readout": "its own",
        "halving": _halves_swin,
        "dropout_inner": lambda n: _only(_dropouts(n)),
    },
    Translator: {
        "model": "transformer of Vaswani et al.",
        "width": lambda n: n.embedding.embedding_dim,
        "layers": lambda n: len(_layers_of(n)) // 2,
        "embedding": "one for both languages",
        "inner": lambda n: _only(x.linear1.out_features for x in _layers_of(n)),
        "heads": lambda n: _only(m.num_heads for m in _attentions(n)),
        "readout": _tied,
        "vocabulary": lambda n: n.embedding.num_embeddings,
        "normalisation": _norms_of_translator,
        "dropout": _ends,
        "dropout_inner": _inside,
    },
}


def _data(b: Built) -> str:
    name, words = b.task.name, b.task.description
    steps = tuple(b.task.train.inputs.shape[1:])
    if name == "wmt16":
        return {
            "en to de": "WMT-16 news, English to German",
            "de to en": "WMT-16 news, German to English",
        }[words.split(", ")[1]]
    if name.startswith("mnist-") and name != "mnist-images":
        order = ", pixels in one random order," if name.endswith("permuted") else ""
        return f"MNIST{order} in {steps[0]} steps of {steps[1]} pixels"
    return {
        "mnist-images": "MNIST",
        "cifar10": "CIFAR-10",
        "cifar100": "CIFAR-100",
        "imagenet": "ImageNet-1k",
        "ptb": "Penn Treebank, words",
        "ptb-characters": "Penn Treebank, characters",
        "wikitext-2": "WikiText-2, words",
    }.get(name) or f"{name} with an alphabet of {b.net.readout.out_features}"


def _held_out(b: Built) -> str:
    given = {"mnist": IMAGES, "cifar10": 60, "cifar100": 12, "imagenet": PHOTOGRAPHS}.get(
        b.task.name.split("-")[0]
    )
    train, valid = len(b.task.train), len(b.task.valid)
    if given is None:
        return "none"
    assert train + valid == given
    return f"1 of {given // valid}"


def _vocabulary(b: Built) -> Any:
    if isinstance(b.net, StackedReluLM):
        whole = {"ptb": 7, "wikitext-2": 7, "ptb-characters": 8, "enwik8": 27}
        assert b.net.embedding.num_embeddings == whole[b.task.name], b.task.description
        return "all of the training text"
    return b.of("vocabulary")


def _normalisation(b: Built) -> str:
    kinds = {type(m) for m in b.net.modules() if isinstance(m, nn.BatchNorm2d | nn.LayerNorm)}
    said = b.of("normalisation")
    named = {nn.BatchNorm2d: BATCH_NORM, nn.LayerNorm: INSIDE}
    return str(said if said != "none" or not kinds else named[_only(kinds)])


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


def _dropout(b: Built) -> float:
    if isinstance(b.net, StackedReluLM):
        return float(b.net.leave.p)
    said = b.of("dropout")
    return float(said if said != "none" else _only(_dropouts(b.net)) if _dropouts(b.net) else 0.0)


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


def _sequence_length(b: Built) -> Any:
    inputs = b.task.train.inputs
    if isinstance(b.net, Translator):
        return _only((b.net.source, inputs.shape[1] - b.net.source))
    return inputs.shape[1] if isinstance(b.net, ReluRNN | StackedReluLM) else "none"


def _path_sgd_has_no_decay(b: Built) -> float:
    decay = b.one("weight_decay")
    return 0.0 if decay == "none" else decay


OF_NETWORK = (
    *("model", "width", "layers", "embedding", "inner", "heads", "readout", "unfold", "halving"),
    *("dropout_inner", "dropout_inputs", "dropout_layers", "dropout_words", "weight_drop"),
    "carried_state",
)
METERS: dict[str, Callable[[Built], Any]] = {
    "data": _data,
    "held_out": _held_out,
    **{field: partial(Built.of, field=field) for field in OF_NETWORK},
    "vocabulary": _vocabulary,
    "normalisation": _normalisation,
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
    "dropout": _dropout,
    "sequence_length": _sequence_length,
    "augmentation": lambda b: {None: "none", crop_and_flip: "crop-flip"}[b.trainer.augment],
    "smoothing": _smoothing,
    "tau": _tau,
    "start": _start,
    "path_space": _path_space,
    "device": lambda b: {"cpu": "one thread of a processor"}[b.trainer.device.type],
}

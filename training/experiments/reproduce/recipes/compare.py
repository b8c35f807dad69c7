"""The description of a run with the fields of a recipe, and the list of all differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...names import TASKS
from ...recipe import optimizer_kind
from ...task import task_options
from ...tasks.images import KEPT_APART
from ...tasks.papers import DROPPED, HELD_OUT, WMT_TOKENS
from ...tasks.translation import TOKENS, heads_of
from ..trial import Trial
from .cells import FIELDS, NONE, UNSAID, Cell

Description = dict[str, Any]

# our optimizer -> the paper's name of it, its momentum, and what is in path space
OPTIMIZERS: dict[str, tuple[str, float | str, str]] = {
    "gsgd": ("G-SGD", 0.0, "all weights"),
    "gmomentum": ("G-SGD", 0.9, "all weights"),
    "recurrent-gsgd": ("G-SGD", 0.0, "recurrent modules"),
    "sgd": ("SGD", 0.0, NONE),
    "momentum": ("SGD", 0.9, NONE),
    "path-sgd": ("Path-SGD", 0.0, NONE),
    "recurrent-path-sgd": ("Path-SGD", 0.0, "recurrent modules"),
    "adam": ("Adam", NONE, NONE),
    "AdamW": ("AdamW", NONE, NONE),
    "gadam": ("G-Adam", NONE, "all weights"),
}
# what multiplies the rates of an optimizer
SCALED = {"recurrent-path-sgd": "the mean of kappa at the start, in the recurrent modules"}
# the settings that Adam, AdamW and G-Adam have by themselves
BETAS, EPS = (0.9, 0.999), 1e-8
PAPER_TEXTS = ("ptb", "ptb-characters", "wikitext-2", "enwik8")
# options of tasks -> the field of a recipe that says the same
OPTIONS = {
    "hidden": "width",
    **{key: key for key in ("layers", "dropout", "smoothing", "inner", "vocabulary")},
    **dict.fromkeys(("length", "longest"), "sequence_length"),
}
# options that other fields describe; what a task gets besides stands with the data
DESCRIBED = {*OPTIONS, "network", "depth", "data", "reverse", "original", "overlapping"}
# images of Fashion-MNIST: to train and to choose, of which the tasks hold a share out; to test
FASHION_IMAGES, FASHION_TESTS = 60_000, 10_000
SEQUENCE_STEPS = {
    "mnist-28": 28,
    "mnist-98": 98,
    "fashion-14": 14,
    "fashion-28": 28,
    "digits-rows": 8,
    "digits-pixels": 64,
}
COMMON: Description = {
    **dict.fromkeys(
        ("embedding", "unfold", "normalisation", "carried_state", "sequence_length"), NONE
    ),
    **dict.fromkeys(("inner", "heads", "readout", "vocabulary", "halving", "dropout_inner"), NONE),
    **dict.fromkeys(("dropout_inputs", "dropout_layers", "dropout_words", "weight_drop"), NONE),
    "dropout": 0.0,
    "smoothing": 0.0,
}


def describe(
    trial: Trial,
    rates: Sequence[float],
    seeds: int,
    tuning_seeds: int,
    decays: Sequence[float] = (),
) -> Description:
    """Describe a run in the fields of a recipe."""
    options = {**task_options(trial.task), **dict(trial.options)}
    name, momentum, path_space = OPTIMIZERS.get(trial.optimizer, (trial.optimizer, UNSAID, NONE))
    kind = optimizer_kind(trial.optimizer)
    schedule, *shares = trial.schedule.split()
    warm = schedule in ("cosine", "inverse-root")
    start = trial.init or kind.init
    rule = "" if trial.rule == "modulo" else f", skeleton by the rule {trial.rule}"
    own = "a seed" if tuning_seeds == 1 else f"{tuning_seeds} seeds"
    searched = f"by validation data, with {own} of its own" if len(rates) > 1 else NONE
    moments = "adam" in trial.optimizer.lower()
    run = {
        **COMMON,
        **{OPTIONS[key]: value for key, value in options.items() if key in OPTIONS},
        "data": TASKS.get(trial.task, f"those of the task {trial.task}"),
        "held_out": _held_out(trial.task),
        **_family(trial.task)(trial.task, options),
        "optimizer": name,
        "momentum": momentum,
        "betas": list(trial.betas or BETAS) if moments else NONE,
        "eps": (trial.eps or EPS) if moments else NONE,
        "rates": list(rates),
        "scaling": SCALED.get(trial.optimizer, NONE),
        "search": searched,
        "schedule": schedule if warm else trial.schedule,
        "warmup": round(float(shares[0]) * trial.epochs, 6) if warm else 0,
        "epochs": trial.epochs,
        "batch": trial.batch_size,
        "decay": list(decays) or trial.decay,
        "clip": NONE if trial.clip is None else trial.clip,
        "augmentation": trial.augment,
        "tau": trial.tau,
        "start": start.replace("-", " ") + rule,
        "path_space": path_space,
        "seeds": seeds,
        "reported": "last epoch",
        "device": "one thread of a processor" if trial.device == "cpu" else trial.device,
    }
    run["data"] = ", ".join((run["data"], *_cut(trial.task, options)))
    blocks = [say.format(options[key]) for key, say in BLOCKS.items() if options.get(key)]
    run["model"] = ", ".join((run["model"], *blocks))
    return {key: run[key] for key in FIELDS}


def differences(cell: Cell, run: Mapping[str, Any]) -> tuple[str, ...]:
    """List where a run differs from a recipe, and what the recipe does not state."""
    lines = []
    for key, label in FIELDS.items():
        said, ours = cell.recipe[key], run[key]
        if said == UNSAID:
            lines.append(f"{label}: {show(ours)}; the paper does not say.")
        elif not same(said, ours):
            lines.append(f"{label}: {show(ours)} in place of {show(said)}.")
    return tuple(lines)


def same(first: Any, second: Any) -> bool:
    """Whether two values of a field are equal: lists of rates in any order, numbers by value."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return sorted(first) == sorted(second)
    return bool(first == second)


def show(value: Any) -> str:
    """Write a value for a sentence."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(show(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def training_images(task: str) -> int:
    """Return how many training images a task has, 0 where this is not fixed."""
    whole = FASHION_IMAGES if task.startswith("fashion-") else 0
    return whole - whole // HELD_OUT


def _held_out(task: str) -> str:
    """Say which examples choose rates: some of those to train on, where the data have no others."""
    if task == "imagenet":
        return f"1 of {KEPT_APART}"
    if task.startswith(("mnist-", "fashion-", "cifar")):
        return f"1 of {HELD_OUT}"
    return NONE


def _cut(task: str, options: Mapping[str, Any]) -> list[str]:
    """Say what a run takes of its task's data, and how."""
    given = {key: value for key, value in options.items() if key not in DESCRIBED | BLOCKS.keys()}
    if given.get("pool") == 1:
        del given["pool"]
    said = []
    if given.get("limit") and (whole := training_images(task)):
        said = [f"{min(given.pop('limit'), whole):,} of {whole:,} training examples"]
    return said + [CUTS[key].format(value) for key, value in sorted(given.items()) if value]


# options that change a task's data -> what they do
CUTS = {
    "limit": "at most {:,} training examples",
    "pool": "means over squares of {0} x {0} pixels",
    "tests": "{:,} test examples",
}
# what the blocks of a residual network may have besides: option of the task -> its words
BLOCKS = {
    "scale": "branches with a learned factor from {:g}",
    "drop": "{:.0%}" + " of the branches dropped in a step",
    "activity": "squares of activations penalised by {:g}",
}


def _sequence(task: str, _options: Mapping[str, Any]) -> Description:
    steps = SEQUENCE_STEPS[task.removesuffix("-permuted")]
    return {"model": "ReLU RNN", "layers": 1, "sequence_length": steps}


def _text(task: str, options: Mapping[str, Any]) -> Description:
    width, of_paper = options["hidden"], task in PAPER_TEXTS
    own = width if task == "bible-characters" else max(1, width // 4)
    return {
        "model": "stacked ReLU RNN",
        "embedding": 400 if of_paper else own,
        "readout": "its own",
        "vocabulary": "all of the training text",
        "carried_state": False,
        **(DROPPED if of_paper else dict.fromkeys(DROPPED, 0.0)),
    }


TRANSFORMER: Description = {
    "readout": "its own",
    "normalisation": "layer norm inside the branch",
    "dropout_inner": 0.0,
}
# network of our tasks -> what recipes say of it, whatever its size
NETWORKS: dict[str, Description] = {
    "recurrent": {"model": "recurrent CNN", "unfold": 3, "normalisation": "batch norm"},
    "resnet": {
        "model": "ResNet of He et al. for CIFAR-10",
        "normalisation": "batch norm",
        "halving": "by strides at the second and third stage",
    },
    "deep-resnet": {
        "model": "ResNet of He et al. for ImageNet",
        "normalisation": "batch norm",
        "halving": "by strides at the second to fourth stage",
    },
    "residual": {"model": "residual blocks"},
    "vit": {"model": "ViT of Dosovitskiy et al.", **TRANSFORMER},
    "swin": {
        "model": "Swin transformer of Liu et al.",
        "halving": "by merging patches before the second to fourth stage",
        **TRANSFORMER,
    },
}
# transformers of images -> side of a patch, features of a head
PATCHES = {"vit": (16, 64), "swin": (4, 32)}


def _images(task: str, options: Mapping[str, Any]) -> Description:
    network, width, depth = (options[key] for key in ("network", "hidden", "depth"))
    said = {"layers": depth, **NETWORKS[network]}
    if network == "recurrent":
        middle = f"by maxima over 3 x 3 after layers 1 and {depth // 2 + 1}"
        early = "by maxima over 2 x 2 after layers 2 and 3"
        said |= {"layers": depth + 1, "halving": middle if options.get("overlapping") else early}
    elif network in PATCHES:
        side, head = PATCHES[network]
        said |= {"embedding": f"patches of {side} x {side}", "inner": 4 * width}
        said["heads"] = max(1, width // head)
    elif network == "deep-resnet" and task == "imagenet":
        said["halving"] = f"twice before the first stage, {said['halving']}"
    return said


def _translation(task: str, options: Mapping[str, Any]) -> Description:
    width, original, of_paper = options["hidden"], options.get("original"), task == "wmt16"
    said: Description = {
        "model": "transformer of Vaswani et al.",
        "embedding": "one for both languages",
        "inner": options.get("inner", 2 * width),
        "heads": heads_of(width),
        "readout": "the embedding's" if original else "its own",
        "vocabulary": WMT_TOKENS if of_paper else options.get("vocabulary", TOKENS),
        "normalisation": "layer norm " + ("after the sum" if original else "inside the branch"),
        "sequence_length": options.get("longest", 32),
        "dropout_inner": 0.0 if original else options["dropout"],
    }
    if of_paper:
        languages = "German to English" if options["reverse"] else "English to German"
        said["data"] = f"WMT-16 news, {languages}"
    return said


def _family(task: str) -> Callable[[str, Mapping[str, Any]], Description]:
    if task.removesuffix("-permuted") in SEQUENCE_STEPS:
        return _sequence
    if task in (*PAPER_TEXTS, "text-characters", "bible-characters"):
        return _text
    if task.endswith("-images") or task in ("cifar10", "cifar100", "imagenet"):
        return _images
    return _translation

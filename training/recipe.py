"""Recipes: optimizer, starting point and learning rate; and how to set them up."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

import pathspace as ps
from pathspace.errors import InputError
from pathspace.paths.skeleton import Skeleton

from .optim import GSGD, GAdam, PathSGD, init_skeleton
from .recurrent_part import recurrent_gsgd, recurrent_path_sgd
from .task import Task

Rule = Literal["modulo", "magnitude", "random"]
Init = Literal["default", "unit-skeleton", "unbalanced"]
# an unbalanced start rescales every unit by a factor between 1/10 and 10
UNBALANCED = math.log(10.0)
# (model, learning rate, skeleton if needed, example inputs) -> optimizer
Maker = Callable[
    [nn.Module, float, Skeleton | None, tuple[torch.Tensor, ...]], torch.optim.Optimizer
]


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that users choose by name.

    Args:
        name: its name.
        summary: half a sentence for the help text.
        lr: default learning rate.
        init: default starting point.
        needs_skeleton: whether the maker needs a skeleton.
        make: (model, learning rate, skeleton, example inputs) -> optimizer.
        decay: default weight decay; ``None`` for an optimizer that has none.
    """

    name: str
    summary: str
    lr: float
    init: Init
    needs_skeleton: bool
    make: Maker
    decay: float | None = 0.0


def _known(name: str, skeleton: Skeleton | None) -> Skeleton:
    if skeleton is None:
        raise InputError(
            f"The optimizer {name} got no skeleton; find one with find_skeleton(task, recipe)."
        )
    return skeleton


def _gsgd(momentum: float) -> Maker:
    return lambda model, lr, skeleton, example: GSGD(
        model.named_parameters(), lr=lr, momentum=momentum, skeleton=_known("gsgd", skeleton)
    )


def _sgd(momentum: float) -> Maker:
    return lambda model, lr, skeleton, example: torch.optim.SGD(
        model.parameters(), lr=lr, momentum=momentum
    )


def _gadam(
    model: nn.Module, lr: float, skeleton: Skeleton | None, example: tuple[torch.Tensor, ...]
) -> torch.optim.Optimizer:
    return GAdam(model.named_parameters(), lr=lr, skeleton=_known("gadam", skeleton))


def _path_sgd(
    model: nn.Module, lr: float, skeleton: Skeleton | None, example: tuple[torch.Tensor, ...]
) -> torch.optim.Optimizer:
    # One sample, so that the path norm does not grow with the batch. The second term of kappa costs
    # a pass per recurrent weight and is, for common initialisations, a thousandth of the first; the
    # published code omits it.
    return PathSGD(
        model.named_parameters(),
        lr=lr,
        model=model,
        example=tuple(value[:1] for value in example),
        second=False,
    )


OPTIMIZERS = {
    kind.name: kind
    for kind in (
        OptimizerKind(
            "gsgd", "SGD on the values of basis paths", 0.05, "unit-skeleton", True, _gsgd(0.0)
        ),
        OptimizerKind(
            "gmomentum", "the same with momentum 0.9", 0.01, "unit-skeleton", True, _gsgd(0.9)
        ),
        OptimizerKind("sgd", "SGD on the weights", 0.05, "default", False, _sgd(0.0)),
        OptimizerKind(
            "momentum", "SGD on the weights, momentum 0.9", 0.02, "default", False, _sgd(0.9)
        ),
        OptimizerKind(
            "path-sgd", "SGD scaled by the path norm", 0.5, "unit-skeleton", False, _path_sgd, None
        ),
        OptimizerKind(
            "recurrent-gsgd",
            "gsgd for the recurrent layers of a model alone, sgd for the rest",
            0.05,
            "unit-skeleton",
            False,
            lambda model, lr, skeleton, example: recurrent_gsgd(model, lr, example),
        ),
        OptimizerKind(
            "recurrent-path-sgd",
            "path-sgd for the recurrent layers of a model alone, sgd for the rest",
            0.05,
            "unit-skeleton",
            False,
            lambda model, lr, skeleton, example: recurrent_path_sgd(model, lr, example),
            None,
        ),
        OptimizerKind(
            "adam",
            "Adam on the weights",
            0.002,
            "default",
            False,
            lambda model, lr, skeleton, example: torch.optim.Adam(model.parameters(), lr=lr),
        ),
        OptimizerKind(
            "gadam", "Adam on the values of basis paths", 0.002, "unit-skeleton", True, _gadam
        ),
    )
}


# Optimizers of torch that need a closure, or sparse gradients.
UNFIT = {
    "LBFGS": "asks for the loss several times in a step",
    "SparseAdam": "takes sparse gradients only",
}


def torch_names() -> tuple[str, ...]:
    """Return the sorted names of torch's optimizers that a trainer can use.

    Example:
        >>> "AdamW" in torch_names(), "LBFGS" in torch_names()
        (True, False)
    """
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    base = torch.optim.Optimizer
    return tuple(
        sorted(
            n for n, k in kinds.items() if issubclass(k, base) and k is not base and n not in UNFIT
        )
    )


def optimizer_kind(name: str) -> OptimizerKind:
    """Find an optimizer by name: one of ``OPTIMIZERS``, or the class name of an optimizer of torch.

    Args:
        name: the name.

    Returns:
        The optimizer. Optimizers of torch take steps on weights, with torch's default
        settings and learning rate.

    Raises:
        InputError: there is no such optimizer, or a trainer cannot use it.

    Example:
        >>> optimizer_kind("AdamW").lr
        0.001
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if name in UNFIT:
        raise InputError(
            f"torch's {name} {UNFIT[name]}, which a trainer does not do; choose another optimizer."
        )
    if name not in torch_names():
        known = ", ".join((*OPTIMIZERS, *torch_names()))
        raise InputError(f"There is no optimizer '{name}'; choose one of: {known}.")
    kind = getattr(torch.optim, name)

    def make(
        model: nn.Module, lr: float, skeleton: Skeleton | None, example: tuple[torch.Tensor, ...]
    ) -> torch.optim.Optimizer:
        try:
            return kind(model.parameters(), lr=lr)  # type: ignore[no-any-return]
        except ValueError as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise InputError(
                f"torch's {name} refuses this model ({reason}); choose another optimizer."
            ) from error

    defaults = {key: found.default for key, found in inspect.signature(kind).parameters.items()}
    lr, decay = defaults["lr"], defaults.get("weight_decay")
    return OptimizerKind(name, f"torch's {name} on the weights", lr, "default", False, make, decay)


@dataclass(frozen=True)
class Recipe:
    """How a model is initialised and optimised.

    The step of G-SGD multiplies the learning rate of an edge ``u -> v`` by ``1 / (pre(u) s(v))^2``,
    a product of skeleton weights. With common initialisations these products are small and the
    multiplier is as large as 1e13; ``init="unit-skeleton"`` sets every skeleton weight to +1 or -1,
    so that every multiplier is 1: the recommended start for G-SGD. It changes the initial function,
    so a fair comparison starts other optimizers there, too.

    Args:
        optimizer: a key of ``OPTIMIZERS``, or the name of one of torch's
            classes, such as ``"AdamW"``.
        lr: learning rate; ``None`` takes the optimizer's own default.
        init: ``"default"`` keeps the initial weights of the model, ``"unit-skeleton"`` sets those
            of the skeleton to +-1, ``"unbalanced"`` rescales every unit by a random factor
            between 1/10 and 10, which does not change the function; ``None`` takes the
            optimizer's own default.
        rule: the rule of the skeleton.
        seed: seed of the model, and of the skeleton of the rule ``"random"``.
        decay: weight decay of the optimizer; decay of path values for optimizers on path values;
            ``None`` takes the optimizer's own default, 0 for all but torch's AdamW and Muon.
        betas: decay rates of the two moments of Adam and its kin; ``None`` takes the optimizer's
            own.
        eps: what they add to the root of the second moment; ``None`` takes the optimizer's own.

    Raises:
        InputError: no optimizer, rule or starting point has this name, the learning rate is not
            positive, a decay rate is not between 0 and 1, or the optimizer has no weight decay.

    Example:
        >>> Recipe("sgd", lr=0.1).settings()
        {'optimizer': 'sgd', 'lr': 0.1, 'init': 'default', 'seed': 0}
    """

    optimizer: str = "gsgd"
    lr: float | None = None
    init: Init | None = None
    rule: Rule = "modulo"
    seed: int = 0
    decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None

    def __post_init__(self) -> None:
        kind = optimizer_kind(self.optimizer)
        for what, value, known in (
            ("skeleton rule", self.rule, get_args(Rule)),
            ("starting point", self.init, (*get_args(Init), None)),
        ):
            if value not in known:
                names = ", ".join(name for name in known if name)
                raise InputError(f"There is no {what} '{value}'; choose one of: {names}.")
        # replace defaults by their values, so that every record of a run states them
        # (the dataclass is frozen)
        object.__setattr__(self, "lr", kind.lr if self.lr is None else float(self.lr))
        object.__setattr__(self, "init", self.init or kind.init)
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InputError(
                f"The learning rate is {self.lr}; give a positive number such as {kind.lr}."
            )
        decay = kind.decay or 0.0 if self.decay is None else float(self.decay)
        object.__setattr__(self, "decay", decay)
        if not (math.isfinite(decay) and decay >= 0):
            raise InputError(
                f"The weight decay is {decay}; give 0 or a positive number such as 1e-4."
            )
        if decay and kind.decay is None:
            raise InputError(
                f"The optimizer {self.optimizer} has no weight decay; leave it out, or choose"
                " another."
            )
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(
                f"The decay rates of the moments are {self.betas}; give two numbers from 0 to"
                " below 1, such as 0.9 and 0.98."
            )
        if self.eps is not None and not (math.isfinite(self.eps) and self.eps > 0):
            raise InputError(f"The eps is {self.eps}; give a positive number such as 1e-8.")

    @property
    def rate(self) -> float:
        """The learning rate, the default filled in."""
        return self.lr if self.lr is not None else optimizer_kind(self.optimizer).lr

    @property
    def needs_skeleton(self) -> bool:
        """Whether this recipe needs the reduction graph."""
        return optimizer_kind(self.optimizer).needs_skeleton or self.init == "unit-skeleton"

    def settings(self) -> dict[str, Any]:
        """Return the plain values that identify a run of this recipe."""
        # without settings that have no effect
        used = {
            "rule": self.needs_skeleton,
            "decay": bool(self.decay),
            "betas": self.betas is not None,
            "eps": self.eps is not None,
        }
        return {k: v for k, v in asdict(self).items() if used.get(k, True)}


def find_skeleton(task: Task, recipe: Recipe) -> Skeleton:
    """Trace a new model of the task and choose its skeleton.

    Args:
        task: the task, for the model and the example inputs.
        recipe: the recipe, for the rule and the seed.

    Returns:
        The skeleton. With the rules ``"modulo"`` and ``"random"`` it depends
        only on the architecture.

    Example:
        >>> from pathspace.training.experiments.tasks import load_task
        >>> skeleton = find_skeleton(load_task("digits-rows", hidden=6), Recipe())
        >>> sorted(skeleton.masks)
        ['readout.weight', 'rnn.weight_hh_l0', 'rnn.weight_ih_l0']
    """
    graph = ps.trace(task.make_model(recipe.seed), *task.example_inputs())
    return graph.skeleton(rule=recipe.rule, seed=recipe.seed)


def prepare(
    task: Task, recipe: Recipe, skeleton: Skeleton | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Create the model of a task, set its starting point and create its optimizer.

    Args:
        task: the task.
        recipe: the recipe.
        skeleton: the skeleton, if it is known already; otherwise
            :func:`find_skeleton` finds it if needed.

    Returns:
        Model and optimizer, ready for a trainer.

    Raises:
        InputError: the optimizer has no moments, and the recipe sets their decay rates.

    Example:
        >>> from pathspace.training.experiments.tasks import load_task
        >>> model, optimizer = prepare(load_task("digits-rows", hidden=6), Recipe("gsgd"))
        >>> type(optimizer).__name__
        'GSGD'
    """
    model = task.make_model(recipe.seed)
    if skeleton is None and recipe.needs_skeleton:
        skeleton = find_skeleton(task, recipe)
    if recipe.init == "unit-skeleton" and skeleton is not None:
        init_skeleton(model, skeleton)
    elif recipe.init == "unbalanced":
        graph = ps.trace(model, *task.example_inputs())
        draws = torch.rand(
            graph.num_units,
            generator=torch.Generator().manual_seed(recipe.seed),
            dtype=torch.float64,
        )
        model = ps.rescale(model, graph, UNBALANCED * (2 * draws - 1))
    optimizer = optimizer_kind(recipe.optimizer).make(
        model, recipe.rate, skeleton, task.example_inputs()
    )
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = recipe.decay
        for name, value in (("betas", recipe.betas), ("eps", recipe.eps)):
            if value is None:
                continue
            if name not in group:
                raise InputError(
                    f"The optimizer {recipe.optimizer} has no {name}; leave it out, or choose"
                    " another, such as adam."
                )
            group[name] = value
    return model, optimizer

"""The loss of the gradients: a function, a name, the loss that the model returns, or a stand-in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from pathspace.cli.target import find_object
from pathspace.errors import InputError, InputTypeError
from pathspace.models.isolation import torch_kept
from pathspace.models.nested import leaves

Function = Callable[[Any, Any], Tensor]


@dataclass
class Loss:
    """A loss ``(outputs, targets) -> tensor`` with its description.

    Attributes:
        function: the function.
        says: its description, to follow "Gradients are those of".
        given: whether it belongs to a task; otherwise it is a stand-in.
        named: whether the user or the model determines the loss; otherwise it is chosen here.
        reduction: ``"mean"`` or ``"sum"`` over samples, ``None`` if it must be measured.
    """

    function: Function
    says: str
    given: bool = True
    reduction: str | None = None
    named: bool = True

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of one batch."""
        return self.function(outputs, targets)


def choose_loss(loss: str | Function | nn.Module | None, seed: int = 0) -> Loss:
    """The loss for a user's choice.

    Args:
        loss: ``loss(outputs, targets)``; or the name of a loss of torch (``"cross_entropy"``,
            ``"MSELoss"``); or ``package.module:name`` or ``path/to/file.py:name`` of a function, a
            module or a class of modules; ``None`` for :func:`default_loss`.
        seed: seed of the stand-in.

    Returns:
        The loss.

    Raises:
        InputError: torch has no loss of this name, or the named object cannot be called.
        InputTypeError: the loss is neither a function nor a name.

    Example:
        >>> choose_loss("mse_loss")(torch.tensor([1.0, 3.0]), torch.zeros(2))
        tensor(5.)
    """
    if loss is None:
        return default_loss(seed)
    if isinstance(loss, Loss):
        return loss
    if not isinstance(loss, str):
        if not callable(loss):
            raise InputTypeError(
                f"The loss is a {type(loss).__name__}, expected a function loss(outputs, targets),"
                " or its name."
            )
        return Loss(loss, "the loss that was given", reduction=_known(loss))
    if ":" in loss:
        found = find_object(loss)
        found = found() if isinstance(found, type) and issubclass(found, nn.Module) else found
        if not callable(found):
            raise InputError(
                f"The loss '{loss}' is a {type(found).__name__}, expected a function loss(outputs,"
                " targets); name one."
            )
        return Loss(found, f"the loss {loss}", reduction=_known(found))
    others = ("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div")
    functions = {name: f for name, f in vars(F).items() if name.endswith("_loss") or name in others}
    classes = {
        name: made
        for name, made in vars(nn.modules.loss).items()
        if name.endswith("Loss") and name[0] != "_"
    }
    function = functions.get(loss, classes.get(loss))
    if function is None or not callable(function):
        names = ", ".join(sorted(name for name in functions if name[0] != "_"))
        raise InputError(
            f"torch has no loss named '{loss}'; choose one of {names}, "
            "a class such as CrossEntropyLoss, or file.py:function."
        )
    made: Function = function() if isinstance(function, type) else function
    return Loss(
        lambda outputs, targets: _of_scores(made, loss, outputs, targets),
        loss,
        reduction=_known(made),
    )


def _known(loss: Any) -> str | None:
    """The reduction of a loss of torch: its attribute, or the default of a function."""
    stated = getattr(loss, "reduction", None)
    if stated is None and getattr(loss, "__module__", "") == "torch.nn.functional":
        stated = inspect.signature(loss).parameters["reduction"].default
    return stated if stated in ("mean", "sum") else None


def _of_scores(function: Function, name: str, outputs: Any, targets: Any) -> Tensor:
    """A loss of torch on a model's scores, with classes in the dimension that torch expects."""
    if targets is None:
        raise InputError(
            f"The loss {name} needs targets, and the data have none; give pairs (inputs, targets)."
        )
    found = scores(outputs)
    tokens = (
        found.ndim > 2 and not targets.is_floating_point() and targets.shape == found.shape[:-1]
    )
    if tokens and targets.shape != found.shape[:1] + found.shape[2:]:
        found, targets = found.flatten(0, -2), targets.flatten()
    return function(found, targets)


def scores(outputs: Any) -> Tensor:
    """The floating-point tensor for a loss: ``logits`` if the outputs have them, else the first.

    Args:
        outputs: the output of a model.

    Raises:
        InputError: there is none.
    """
    named = getattr(outputs, "logits", None)
    held = leaves(named if isinstance(named, Tensor) else outputs)
    found: list[Tensor] = [tensor for tensor in held if tensor.is_floating_point()]
    if not found:
        raise InputError(
            "The outputs contain no tensor of real numbers, expected one for a loss; pass loss=."
        )
    return next((tensor for tensor in found if tensor.ndim), found[0])


def default_loss(seed: int = 0) -> Loss:
    """The default loss, if the user gives none.

    It is the model's loss if the model returns one (a scalar as its first output, as models of the
    transformers library do if they are given labels). Otherwise, with targets, it is the
    cross-entropy of classes or the mean squared error. Without targets it is the negative
    log-likelihood of random classes, or the mean square if outputs are not scores.

    Args:
        seed: seed of the classes.

    Returns:
        The loss; its description is valid after its first call.
    """

    def loss(outputs: Any, targets: Any) -> Tensor:
        held: list[Tensor] = leaves(outputs)
        first = next((tensor for tensor in held if tensor.is_floating_point()), None)
        if first is not None and first.ndim == 0:
            made.says, made.given, made.named = "the loss that the model returns", True, True
            return first
        found = scores(outputs)
        found = found if found.dtype == torch.float64 else found.float()
        if isinstance(targets, Tensor):
            function = F.mse_loss if targets.is_floating_point() else F.cross_entropy
            made.says, made.given = f"{function.__name__}, which suits the targets", True
            return _of_scores(function, function.__name__, found, targets)
        if found.ndim in (2, 3) and found.shape[-1] > 1:
            generator = torch.Generator().manual_seed(seed)
            classes = torch.randint(0, found.shape[-1], found.shape[:-1], generator=generator).to(
                found.device
            )
            made.says = "random classes: they speak of the network at this point and not of a task"
            return F.cross_entropy(found.flatten(0, -2), classes.flatten())
        return found.square().mean()

    made = Loss(
        loss,
        "the mean square of the outputs: they speak of the network and not of a task",
        False,
        "mean",
        False,
    )
    return made


def reduction(loss: Function, outputs: Any, targets: Any, value: Tensor, batch_dim: int = 0) -> str:
    """Whether a loss is a mean or a sum over samples: from its attribute, or
    measured on a doubled batch.

    Args:
        loss: ``loss(outputs, targets)``.
        outputs: the output of the model.
        targets: passed to the loss.
        value: ``loss(outputs, targets)``; a vector counts as a sum.
        batch_dim: the dimension of the samples.

    Returns:
        ``"mean"`` or ``"sum"``; also ``"mean"`` if the loss fails on a doubled batch.
    """
    stated = getattr(loss, "reduction", None)
    if value.ndim or stated in ("mean", "sum"):
        return "sum" if value.ndim else str(stated)

    def twice(tensor: Any) -> Any:
        held = isinstance(tensor, Tensor) and tensor.ndim > batch_dim
        return torch.cat([tensor, tensor], batch_dim) if held else tensor

    try:
        with torch.no_grad(), torch_kept():
            doubled = loss(tree_map(twice, outputs), tree_map(twice, targets))
        return "sum" if abs(float(doubled / value) - 2) < 0.5 else "mean"
    except Exception:  # a user's loss may raise any exception on other sizes
        return "mean"

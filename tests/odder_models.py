"""More odd models: what code in a forward may do, and what weights and inputs may be."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from odd_models import LOG, ODD, Named, Net, Odd, changed, net, odd, running, x
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


def doing(step: Callable[[Any, Tensor], Any]) -> Any:
    """A small network that does something to its hidden activations."""

    class Doing(Net):
        def forward(self, x: Tensor) -> Any:
            return self.second(step(self, self.hidden(x)))

    return net(Doing())


def between(words: str = "", units: int | None = None) -> Any:
    """Register what a small network does to its hidden activations, by its name."""

    def register(step: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
        ODD[step.__name__] = Odd(lambda: doing(step), words, units=units)
        return step

    return register


# -- ways to call


@odd(units=4)
class CallOverridden(Net):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x + 1)


@running(units=4, given=lambda: (Named(x=x()),))
def takes_anything(self: Any, *args: Any, **kwargs: Any) -> Any:
    return Net.forward(self, args[0] if args else kwargs["x"])


@running(units=4, given=lambda: (None, x(), Named(deep=True)))
def optional_inputs_left_out(self: Any, x: Any = None, y: Any = None, *, deep: bool = False) -> Any:
    return Net.forward(self, x if y is None else y)


@odd(units=4)
def forward_is_static() -> Any:
    class Model(nn.Sequential):
        def __getattr__(self, name: str) -> Any:
            return super().__getattr__({"a": "0"}.get(name, name))

        def forward(self, x: Tensor) -> Any:
            return self.get_submodule("2")(torch.relu(self.a(x)))

    return net(Model(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))


@running(units=4)
def generator_function_as_forward(self: Any, x: Tensor) -> Any:
    hidden = self.hidden(x)
    yield self.second(hidden)
    yield self.second(2 * hidden)


@odd("coroutine")
class CoroutineAsForward(Net):
    async def forward(self, x: Tensor) -> Any:
        await asyncio.sleep(0)
        return super().forward(x)


@between(units=4)
def thread_in_forward(self: Any, h: Tensor) -> Tensor:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    return h


@odd(units=4)
def one_layer_twice_in_a_row() -> Any:
    layer = nn.Linear(3, 3)
    return net(nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))


@running("sets the data of a tensor")
def memory_of_an_activation_that_is_set(self: Any, x: Tensor) -> Any:
    h = torch.relu(self.hidden(x))
    h.data = torch.sigmoid(self.hidden(x))
    return self.second(h)


@running(units=4)
def weight_without_its_gradient(self: Any, x: Tensor) -> Any:
    return torch.nn.functional.linear(
        self.hidden(x).data, self.second.weight.data, self.second.bias
    )


@odd("cannot be captured")
def child_that_holds_its_parent() -> Any:
    class Child(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return self.parent.second(h)

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.child = Child()
            self.child.parent = self

        def forward(self, x: Tensor) -> Any:
            return self.child(self.hidden(x))

    return net(Model())


@odd("no hash")
@dataclasses.dataclass
class ModuleThatIsADataclass(nn.Module):
    width: int = 4

    def __post_init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, self.width), nn.Linear(self.width, 2)

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.relu(self.first(x)))


@odd(units=4)
class ModuleThatComparesByValue(Net):
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return 1


@odd(units=4)
class CachedMethod(Net):
    @functools.lru_cache  # noqa: B019
    def table(self, size: int) -> Tensor:
        return torch.ones(size)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.table(x.shape[-1]))


@odd(units=4)
class CachedProperty(Net):
    @functools.cached_property
    def table(self) -> Tensor:
        return torch.ones(3)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.table)


ODD |= {
    "symbolically_traced": Odd(lambda: net(torch.fx.symbolic_trace(Net())), units=4),
    "exported_and_unlifted": Odd(lambda: net(torch.export.export(Net(), (x(),)).module()), units=4),
}


@odd(units=4)
def scripted_function_inside() -> Any:
    scripted = torch.jit.script(_doubled)

    def step(self: Any, h: Tensor) -> Any:
        return scripted(h)

    model, inputs = doing(step)
    model.step = scripted
    return model, inputs


def _doubled(h: Tensor) -> Tensor:
    return 2 * h


@odd(units=4)
def compiled_function_inside() -> Any:
    compiled = torch.compile(_doubled, backend="eager")
    return doing(lambda self, h: compiled(h))


@odd(units=4)
def not_to_be_compiled() -> Any:
    disabled = torch.compiler.disable(_doubled)
    return doing(lambda self, h: disabled(h))


# -- autograd inside


ODD |= {
    "checkpointed": Odd(
        lambda: doing(lambda self, h: checkpoint(_doubled, h, use_reentrant=False)), units=4
    ),
    "checkpointed_reentrantly": Odd(
        lambda: doing(lambda self, h: checkpoint(_doubled, h, use_reentrant=True)), units=4
    ),
    "gradient_of_its_own": Odd(lambda: doing(lambda self, h: Straight.apply(h)), units=4),
    "functional_derivative_in_forward": Odd(
        lambda: doing(lambda self, h: torch.func.grad(lambda v: (v**2).sum())(h)),
        "gradients inside forward",
    ),
    "mapped_over_rows": Odd(
        lambda: doing(lambda self, h: torch.vmap(torch.relu)(h)), "cannot be captured"
    ),
}


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@between()
def derivative_in_forward(self: Any, h: Tensor) -> Any:
    with torch.enable_grad():
        y = self.first.weight.square().sum()
        return h + torch.autograd.grad(y, self.first.weight, create_graph=True)[0].sum()


@between()
def functional_call_inside(self: Any, h: Tensor) -> Any:
    weights = {"weight": self.second.weight.mT @ self.second.weight, "bias": torch.zeros(4)}
    return torch.func.functional_call(nn.Linear(4, 4), weights, (h,))


@between(units=4)
def tensor_hooks_inside(self: Any, h: Tensor) -> Any:
    if h.requires_grad:
        h.register_hook(lambda grad: grad)
        h.retain_grad()
    return h


@between()
def backward_pass_in_forward(self: Any, h: Tensor) -> Any:
    with torch.enable_grad():
        probe = torch.ones(1, requires_grad=True)
        (probe * 2).sum().backward()
    return h * probe.grad


@between(units=4)
def switches_gradients_off_for_all(self: Any, h: Tensor) -> Any:
    torch.set_grad_enabled(False)
    return h


@between(units=4)
def sets_the_default_type(self: Any, h: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    return h


@between(units=4)
def freezes_its_layers(self: Any, h: Tensor) -> Any:
    self.second.requires_grad_(False)
    return h


@between()
def clips_its_weights(self: Any, h: Tensor) -> Any:
    with torch.no_grad():
        self.second.weight.data.clamp_(-0.1, 0.1)
    return h


@running()
def returns_a_penalty_of_its_weights(self: Any, x: Tensor) -> Any:
    return Net.forward(self, x), sum(p.square().sum() for p in self.parameters())


@running()
def returns_a_parameter(self: Any, x: Tensor) -> Any:
    return Net.forward(self, x), self.first.weight


@running(units=4)
def returns_its_inputs(self: Any, x: Tensor) -> Any:
    return x, x.view(-1), Net.forward(self, x)


@running(units=4)
def keys_that_are_numbers(self: Any, x: Tensor) -> Any:
    return OrderedDict({1: Net.forward(self, x), (2, "a"): None})


# -- values looked at


ODD |= {
    "prints_a_value": Odd(
        lambda: doing(lambda self, h: LOG.append(f"{h.mean():.2f}") or h), "cannot be captured"
    ),
    "chooses_a_branch_at_random": Odd(
        lambda: doing(lambda self, h: h if random.random() < 2 else -h)
    ),
    "noise_from_numpy": Odd(
        lambda: doing(lambda self, h: h * float(np.random.default_rng(0).random()))
    ),
    "condition_of_torch": Odd(
        lambda: doing(
            lambda self, h: torch.cond(h.sum() > 0, lambda v: 2 * v, lambda v: 3 * v, (h,))
        )
    ),
    "raises_stop_iteration": Odd(lambda: doing(lambda self, h: next(iter([]))), "StopIteration"),
}


@between("values of tensors")
def checks_for_nan(self: Any, h: Tensor) -> Any:
    if torch.isnan(h).any():
        raise ValueError("NaN")
    return h


@between("values of tensors")
def asserts_finite(self: Any, h: Tensor) -> Any:
    # (code of this module is not rewritten, as that of tests is)
    assert torch.isfinite(h).all()
    assert (h >= 0).all(), "negative"
    assert torch.isfinite(h).all() and len(h)
    assert not torch.isnan(h).any()
    return h


@between()
def asserts_types(self: Any, h: Tensor) -> Any:
    assert (isinstance(h, Tensor) and h.dtype == torch.float32) or h.dtype == torch.float64
    assert h.dim() == 2 and h.shape[1] == 4
    return h


@running("no plain tensor")
def exact_type_of_inputs(self: Any, x: Tensor) -> Any:
    if type(x) not in (Tensor, nn.Parameter):
        raise TypeError("no plain tensor")
    return Net.forward(self, x)


@between("inside torch")
def looks_at_the_memory(self: Any, h: Tensor) -> Any:
    return h if h.data_ptr() % 2 == 0 else -h


@between(units=4)
def falls_back_on_errors(self: Any, h: Tensor) -> Any:
    try:
        return h @ torch.ones(7, 7)
    except RuntimeError:
        return h


@between(units=4)
def warns(self: Any, h: Tensor) -> Any:
    warnings.warn("a warning", stacklevel=2)
    return h


@odd("stopped")
def raises_an_exception_of_its_own() -> Any:
    class StoppedError(Exception):
        pass

    def step(self: Any, h: Tensor) -> Any:
        raise StoppedError("stopped")

    return doing(step)


@running("RecursionError")
def calls_itself_for_ever(self: Any, x: Tensor) -> Any:
    return self(x)


# -- state from call to call


@odd()
def hidden_state_kept() -> Any:
    class Model(Net):
        state: Any = None

        def forward(self, x: Tensor) -> Any:
            hidden = self.hidden(x)
            self.state = hidden if self.state is None else self.state.detach() + hidden
            return self.second(self.state)

    return net(Model())


@odd()
def hidden_state_kept_after_a_call() -> Any:
    model, inputs = hidden_state_kept()
    model(inputs)
    return model, inputs


@changed(units=4)
def backward_hooks(model: Any) -> None:
    model.first.register_full_backward_hook(lambda module, incoming, outgoing: None)
    model.second.register_full_backward_pre_hook(lambda module, outgoing: LOG.append(outgoing))


@changed(units=4)
def hooks_with_keywords(model: Any) -> None:
    model.register_forward_hook(
        lambda module, args, kwargs, output: LOG.append(kwargs), with_kwargs=True
    )
    model.register_forward_hook(lambda module, args, output: LOG.append(1), always_call=True)
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)


@contextlib.contextmanager
def hook_on_all_modules() -> Any:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: LOG.append(output)
    )
    try:
        yield
    finally:
        handle.remove()
        LOG.clear()


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


ODD |= {
    "hooks_on_all_modules": Odd(net, units=4, around=hook_on_all_modules),
    "function_mode_outside": Odd(net, units=4, around=Watching),
}


# -- weights


ODD |= {
    "half_precision": Odd(lambda: (Net().half(), x().half()), units=4),
    "brain_floats": Odd(lambda: (Net().bfloat16(), x().bfloat16()), units=4),
    "no_parameters": Odd(lambda: net(nn.ReLU()), units=0),
}


@odd(units=4)
def two_precisions() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            return self.second(self.hidden(x).double())

    model = Model()
    model.second.double()
    return net(model)


@odd()
class ListsAndDictionariesOfParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(
            [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 2))]
        )
        self.named = nn.ParameterDict(
            {"shift": nn.Parameter(torch.randn(4)), "size": nn.Parameter(torch.ones(()))}
        )

    def forward(self, x: Tensor) -> Any:
        return (
            torch.relu(x @ self.many[0] + self.named["shift"]) @ self.many[1] * self.named["size"]
        )


@changed(units=4)
def empty_parameter(model: Any) -> None:
    model.nothing = nn.Parameter(torch.zeros(0, 3))


@changed(units=4)
def integer_parameter(model: Any) -> None:
    model.number = nn.Parameter(torch.tensor(3), requires_grad=False)


class Tagged(nn.Parameter):
    """A parameter with a name of its own."""


@changed(units=4)
def parameter_of_another_class(model: Any) -> None:
    model.first.weight = Tagged(torch.randn(4, 3))


@odd("NaN")
def weights_that_are_no_numbers() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            raise ValueError("NaN")

    model = Model()
    with torch.no_grad():
        model.first.weight.fill_(float("nan"))
    return net(model)


@changed(units=4)
def weights_that_are_views(model: Any) -> None:
    model.first.weight = nn.Parameter(torch.randn(3, 4).T)


@odd("same memory")
def weights_cut_from_one_tensor() -> Any:
    model, flat = Net(), torch.randn(12)
    model.first.weight.data = flat.view(4, 3)
    model.second.weight.data = flat[:8].view(2, 4)
    return net(model)


@changed(units=4)
def no_weights_behind(model: Any) -> None:
    model.unused = nn.Linear(5, 5)


# -- inputs


ODD |= {
    "sparse_input": Odd(lambda: (Net(), x().relu().to_sparse())),
    "expanded_input": Odd(lambda: (Net(), x(1, 3).expand(5, 3)), units=4),
    "no_dimensions": Odd(
        lambda: (
            nn.Sequential(nn.Unflatten(0, (1, 1)), nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)),
            torch.tensor([2.0]),
        ),
        units=4,
    ),
    "input_of_another_type": Odd(lambda: (Net(), x().double()), "dtype"),
    "input_of_another_shape": Odd(lambda: (Net(), x(5, 7)), "shapes cannot be multiplied"),
    "dropout_of_everything_else": Odd(
        lambda: doing(lambda self, h: F.dropout(h, 0.5, training=True)), units=4
    ),
}


@odd(units=4)
def channels_last() -> Any:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    return model.to(memory_format=torch.channels_last), x(2, 3, 5, 5).to(
        memory_format=torch.channels_last
    )


@odd(units=4)
def one_tensor_twice() -> Any:
    class Model(Net):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x + y)

    inputs = x()
    return Model(), inputs, inputs


@running(units=4)
def input_overwritten(self: Any, x: Tensor) -> Any:
    x.mul_(2)
    x[0] = 0
    return Net.forward(self, x)


@running(units=4, given=lambda: ({"x": x()}, Named()))
def dictionary_emptied(self: Any, batch: dict[str, Tensor]) -> Any:
    return Net.forward(self, batch.pop("x"))


@running(units=4, given=lambda: ([x()],))
def list_extended(self: Any, parts: list[Tensor]) -> Any:
    parts.append(parts[0])
    return Net.forward(self, parts[-1])


@odd(units=4, given=lambda: (nn.utils.rnn.pack_sequence([x(4, 3), x(2, 3)]),))
class PackedSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.RNN(3, 4, nonlinearity="relu"), nn.Linear(4, 2)

    def forward(self, packed: Any) -> Any:
        return self.out(self.layer(packed)[1])


@odd(units=4)
def tensor_of_another_class() -> Any:
    class Marked(Tensor):
        pass

    return Net(), x().as_subclass(Marked)

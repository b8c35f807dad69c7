"""Models, wrappers and inputs that people really have, and that a tracer stumbles over.

Each entry builds a model and its inputs; `words` is what the sentence has to say where there is no
answer, and `""` where there is one.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import random
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn


class Named(dict):  # type: ignore[type-arg]
    """Inputs by keyword."""


LOG: list[Any] = []
TABLE: dict[str, Any] = {}
COUNT = 0


@dataclasses.dataclass(frozen=True)
class Odd:
    """One odd thing: how to build it, what has to be said, and in what surroundings it is used."""

    build: Callable[[], tuple[Any, ...]]
    words: str = ""
    around: Callable[[], Any] = contextlib.nullcontext
    units: int | None = None


ODD: dict[str, Odd] = {}


class Net(nn.Module):
    """Two layers with four units, and a forward to be overridden in part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x))

    def forward(self, x: Tensor) -> Any:
        return self.second(self.hidden(x))


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (5, 3)))


def net(model: Any = None) -> tuple[nn.Module, Tensor]:
    return Net() if model is None else model, x()


def plain() -> tuple[Any, ...]:
    """The usual inputs."""
    return (x(),)


def odd(
    words: str = "",
    around: Callable[[], Any] = contextlib.nullcontext,
    units: int | None = None,
    given: Callable[[], tuple[Any, ...]] = plain,
) -> Any:
    """Register a builder of `(model, *args)` or `(model, *args, Named(...))` by its name, or a
    class of models by its name in small letters, with the inputs that it is given.
    """

    def register(build: Any) -> Any:
        if isinstance(build, type):
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", build.__name__).lower()
            ODD[name] = Odd(lambda: (build(), *given()), words, around, units)
        else:
            ODD[build.__name__] = Odd(build, words, around, units)
        return build

    return register


def running(
    words: str = "", units: int | None = None, given: Callable[[], tuple[Any, ...]] = plain
) -> Any:
    """Register a function as the forward of the small network, by its name."""

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        def build() -> tuple[Any, ...]:
            return type("Model", (Net,), {"forward": forward})(), *given()

        ODD[forward.__name__] = Odd(build, words, units=units)
        return forward

    return register


def changed(words: str = "", units: int | None = None) -> Any:
    """Register what is done to the small network before it is used, by its name."""

    def register(change: Callable[[Any], None]) -> Callable[[Any], None]:
        def build() -> tuple[Any, ...]:
            model = Net()
            change(model)
            return net(model)

        ODD[change.__name__] = Odd(build, words, units=units)
        return change

    return register


# -- wrappers


ODD |= {
    "compiled": Odd(lambda: net(torch.compile(Net())), units=4),
    "data_parallel": Odd(lambda: net(nn.DataParallel(Net())), "pass the model that it was made of"),
    "scripted": Odd(lambda: net(torch.jit.script(Net())), "pass the model that it was made of"),
    "scripted_inside": Odd(
        lambda: net(nn.Sequential(nn.Linear(3, 3), torch.jit.script(Net()))),
        "pass the model that it was made of",
    ),
    "traced_by_jit": Odd(
        lambda: net(torch.jit.trace(Net(), x())), "pass the model that it was made of"
    ),
    "averaged": Odd(lambda: net(torch.optim.swa_utils.AveragedModel(Net())), units=4),
}


@changed(units=4)
def compiled_inside(model: Any) -> None:
    model.first = torch.compile(model.first)


# -- parametrizations


@changed(units=8)
def weight_norm(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.first)


@changed(units=8)
def old_weight_norm(model: Any) -> None:
    nn.utils.weight_norm(model.first)


@changed()
def spectral_norm(model: Any) -> None:
    nn.utils.parametrizations.spectral_norm(model.first)


@changed()
def old_spectral_norm(model: Any) -> None:
    nn.utils.spectral_norm(model.first)


@changed()
def orthogonal(model: Any) -> None:
    nn.utils.parametrizations.orthogonal(model.first)


@changed(units=4)
def pruned(model: Any) -> None:
    nn.utils.prune.random_unstructured(model.first, "weight", 0.3)


# -- quantisation


@odd()
def prepared_for_qat() -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return net(torch.ao.quantization.prepare_qat(model))


@odd("cannot be captured")
def observed() -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")
    return net(torch.ao.quantization.prepare(model))


@odd("pass the model that it was made of")
def quantised_dynamically() -> Any:
    return net(torch.ao.quantization.quantize_dynamic(Net(), {nn.Linear}))


@odd("cannot be captured")
def fake_quantised() -> Any:
    class Quantised(Net):
        def __init__(self) -> None:
            super().__init__()
            self.quantise = torch.ao.quantization.FakeQuantize()

        def forward(self, x: Tensor) -> Any:
            return self.second(self.quantise(self.hidden(x)))

    model = Quantised()
    model(x())
    return net(model)


@odd("pass the model that it was made of")
def converted_to_int8() -> Any:
    model = nn.Sequential(
        torch.ao.quantization.QuantStub(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)
    ).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")
    prepared = torch.ao.quantization.prepare(model)
    prepared(x())
    return net(torch.ao.quantization.convert(prepared))


@changed("forward raised")
def float8_weights(model: Any) -> None:
    model.first.weight = nn.Parameter(
        model.first.weight.detach().to(torch.float8_e4m3fn), requires_grad=False
    )


@odd()
class Float8WeightsDequantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(4, 1))
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(x @ (self.weight.float() * self.scale).T))


# -- lazy, meta, fake


ODD |= {
    "lazy": Odd(
        lambda: net(nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))),
        "run the model once",
    ),
    "lazy_buffers": Odd(
        lambda: net(
            nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 2))
        ),
        "run the model once",
    ),
}


# -- inputs


ODD |= {
    "empty_batch": Odd(lambda: (Net(), x(0, 3)), "no samples"),
    "one_sample": Odd(lambda: (Net(), x(1, 3))),
    "user_dict_as_keywords": Odd(
        lambda: (ByKeyword(), Words(x=x(), mask=torch.ones(5, 1))), units=4
    ),
    "inputs_that_need_gradients": Odd(lambda: (Net(), x().requires_grad_()), units=4),
    "inputs_with_a_history": Odd(lambda: (Net(), nn.Linear(3, 3)(x())), units=4),
}


class Words(collections.UserDict):
    """What a tokenizer returns: a dictionary that is none, whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError as error:
            raise AttributeError(name) from error


class ByKeyword(Net):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        out = super().forward(x)
        return out if mask is None else out * mask


@odd(units=4, given=lambda: (Words({"x": x()}),))
class DictAsKeywords(ByKeyword):
    pass


@running(units=4, given=lambda: (Words(x=x()),))
def dict_that_is_an_input(self: Any, batch: dict[str, Tensor]) -> Any:
    return Net.forward(self, batch["x"])


@running(units=4, given=lambda: (Words(x=x()),))
def attributes_of_a_batch(self: Any, batch: Any) -> Any:
    return Net.forward(self, batch.x)


@dataclasses.dataclass
class Batch:
    x: Tensor
    name: str = "train"

    def to(self, *args: Any) -> Batch:
        return Batch(self.x.to(*args), self.name)


@running(units=4, given=lambda: (Batch(x()),))
def dataclass_input(self: Any, batch: Any) -> Any:
    return Net.forward(self, batch.x)


@running(units=4, given=lambda: (types.SimpleNamespace(x=x(), y=None),))
def object_input(self: Any, batch: Any) -> Any:
    return Net.forward(self, batch.x)


@running(
    units=4, given=lambda: ({"deep": [types.SimpleNamespace(x=x())]}, Named(scale=2.0, mode="mean"))
)
def graph_like_input(self: Any, batch: Any, scale: float = 1.0, mode: str = "sum") -> Any:
    return Net.forward(self, batch["deep"][0].x) * scale


@running(units=4, given=lambda: ([x(), x()],))
def generator_input(self: Any, parts: Any) -> Any:
    return sum(Net.forward(self, part) for part in parts)


@running("numpy", given=lambda: (np.ones((5, 3), np.float32),))
def numpy_input(self: Any, x: Any) -> Any:
    return Net.forward(self, torch.as_tensor(x, dtype=torch.float32))


@odd()
def named_tuple_input() -> Any:
    class Pair(NamedTuple):
        left: Tensor
        right: Tensor

    class Model(Net):
        def forward(self, pair: Pair) -> Any:
            return super().forward(pair.left + pair.right)

    return Model(), Pair(x(), x())


# -- outputs


def returning(wrap: Callable[[Tensor], Any]) -> tuple[nn.Module, Tensor]:
    class Returning(Net):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    return net(Returning())


class Cache:
    """Keys and values kept for the next token."""

    def __init__(self, keys: Tensor) -> None:
        self.layers = [types.SimpleNamespace(keys=keys, values=2 * keys)]
        self.owner = self
        self.lock = threading.Lock()


@dataclasses.dataclass
class Result:
    logits: Tensor
    extra: Any = None
    name: str = "x"


ODD |= {
    "returns_an_object": Odd(lambda: returning(Cache), units=4),
    "returns_a_dataclass": Odd(lambda: returning(lambda y: Result(y, Cache(y))), units=4),
    "returns_a_user_dict": Odd(lambda: returning(lambda y: Words(logits=y, loss=None)), units=4),
    "returns_nested_dicts": Odd(
        lambda: returning(lambda y: {"a": {"b": [y, {"c": (y.sum(), None, 3, "s")}]}}), units=4
    ),
    "returns_a_generator": Odd(lambda: returning(lambda y: (part for part in (y, 2 * y))), units=4),
    "returns_a_set_of_keys_and_a_tensor": Odd(
        lambda: returning(
            lambda y: ({"a"}, y, range(3), torch.float32, y.device, y.shape, slice(2), ...)
        ),
        units=4,
    ),
    "returns_a_distribution": Odd(
        lambda: returning(
            lambda y: torch.distributions.Normal(y, torch.ones_like(y), validate_args=False)
        ),
        units=4,
    ),
    "returns_none": Odd(lambda: returning(lambda y: None), units=0),
    "returns_nothing_with_numbers": Odd(lambda: returning(lambda y: (1, "a", None)), units=0),
    "returns_an_integer_tensor": Odd(lambda: returning(lambda y: y.argmax(-1))),
    "returns_numpy": Odd(lambda: returning(lambda y: y.detach().numpy()), "cannot be captured"),
    "returns_a_float": Odd(lambda: returning(lambda y: y.sum().item()), units=4),
}


@odd(units=4)
def returns_a_frozen_dataclass_in_a_list() -> Any:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Slots:
        logits: Tensor

    return returning(lambda y: [Slots(y), None, "word"])


@running(units=4)
def returns_its_own_module(self: Any, x: Tensor) -> Any:
    return Net.forward(self, x), self


# -- what forward leaves behind


@odd(units=4)
class CountsItsCalls(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.record = 0, [], {}

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.seen.append(x.shape)
        self.record[self.calls] = x
        return super().forward(x)


@odd(units=4)
class KeepsAMask(Net):
    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.mask is None or self.mask.shape != x.shape:
            self.mask = torch.ones_like(x)
        return super().forward(x * self.mask)


@running(units=4)
def keeps_its_activations(self: Any, x: Tensor) -> Any:
    self.last = self.hidden(x)
    return self.second(self.last)


@running(units=4)
def registers_a_buffer(self: Any, x: Tensor) -> Any:
    self.register_buffer("shown", x.mean(0))
    return Net.forward(self, x)


@odd(units=4)
class CountsInABuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        return super().forward(x)


@odd(units=4)
class ReplacesABuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x)


@running(units=4)
def makes_a_layer_when_first_run(self: Any, x: Tensor) -> Any:
    if not hasattr(self, "third"):
        self.third = nn.Identity()
    return Net.forward(self, self.third(x))


@running("creates parameters when it runs")
def makes_parameters_when_first_run(self: Any, x: Tensor) -> Any:
    if not hasattr(self, "third"):
        self.third = nn.Linear(x.shape[-1], 3)
    return Net.forward(self, self.third(x))


@running(units=4)
def toggles_training(self: Any, x: Tensor) -> Any:
    self.eval()
    out = Net.forward(self, x)
    self.train()
    return out


@odd(units=4)
def stays_in_another_mode() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            self.eval()
            return super().forward(x)

    return net(Model().train())


@running(units=4)
def counts_in_a_global(self: Any, x: Tensor) -> Any:
    global COUNT
    COUNT += 1
    return Net.forward(self, x)


@odd(units=4)
class AppendsToAListOfTheClass(Net):
    seen: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.append(x)
        type(self).last = x
        return super().forward(x)


@running(units=4)
def draws_random_numbers(self: Any, x: Tensor) -> Any:
    np.random.rand()
    random.random()
    torch.rand(1)
    return Net.forward(self, F.dropout(x, training=self.training))


@running(units=4)
def seeds_the_generator(self: Any, x: Tensor) -> Any:
    torch.manual_seed(3)
    return Net.forward(self, x + torch.randn_like(x))


@odd()
class GeneratorOfItsOwn(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + torch.randn(x.shape, generator=self.generator))


@odd(units=4)
def bound_hooks_that_keep_tensors() -> Any:
    class Keeper:
        def __init__(self) -> None:
            self.kept: list[Any] = LOG

        def __call__(self, module: Any, args: Any, output: Any) -> None:
            self.kept.append(output)

        def note(self, module: Any, args: Any, output: Any) -> None:
            self.kept.append(output)

    model, keeper = Net(), Keeper()
    model.first.register_forward_hook(keeper)
    model.first.register_forward_hook(keeper.note)
    model.second.register_forward_hook(functools.partial(Keeper.note, keeper))
    return net(model)


@changed()
def hooks_that_change_outputs(model: Any) -> None:
    model.first.register_forward_hook(lambda module, args, output: output + 1)


# -- references of other kinds


@odd(units=4)
class ClosureOverItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.run = lambda x: self.second(torch.relu(self.first(x)))

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


@odd(units=4)
class PartialOfItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.run = functools.partial(Net.forward, self)

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


@odd(units=4)
def weak_reference_to_its_parent() -> Any:
    class Part(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parent = weakref.ref(parent)

        def forward(self, x: Tensor) -> Any:
            return self.parent().second(torch.relu(self.parent().first(x)))

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part(self)

        def forward(self, x: Tensor) -> Any:
            return self.part(x)

    return net(Model())


@odd(units=4)
class LayersInAPlainList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.steps = [self.first, torch.relu, self.second]

    def forward(self, x: Tensor) -> Any:
        for step in self.steps:
            x = step(x)
        return x


@odd(units=0)
class LayersThatAreNotRegistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.rest = [nn.Linear(4, 4), nn.Linear(4, 2)]

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.first(x))
        for layer in self.rest:
            x = layer(x)
        return x


@changed(units=4)
def forward_replaced_on_the_instance(model: Any) -> None:
    model.forward = types.MethodType(lambda self, x: self.second(self.hidden(x)), model)


@odd("cannot be copied")
class CannotBeCopied(Net):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")


@changed(units=4)
def holds_what_cannot_be_copied(model: Any) -> None:
    model.lock, model.lines = threading.Lock(), (line for line in "ab")


@odd(units=4)
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.again = self.first

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.relu(self.again(x)) + torch.relu(self.first(x)))


@changed(units=4)
def no_gradients_wanted(model: Any) -> None:
    model.requires_grad_(False)


@changed(units=4)
def after_a_backward_pass(model: Any) -> None:
    model(x()).sum().backward()


@odd(units=4)
class WrappedForward(Net):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


@odd(units=4)
class InferenceForward(Net):
    @torch.inference_mode()
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


@running()
def autocast_inside(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return Net.forward(self, x)


@running(units=4)
def printing(self: Any, x: Tensor) -> Any:
    print("forward of", x.shape)
    return Net.forward(self, x)


# -- surroundings


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


ODD |= {
    "without_gradients_outside": Odd(net, units=4, around=torch.no_grad),
    "inference_mode_outside": Odd(net, units=4, around=torch.inference_mode),
    "autocast_outside": Odd(net, around=lambda: torch.autocast("cpu", torch.bfloat16)),
    "default_type_after_building": Odd(net, units=4, around=double_by_default),
    "default_device": Odd(net, units=4, around=lambda: torch.device("cpu")),
    "default_device_without_values": Odd(net, units=4, around=lambda: torch.device("meta")),
    "anomaly_mode": Odd(
        net, units=4, around=lambda: torch.autograd.set_detect_anomaly(True, check_nan=False)
    ),
    "saved_tensor_hooks": Odd(
        net,
        units=4,
        around=lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ),
}


@odd(units=4, around=torch.inference_mode)
def made_in_inference_mode() -> Any:
    with torch.inference_mode():
        return net()


@odd(units=4)
def of_inference_tensors() -> Any:
    with torch.inference_mode():
        return net()


@odd(units=4, around=double_by_default)
def default_type() -> Any:
    with double_by_default():
        return net()


# -- control flow


@running("values of tensors")
def branches_on_values(self: Any, x: Tensor) -> Any:
    out = Net.forward(self, x)
    return out if out.sum() > 0 else -out


@running("values of tensors")
def loops_until_small(self: Any, x: Tensor) -> Any:
    out = Net.forward(self, x)
    while out.abs().max() > 1:
        out = out / 2
    return out


@running("values of tensors")
def counts_by_values(self: Any, x: Tensor) -> Any:
    out = Net.forward(self, x)
    for _ in range(int(x.abs().sum())):
        out = out + 1
    return out


@running("values of tensors")
def lists_of_values(self: Any, x: Tensor) -> Any:
    out = Net.forward(self, x)
    return out[: len([v for v in x[:, 0].tolist() if v > 0])]


@running("values of tensors")
def shapes_by_values(self: Any, x: Tensor) -> Any:
    chosen = x[x[:, 0] > 0]
    if chosen.shape[0] > 2:
        chosen = chosen[:2]
    return Net.forward(self, chosen)


@running("cannot be captured")
def computes_in_numpy(self: Any, x: Tensor) -> Any:
    hidden = self.hidden(x).detach().numpy()
    return self.second(torch.from_numpy(np.maximum(hidden, 0)))


@running("expects")
def asserts_values(self: Any, x: Tensor) -> Any:
    assert x.abs().max() > 1e9, "expects large inputs"
    return Net.forward(self, x)


@running("boom")
def raises(self: Any, x: Tensor) -> Any:
    raise RuntimeError("boom\nand a second line")


ODD |= {
    "has_no_forward": Odd(lambda: net(nn.Module()), "NotImplementedError"),
    "too_few_inputs": Odd(lambda: (Net(),), "missing"),
    "unknown_keyword": Odd(lambda: (Net(), Named(x=x(), y=x())), "unexpected keyword"),
    "inputs_are_a_module": Odd(lambda: (Net(), Net()), "must be Tensor"),
    "copied_model": Odd(lambda: net(copy.deepcopy(Net())), units=4),
}


@running("ended the program")
def exits(self: Any, x: Tensor) -> Any:
    raise SystemExit(3)


@changed()
def holds_an_optimizer_and_a_loader(model: Any) -> None:
    model.optimizer = torch.optim.Adam(model.parameters())
    model.loader = torch.utils.data.DataLoader(list(range(3)))

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


def odd(
    words: str = "", around: Callable[[], Any] = contextlib.nullcontext, units: int | None = None
) -> Any:
    """Register a builder of `(model, *args)` or `(model, *args, Named(...))` by its name."""

    def register(build: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
        ODD[build.__name__] = Odd(build, words, around, units)
        return build

    return register


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


# -- wrappers


@odd(units=4)
def compiled() -> Any:
    return net(torch.compile(Net()))  # type: ignore[arg-type]


@odd(units=4)
def compiled_inside() -> Any:
    model = Net()
    model.first = torch.compile(model.first)  # type: ignore[assignment]
    return net(model)


@odd("pass the model that it was made of")
def data_parallel() -> Any:
    return net(nn.DataParallel(Net()))


@odd("pass the model that it was made of")
def scripted() -> Any:
    return net(torch.jit.script(Net()))


@odd("pass the model that it was made of")
def scripted_inside() -> Any:
    return net(nn.Sequential(nn.Linear(3, 3), torch.jit.script(Net())))


@odd("pass the model that it was made of")
def traced_by_jit() -> Any:
    return net(torch.jit.trace(Net(), x()))


@odd(units=4)
def averaged() -> Any:
    return net(torch.optim.swa_utils.AveragedModel(Net()))


# -- parametrizations


@odd(units=8)
def weight_norm() -> Any:
    model = Net()
    nn.utils.parametrizations.weight_norm(model.first)
    return net(model)


@odd(units=8)
def old_weight_norm() -> Any:
    model = Net()
    nn.utils.weight_norm(model.first)
    return net(model)


@odd()
def spectral_norm() -> Any:
    model = Net()
    nn.utils.parametrizations.spectral_norm(model.first)
    return net(model)


@odd()
def old_spectral_norm() -> Any:
    model = Net()
    nn.utils.spectral_norm(model.first)
    return net(model)


@odd()
def orthogonal() -> Any:
    model = Net()
    nn.utils.parametrizations.orthogonal(model.first)
    return net(model)


@odd(units=4)
def pruned() -> Any:
    model = Net()
    nn.utils.prune.random_unstructured(model.first, "weight", 0.3)
    return net(model)


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


@odd("forward raised")
def float8_weights() -> Any:
    model = Net()
    model.first.weight = nn.Parameter(
        model.first.weight.detach().to(torch.float8_e4m3fn), requires_grad=False
    )
    return net(model)


@odd()
def float8_weights_dequantised() -> Any:
    class Dequantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(
                torch.randn(4, 3).to(torch.float8_e4m3fn), requires_grad=False
            )
            self.scale = nn.Parameter(torch.rand(4, 1))
            self.second = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(x @ (self.weight.float() * self.scale).T))

    return net(Dequantised())


# -- lazy, meta, fake


@odd("run the model once")
def lazy() -> Any:
    return net(nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)))


@odd("run the model once")
def lazy_buffers() -> Any:
    return net(nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 2)))


# -- inputs


@odd("no samples")
def empty_batch() -> Any:
    return Net(), x(0, 3)


@odd()
def one_sample() -> Any:
    return Net(), x(1, 3)


class Words(collections.UserDict):  # type: ignore[type-arg]
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


@odd(units=4)
def user_dict_as_keywords() -> Any:
    return ByKeyword(), Words(x=x(), mask=torch.ones(5, 1))


@odd(units=4)
def dict_as_keywords() -> Any:
    class Model(ByKeyword):
        pass

    return Model(), Words({"x": x()})


@odd(units=4)
def dict_that_is_an_input() -> Any:
    class Model(Net):
        def forward(self, batch: dict[str, Tensor]) -> Any:  # type: ignore[override]
            return super().forward(batch["x"])

    return Model(), Words(x=x())


@odd(units=4)
def attributes_of_a_batch() -> Any:
    class Model(Net):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch.x)

    return Model(), Words(x=x())


@dataclasses.dataclass
class Batch:
    x: Tensor
    name: str = "train"

    def to(self, *args: Any) -> Batch:
        return Batch(self.x.to(*args), self.name)


@odd(units=4)
def dataclass_input() -> Any:
    class Model(Net):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch.x)

    return Model(), Batch(x())


@odd(units=4)
def object_input() -> Any:
    class Model(Net):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch.x)

    return Model(), types.SimpleNamespace(x=x(), y=None)


@odd(units=4)
def graph_like_input() -> Any:
    class Model(Net):
        def forward(self, batch: Any, scale: float = 1.0, mode: str = "sum") -> Any:
            return super().forward(batch["deep"][0].x) * scale

    return Model(), {"deep": [types.SimpleNamespace(x=x())]}, Named(scale=2.0, mode="mean")


@odd(units=4)
def generator_input() -> Any:
    class Model(Net):
        def forward(self, parts: Any) -> Any:  # type: ignore[override]
            return sum(super(Model, self).forward(part) for part in parts)

    return Model(), [x(), x()]


@odd("numpy")
def numpy_input() -> Any:
    class Model(Net):
        def forward(self, x: Any) -> Any:
            return super().forward(torch.as_tensor(x, dtype=torch.float32))

    return Model(), np.ones((5, 3), np.float32)


@odd()
def named_tuple_input() -> Any:
    class Pair(NamedTuple):
        left: Tensor
        right: Tensor

    class Model(Net):
        def forward(self, pair: Pair) -> Any:  # type: ignore[override]
            return super().forward(pair.left + pair.right)

    return Model(), Pair(x(), x())


@odd(units=4)
def inputs_that_need_gradients() -> Any:
    return Net(), x().requires_grad_()


@odd(units=4)
def inputs_with_a_history() -> Any:
    return Net(), nn.Linear(3, 3)(x())


# -- outputs


def returning(wrap: Callable[[Tensor], Any]) -> tuple[nn.Module, Tensor]:
    class Returning(Net):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    return net(Returning())  # type: ignore[return-value]


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


@odd(units=4)
def returns_an_object() -> Any:
    return returning(Cache)


@odd(units=4)
def returns_a_dataclass() -> Any:
    return returning(lambda y: Result(y, Cache(y)))


@odd(units=4)
def returns_a_frozen_dataclass_in_a_list() -> Any:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Slots:
        logits: Tensor

    return returning(lambda y: [Slots(y), None, "word"])


@odd(units=4)
def returns_a_user_dict() -> Any:
    return returning(lambda y: Words(logits=y, loss=None))


@odd(units=4)
def returns_nested_dicts() -> Any:
    return returning(lambda y: {"a": {"b": [y, {"c": (y.sum(), None, 3, "s")}]}})


@odd(units=4)
def returns_a_generator() -> Any:
    return returning(lambda y: (part for part in (y, 2 * y)))


@odd(units=4)
def returns_a_set_of_keys_and_a_tensor() -> Any:
    return returning(
        lambda y: ({"a"}, y, range(3), torch.float32, y.device, y.shape, slice(2), ...)
    )


@odd(units=4)
def returns_a_distribution() -> Any:
    return returning(
        lambda y: torch.distributions.Normal(y, torch.ones_like(y), validate_args=False)
    )


@odd(units=4)
def returns_its_own_module() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self

    return net(Model())


@odd(units=0)
def returns_none() -> Any:
    return returning(lambda y: None)


@odd(units=0)
def returns_nothing_with_numbers() -> Any:
    return returning(lambda y: (1, "a", None))


@odd()
def returns_an_integer_tensor() -> Any:
    return returning(lambda y: y.argmax(-1))


@odd("cannot be captured")
def returns_numpy() -> Any:
    return returning(lambda y: y.detach().numpy())


@odd(units=4)
def returns_a_float() -> Any:
    return returning(lambda y: y.sum().item())


# -- what forward leaves behind


@odd(units=4)
def counts_its_calls() -> Any:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen, self.record = 0, [], {}

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            self.seen.append(x.shape)
            self.record[self.calls] = x
            return super().forward(x)

    return net(Model())


@odd(units=4)
def keeps_a_mask() -> Any:
    class Model(Net):
        mask: Tensor | None = None

        def forward(self, x: Tensor) -> Any:
            if self.mask is None or self.mask.shape != x.shape:
                self.mask = torch.ones_like(x)
            return super().forward(x * self.mask)

    return net(Model())


@odd(units=4)
def keeps_its_activations() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            self.last = self.hidden(x)
            return self.second(self.last)

    return net(Model())


@odd(units=4)
def registers_a_buffer() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            self.register_buffer("shown", x.mean(0))
            return super().forward(x)

    return net(Model())


@odd(units=4)
def counts_in_a_buffer() -> Any:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Any:
            self.steps += 1
            return super().forward(x)

    return net(Model())


@odd(units=4)
def replaces_a_buffer() -> Any:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Any:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x)

    return net(Model())


@odd(units=4)
def makes_a_layer_when_first_run() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            if not hasattr(self, "third"):
                self.third = nn.Identity()
            return super().forward(self.third(x))

    return net(Model())


@odd("creates parameters when it runs")
def makes_parameters_when_first_run() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            if not hasattr(self, "third"):
                self.third = nn.Linear(x.shape[-1], 3)
            return super().forward(self.third(x))

    return net(Model())


@odd(units=4)
def toggles_training() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            self.eval()
            out = super().forward(x)
            self.train()
            return out

    return net(Model())


@odd(units=4)
def stays_in_another_mode() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            self.eval()
            return super().forward(x)

    return net(Model().train())


@odd(units=4)
def counts_in_a_global() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            global COUNT
            COUNT += 1
            return super().forward(x)

    return net(Model())


@odd(units=4)
def appends_to_a_list_of_the_class() -> Any:
    class Model(Net):
        seen: ClassVar[list[Tensor]] = []

        def forward(self, x: Tensor) -> Any:
            self.seen.append(x)
            type(self).last = x
            return super().forward(x)

    return net(Model())


@odd(units=4)
def draws_random_numbers() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            np.random.rand()
            random.random()
            torch.rand(1)
            return super().forward(F.dropout(x, training=self.training))

    return net(Model())


@odd(units=4)
def seeds_the_generator() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            torch.manual_seed(3)
            return super().forward(x + torch.randn_like(x))

    return net(Model())


@odd()
def generator_of_its_own() -> Any:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(0)

        def forward(self, x: Tensor) -> Any:
            return super().forward(x + torch.randn(x.shape, generator=self.generator))

    return net(Model())


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


@odd()
def hooks_that_change_outputs() -> Any:
    model = Net()
    model.first.register_forward_hook(lambda module, args, output: output + 1)
    return net(model)


# -- references of other kinds


@odd(units=4)
def closure_over_itself() -> Any:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.run = lambda x: self.second(torch.relu(self.first(x)))

        def forward(self, x: Tensor) -> Any:
            return self.run(x)

    return net(Model())


@odd(units=4)
def partial_of_itself() -> Any:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.run = functools.partial(Net.forward, self)

        def forward(self, x: Tensor) -> Any:
            return self.run(x)

    return net(Model())


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
def layers_in_a_plain_list() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
            self.steps = [self.first, torch.relu, self.second]

        def forward(self, x: Tensor) -> Any:
            for step in self.steps:
                x = step(x)
            return x

    return net(Model())


@odd(units=0)
def layers_that_are_not_registered() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 4)
            self.rest = [nn.Linear(4, 4), nn.Linear(4, 2)]

        def forward(self, x: Tensor) -> Any:
            x = torch.relu(self.first(x))
            for layer in self.rest:
                x = layer(x)
            return x

    return net(Model())


@odd(units=4)
def forward_replaced_on_the_instance() -> Any:
    model = Net()
    model.forward = types.MethodType(lambda self, x: self.second(self.hidden(x)), model)  # type: ignore[method-assign]
    return net(model)


@odd("cannot be copied")
def cannot_be_copied() -> Any:
    class Model(Net):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies")

    return net(Model())


@odd(units=4)
def holds_what_cannot_be_copied() -> Any:
    model = Net()
    model.lock, model.lines = threading.Lock(), (line for line in "ab")  # type: ignore[assignment]
    return net(model)


@odd(units=4)
def tied() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
            self.again = self.first

        def forward(self, x: Tensor) -> Any:
            return self.second(torch.relu(self.again(x)) + torch.relu(self.first(x)))

    return net(Model())


@odd(units=4)
def no_gradients_wanted() -> Any:
    return net(Net().requires_grad_(False))


@odd(units=4)
def after_a_backward_pass() -> Any:
    model = Net()
    model(x()).sum().backward()
    return net(model)


@odd(units=4)
def wrapped_forward() -> Any:
    class Model(Net):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)

    return net(Model())


@odd(units=4)
def inference_forward() -> Any:
    class Model(Net):
        @torch.inference_mode()
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)

    return net(Model())


@odd()
def autocast_inside() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    return net(Model())


@odd(units=4)
def printing() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            print("forward of", x.shape)
            return super().forward(x)

    return net(Model())


# -- surroundings


@odd(units=4, around=torch.no_grad)
def without_gradients_outside() -> Any:
    return net()


@odd(units=4, around=torch.inference_mode)
def inference_mode_outside() -> Any:
    return net()


@odd(units=4, around=torch.inference_mode)
def made_in_inference_mode() -> Any:
    with torch.inference_mode():
        return net()


@odd(units=4)
def of_inference_tensors() -> Any:
    with torch.inference_mode():
        return net()


@odd(around=lambda: torch.autocast("cpu", torch.bfloat16))
def autocast_outside() -> Any:
    return net()


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@odd(units=4, around=double_by_default)
def default_type() -> Any:
    with double_by_default():
        return net()


@odd(units=4, around=double_by_default)
def default_type_after_building() -> Any:
    return net()


@odd(units=4, around=lambda: torch.device("cpu"))
def default_device() -> Any:
    return net()


@odd(units=4, around=lambda: torch.device("meta"))
def default_device_without_values() -> Any:
    return net()


@odd(units=4, around=lambda: torch.autograd.set_detect_anomaly(True, check_nan=False))
def anomaly_mode() -> Any:
    return net()


@odd(units=4, around=lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
def saved_tensor_hooks() -> Any:
    return net()


# -- control flow


@odd("values of tensors")
def branches_on_values() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return out if out.sum() > 0 else -out

    return net(Model())


@odd("values of tensors")
def loops_until_small() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            while out.abs().max() > 1:
                out = out / 2
            return out

    return net(Model())


@odd("values of tensors")
def counts_by_values() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            for _ in range(int(x.abs().sum())):
                out = out + 1
            return out

    return net(Model())


@odd("values of tensors")
def lists_of_values() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return out[: len([v for v in x[:, 0].tolist() if v > 0])]

    return net(Model())


@odd("values of tensors")
def shapes_by_values() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            chosen = x[x[:, 0] > 0]
            if chosen.shape[0] > 2:
                chosen = chosen[:2]
            return super().forward(chosen)

    return net(Model())


@odd("cannot be captured")
def computes_in_numpy() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            hidden = self.hidden(x).detach().numpy()
            return self.second(torch.from_numpy(np.maximum(hidden, 0)))

    return net(Model())


@odd("expects")
def asserts_values() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            assert x.abs().max() > 1e9, "expects large inputs"
            return super().forward(x)

    return net(Model())


@odd("boom")
def raises() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            raise RuntimeError("boom\nand a second line")

    return net(Model())


@odd("NotImplementedError")
def has_no_forward() -> Any:
    return net(nn.Module())


@odd("ended the program")
def exits() -> Any:
    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            raise SystemExit(3)

    return net(Model())


@odd("missing")
def too_few_inputs() -> Any:
    return (Net(),)


@odd("unexpected keyword")
def unknown_keyword() -> Any:
    return Net(), Named(x=x(), y=x())


@odd("must be Tensor")
def inputs_are_a_module() -> Any:
    return Net(), Net()


@odd()
def holds_an_optimizer_and_a_loader() -> Any:
    model = Net()
    model.optimizer = torch.optim.Adam(model.parameters())  # type: ignore[assignment]
    model.loader = torch.utils.data.DataLoader(list(range(3)))  # type: ignore[assignment]
    return net(model)


@odd(units=4)
def copied_model() -> Any:
    return net(copy.deepcopy(Net()))

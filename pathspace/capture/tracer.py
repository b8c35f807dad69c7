"""One capture: a model's code runs once, on tensors without values, while torch records it.

The only module that uses torch's tracer. Operations are not decomposed: linear maps, norms,
attention and recurrent layers stay one operation each. What runs is a private copy of the model,
with fake tensors in place of its parameters and buffers.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributions import Distribution
from torch.fx import traceback as provenance
from torch.fx._lazy_graph_module import _use_lazy_graph_module as without_code
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
    snapshot_fake,
)
from torch.utils import _pytree as pytree

from ..models.copies import safe_deepcopy
from ..models.inputs import opened
from ..models.isolation import quiet
from ..models.modes import as_written
from ..models.stand_in import make_recordable, outputs_of
from ..models.values import has_values, unsharded
from ..models.walk import every_module, every_path, every_tensor, holders
from .known import KnownNumbers
from .packed import PaddedSequences, equal_steps
from .writes import name_of, without_writes

# the type of operations
OPERATION = type(torch.ops.aten.relu.default)
# (the operations between them compute tangents that nothing records)
FORWARD_MODE = ("_make_dual", "_unpack_dual")
DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
# the message for a tensor that no recorded operation has made
UNRECORDED = (
    "it takes gradients inside forward, writes into its weights there, or maps a function over a"
    " dimension"
)
# the message for a tensor that a branch or a loop of torch reads from outside
FROM_OUTSIDE = "a branch or a loop of torch in it reads tensors that are not among its operands"


class FakeModel:
    """A private copy of a model in which tensors have shapes but no values.

    ``fakes`` are the tensors in place of the model's, by their ids; ``values`` the buffers with
    values. With ``sizes_of_data``, sizes that depend on values are unknown numbers, where they
    would stop the run; with ``numbers``, buffers of one element, as flags are, keep their values.
    """

    def __init__(
        self, model: nn.Module, sizes_of_data: bool = False, numbers: bool = False
    ) -> None:
        shapes = None
        if sizes_of_data:
            from torch.fx.experimental.symbolic_shapes import ShapeEnv  # slow to import

            shapes = ShapeEnv()
        with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
        model = unsharded(model)
        parameters, buffers = every_tensor(model, "_parameters"), every_tensor(model, "_buffers")
        attributes = [value for module in every_module(model) for value in vars(module).values()]
        empty = [each for each in attributes if isinstance(each, Tensor) and not has_values(each)]
        fakes = self.fakes = {
            id(t): self.fake(t) for t in (*parameters.values(), *buffers.values(), *empty)
        }
        for buffer in buffers.values() if numbers else ():
            if buffer.numel() == 1 and has_values(buffer):
                fakes[id(buffer)].constant = buffer.detach().clone()
        # (modules that torch does not register keep the model's own tensors, as constants)
        shared = {
            id(each): each
            for _, module, _ in holders(model)
            for each in (*module._parameters.values(), *module._buffers.values())
            if each is not None
        }
        self.module = safe_deepcopy(model, share_tensors=True, replaced={**shared, **fakes})
        make_recordable(self.module)
        for module in every_module(self.module):
            if isinstance(module, nn.RNNBase):
                module.register_forward_pre_hook(equal_steps)
        self.values = {name: buffer for name, buffer in buffers.items() if has_values(buffer)}

    def fake(self, value: Any) -> Any:
        """A tensor without values in place of another one; other values as they are."""
        if not isinstance(value, Tensor):
            return value
        if value.layout != torch.strided or value.is_quantized or value.is_nested:
            return self.mode.from_tensor(value, static_shapes=True)
        shape = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        made = FakeTensor(self.mode, shape, torch.device("cpu") if value.is_meta else value.device)
        return made.requires_grad_(value.requires_grad)

    def runs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the model accepts inputs of these shapes; false if its control flow
        depends on their values.
        """
        try:
            with quiet(), torch.no_grad(), PaddedSequences(), self.mode:
                args, kwargs = pytree.tree_map(self.fake, (tuple(args), dict(kwargs)))
                self.module(*args, **kwargs)
        except Exception:
            # (a model can raise anything on wrong shapes)
            return False
        return True

    def held(self) -> list[tuple[str, str, Tensor]]:
        """Kind, name and tensor of all that the modules have registered now."""
        return [
            (kind, name, tensor)
            for kind, store in (("parameter", "_parameters"), ("buffer", "_buffers"))
            for name, tensor in every_tensor(self.module, store).items()  # type: ignore[arg-type]
        ]


class Recorder:
    """Records a fake model.

    The placeholders of ``module`` are parameters, buffers and inputs; its outputs are those of the
    model, and then what it keeps.
    """

    def __init__(self, fake: FakeModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.fake = fake
        tensors = opened(fake.module, args, kwargs)
        given: Any = (args, dict(kwargs)) if tensors is None else (tensors, {})
        # in the order of their placeholders
        self.inputs, shape = pytree.tree_flatten(given)
        self._fakes = [fake.fake(value) for value in self.inputs]
        self._given = pytree.tree_unflatten(self._fakes, shape)
        self._input_names = _input_names(fake.module, *given)
        # kind and name of the last outputs, which the model holds in place of other tensors; of
        # ordinary attributes (kind "state") with the tensor that they were before
        self.kept: list[tuple[str, str, Tensor]] = []
        # ids of the registered tensors that the model holds after the run
        self.held: frozenset[int] = frozenset()
        # (a tensor of several names has one placeholder, under the first)
        named = {id(tensor): (kind, name, tensor) for kind, name, tensor in reversed(fake.held())}
        self._registered = list(reversed(named.values()))
        self._known: KnownNumbers | None = None
        self._stack: list[str] = [""]
        self._entered: list[Any] = []
        self._paths: dict[int, list[str]] = {}
        for path, module in every_path(fake.module):
            self._paths.setdefault(id(module), []).append(path)
        # placeholder name -> (kind, name); id of a registered tensor -> its placeholder
        self.sources: dict[str, tuple[str, str]] = {}
        self.places: dict[int, fx.Node] = {}
        # (under the model's own mode: "real" leaves the fake tensors as they are)
        with self._conditions(), without_code(True), fake.mode:
            self.module = make_fx(
                self._run,
                tracing_mode="real",
                pre_dispatch=True,
                _disable_torch_fn_metadata_mode=True,
            )()
        # buffers and constants of which the code read numbers
        self.read: list[Tensor] = [] if self._known is None else self._known.read
        # by placeholder: what is neither parameter nor buffer
        self.constants = self._constants()
        self._tidy()

    @contextmanager
    def _conditions(self) -> Iterator[None]:
        """Torch's own tracing is silent, and its layers take the path that can be recorded."""
        fast = torch.backends.mha.get_fastpath_enabled()
        checks = Distribution._validate_args
        torch.backends.mha.set_fastpath_enabled(False)
        Distribution.set_default_validate_args(False)
        try:
            with quiet(), torch.enable_grad(), provenance.preserve_node_meta():
                # slow to import, and draws random numbers
                from torch._dynamo import config as dynamo_config

                # (functions compiled within the model run as they are written)
                with dynamo_config.patch(error_on_nested_fx_trace=False):
                    yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            Distribution.set_default_validate_args(checks)

    def _run(self, *_: Any) -> list[Tensor]:
        """What is traced: a call of the model (torch would ask for ``self`` if it took nothing)."""
        proxies: Any = get_proxy_mode()
        # (no mode has to hear of it)
        with torch._C.DisableTorchFunction():
            self._places(proxies.tracer)

        def node_of(tensor: Tensor) -> fx.Node | None:
            slot = get_proxy_slot(tensor, proxies.tracer, None)
            return None if slot is None else slot.proxy.node

        # (where sizes may be unknown, no number of a buffer need be read)
        known_sizes = self.fake.mode.shape_env is None
        own = {self.places[id(each)]: each for *_, each in self._registered if known_sizes}

        def constant(node: fx.Node) -> Any:
            return own.get(node, getattr(proxies.tracer.root, str(node.target), None))

        known = {
            id(tensor): self.fake.values[name]
            for kind, name, tensor in self._registered
            if kind == "buffer" and name in self.fake.values
        }
        before = self._attributes()
        handles = [
            handle
            for module in every_module(self.fake.module)
            for handle in (
                module.register_forward_pre_hook(self._enter, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]
        self._known = KnownNumbers(node_of, constant, known, DEPENDS_ON_VALUES)
        args, kwargs = self._given
        try:
            with as_written(), self._known, PaddedSequences():
                found = outputs_of(self.fake.module(*args, **kwargs))
        finally:
            for handle in handles:
                handle.remove()
            # (no hook is called where code ends the program)
            while self._entered:
                self._leave()
        held = self.fake.held()
        self.held = frozenset(id(tensor) for *_, tensor in held)
        registered = {id(tensor) for *_, tensor in self._registered}
        new = [entry for entry in held if id(entry[2]) not in registered]
        after = self._attributes()
        state = [key for key in before if key in after and after[key] is not before[key]]
        self.kept = [*new, *(("state", key[1], before[key]) for key in state)]
        return [*found, *(tensor for *_, tensor in new), *(after[key] for key in state)]

    def _attributes(self) -> dict[tuple[int, str], Tensor]:
        """The tensors in ordinary attributes of modules."""
        return {
            (id(module), key): value
            for module in every_module(self.fake.module)
            for key, value in vars(module).items()
            if isinstance(value, Tensor)
        }

    def _enter(self, module: nn.Module, _: Any) -> None:
        """Operations that follow belong to a module's call; of several names, take the one
        below the calling module.
        """
        caller = self._stack[-1]
        paths = self._paths.get(id(module), [caller])
        below = [path for path in paths if path.startswith(f"{caller}." if caller else "")]
        self._stack.append((below or paths)[0])
        stack = {path: (path, type(module).__qualname__) for path in self._stack[1:]}
        self._entered.append(provenance.annotate({"modules": stack}))
        self._entered[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        self._stack.pop()
        self._entered.pop().__exit__(None, None, None)

    def _places(self, tracer: Any) -> None:
        """Give all parameters, buffers and inputs placeholders, in this order.

        (Arguments of a traced function get placeholders as well, with notes that nobody reads.)
        """
        inputs = zip(self._input_names, self._fakes, strict=True)
        given = [*self._registered, *(("input", name, value) for name, value in inputs)]
        for kind, name, value in given:
            prefix = "" if kind == "input" else f"{kind[0]}_"
            place = tracer.graph.placeholder(prefix + re.sub(r"\W", "_", name).lower())
            self.sources[place.name] = (kind, place.name if kind == "input" else name)
            if isinstance(value, Tensor):
                place.meta["val"] = snapshot_fake(value)
                set_proxy_slot(value, tracer, _ProxyTensor(tracer.proxy(place), None))
            if kind != "input":
                self.places[id(value)] = place

    def _constants(self) -> dict[str, Tensor]:
        """Give what the graph reads from outside placeholders, too, and return the constants."""
        graph = self.module.graph
        # (functions may refer to the model itself, and so to its own tensors)
        own = {n: self.places[id(t)] for n, t in self.fake.fakes.items() if id(t) in self.places}
        own |= self.places
        constants: dict[str, Tensor] = {}
        first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
        for node in [node for node in graph.nodes if node.op == "get_attr"]:
            value = attrgetter(str(node.target))(self.module)
            if not isinstance(value, Tensor):
                continue
            if not has_values(value) and id(value) not in own:
                raise RuntimeError(UNRECORDED)
            if id(value) not in own:
                with graph.inserting_before(first):
                    place = own[id(value)] = graph.placeholder(f"c_lifted_tensor_{len(constants)}")
                place.meta["val"] = constants[place.name] = value
                self.sources[place.name] = ("constant", place.name)
            node.replace_all_uses_with(own[id(value)])
            graph.erase_node(node)
        return constants

    def _tidy(self) -> None:
        """Note the modules of each operation, and leave out what only the tracer needs."""
        for part in self.module.modules():
            for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
                node.meta["nn_module_stack"] = node.meta.get("custom", {}).get("modules", {})
                if name_of(node) in FORWARD_MODE:
                    raise RuntimeError(UNRECORDED)
                held = getattr(part, str(node.target), None) if node.op == "get_attr" else None
                if part is not self.module and isinstance(held, Tensor) and not has_values(held):
                    raise RuntimeError(FROM_OUTSIDE)
        for node in reversed(self.module.graph.nodes):
            # settings (gradients, autocast), and questions about values
            operation = isinstance(node.target, torch._ops.OperatorBase)
            if (
                node.op == "call_function"
                and not node.users
                and not (operation and "val" in node.meta)
            ):
                self.module.graph.erase_node(node)


def _input_names(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Names of the inputs, from the signature of ``forward``."""
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    known = [each.name for each in parameters if each.kind in by_place]
    paths, _ = pytree.tree_flatten_with_path(((*args,), dict(kwargs)))
    names = []
    for (_, first, *rest), _ in paths:
        start, *keys = [
            str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", ""))))
            for key in (first, *rest)
        ]
        if isinstance(first, pytree.SequenceKey):
            start = known[first.idx] if first.idx < len(known) else f"args_{start}"
        names.append("_".join([start, *keys]))
    return names


def decompositions() -> dict[Any, Any]:
    """Operation -> how torch computes it in smaller steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch._decomp.core_aten_decompositions()


def in_smaller_steps(
    function: Callable[..., Any], shown: Sequence[Tensor], table: dict[Any, Any]
) -> fx.GraphModule | None:
    """A function of tensors as a graph of small operations without writes, by a table of
    decompositions; ``None`` if torch knows no smaller steps for operands like ``shown``.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with warnings.catch_warnings(), mode, torch.no_grad():
            warnings.simplefilter("ignore")
            # (values on the meta device stand for the processor's)
            operands = [
                torch.empty_strided(
                    x.shape, x.stride(), dtype=x.dtype, device="cpu" if x.is_meta else x.device
                )
                for x in shown
            ]
            graph = make_fx(function, decomposition_table=table)(*operands)
            graph.graph, _ = without_writes(graph.graph)
    except Exception:
        return None
    return graph

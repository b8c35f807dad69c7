"""Every public diagnostic on a model it has not seen: finite, consistent with a slow oracle,
or declined in a sentence.

Each check takes a :class:`Subject`, asserts, and says in a word or two what it compared; what a
diagnostic declines it raises as one of the library's errors. None of them knows the model.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian as explicit
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

import pathspace as ps
from pathspace import diagnostics as dx
from pathspace.diagnostics.parameters.gauge_directions import gauge_directions
from pathspace.diagnostics.shared.model_calls import main_output
from pathspace.diagnostics.shared.selection import select
from pathspace.errors import InputError, PathspaceError, UnsupportedError
from pathspace.models.copies import safe_deepcopy

MANY = (
    500_000  # trainable scalars beyond which a Hessian, a gauge or a growth is not asked for here
)
SMALL = 400  # sizes up to which a matrix is formed to compare with


def first(value: Any) -> Tensor | None:
    """The first floating-point tensor."""
    values = list(value.values()) if isinstance(value, Mapping) else value
    return next(
        (v for v in tree_leaves(values) if isinstance(v, Tensor) and v.is_floating_point()), None
    )


@dataclass(eq=False)
class Subject:
    """A model and a batch.

    Attributes:
        model: the model, in the mode it is looked at.
        args: positional inputs.
        kwargs: keyword inputs.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def inputs(self) -> Any:
        """As `call` takes them."""
        if not self.kwargs or not self.args:
            return self.kwargs or self.args
        return dict(inspect.signature(self.model.forward).bind(*self.args, **self.kwargs).arguments)

    def loss(self, output: Any, target: Any = None) -> Tensor:
        return main_output(self.model, output).square().mean()

    @cached_property
    def total(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @cached_property
    def tolerance(self) -> float:
        """Relative, for sums of the model's own precision taken in another order."""
        wide = all(p.dtype == torch.float64 for p in self.model.parameters())
        return 1e-6 if wide else 2e-3

    @cached_property
    def graph(self) -> ps.ReductionGraph:
        return ps.trace(self.model, *self.args, kwargs=self.kwargs)

    @cached_property
    def output(self) -> Tensor:
        with self.alone():
            found = first(self.model(*self.args, **self.kwargs))
        assert found is not None
        return found

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run the model as a diagnostic does: same random numbers, same
        kernels, buffers put back.
        """
        saved = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
            yield
        for buffer, value in saved:
            buffer.data.copy_(value)


def state(subject: Subject) -> dict[str, Any]:
    """Everything a diagnostic has to leave as it is."""
    model = subject.model
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {name: value.detach().clone() for name, value in tensors.items()},
        "same": {name: id(value) for name, value in tensors.items()},
        "keys": list(model.state_dict()),
        "grads": {
            name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        },
        "wanted": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [
                len(getattr(module, kind)) for kind in vars(nn.Module()) if kind.endswith("_hooks")
            ]
            for name, module in model.named_modules()
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "inputs": [
            v.detach().clone()
            for v in tree_leaves((subject.args, subject.kwargs))
            if isinstance(v, Tensor)
        ],
        "random": torch.get_rng_state(),
        "modes of torch": (
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        ),
        "gradients on": torch.is_grad_enabled(),
    }


def same(a: Any, b: Any) -> bool:
    """Equality of nested values, NaN equal to itself."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.all((a == b) | ((a != a) & (b != b))))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def replaced(given: Any, old: Tensor, new: Tensor) -> Any:
    """Nested inputs with another tensor in the place of one of theirs."""
    return tree_map(lambda leaf: new.clone() if leaf is old else leaf, given)


def finite(record: Any, *except_for: str) -> None:
    """No number of a record is infinite or not a number."""
    for name, value in asdict(record).items() if is_dataclass(record) else record:
        if name in except_for:
            continue
        for leaf in tree_leaves(value):
            if isinstance(leaf, float):
                assert math.isfinite(leaf), f"{name} = {leaf}"


def near(a: float, b: float, tolerance: float, what: str, scale: float = 0.0) -> None:
    assert abs(a - b) <= tolerance * max(abs(a), abs(b), scale), f"{what}: {a} and {b}"


def signal(subject: Subject) -> str:
    """Mean and variance against hooks; gains of the smallest layers against
    their explicit Jacobians.
    """
    model, slack = subject.model, subject.tolerance
    seen: list[tuple[str, nn.Module, Any, Any, Tensor]] = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            value = first(output)
            if value is not None:
                # one tensor given several times stays one
                given = tree_map(partial(kept, {}), (args, kwargs))
                seen.append((name, module, *given, value.detach().clone()))

        return hook

    def kept(copies: dict[int, Tensor], value: Any) -> Any:
        return (
            copies.setdefault(id(value), value.detach().clone())
            if isinstance(value, Tensor)
            else value
        )

    chosen = select(model)
    handles = [
        module.register_forward_hook(note(name), with_kwargs=True)
        for name, module in chosen.items()
    ]
    with subject.alone():
        model(*subject.args, **subject.kwargs)
    for handle in handles:
        handle.remove()
    table = dx.signal(model, *subject.args, kwargs=subject.kwargs, probes=2)
    assert len(table) == len(seen)
    if not seen:
        raise UnsupportedError(table.notes[0])
    assert len({row.layer for row in table}) == len(table)
    warned = any("not finite" in note for note in table.notes)
    for row, (name, _, _, _, value) in zip(table, seen, strict=True):
        finite(row, *(["vjp_gain", "jvp_gain", "output_gain"] if warned else []))
        assert row.layer.split(" (")[0] == name and row.shape == tuple(value.shape)
        value = value.double()
        size = float(value.square().mean().sqrt())
        near(row.mean, float(value.mean()), slack, f"mean of {name}", size)
        near(row.variance, float(value.var(correction=0)), slack, f"variance of {name}", size**2)
        assert row.dead is None or 0 <= row.dead <= row.units
        assert 0 <= row.zeros <= 1
    compared = 0
    for row, (name, module, args, kwargs, value) in sorted(
        zip(table, seen, strict=True), key=lambda pair: pair[1][4].numel()
    ):
        source = first((args, kwargs))
        random = isinstance(module, nn.Dropout | nn.RReLU) and module.training
        if (
            source is None
            or row.vjp_gain is None
            or random
            or max(value.numel(), source.numel()) > SMALL
        ):
            continue
        twin = safe_deepcopy(module)

        given = args, kwargs

        def run(z: Tensor, twin: nn.Module = twin, given: Any = given, old: Any = source) -> Any:
            args, kwargs = replaced(given, old, z)
            return first(twin(*args, **kwargs))

        with sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(devices=[]):
            square = float(explicit(run, source).double().square().sum())
        again = dx.signal(model, *subject.args, kwargs=subject.kwargs, names=name, probes=100)[
            row.layer
        ]
        assert again.vjp_gain is not None
        truth = square / source.numel()
        assert abs(again.vjp_gain.value - truth) <= 5 * again.vjp_gain.error + slack * truth, (
            f"tr K of {name}"
        )
        if again.jvp_gain is not None:
            truth = square / value.numel()
            assert abs(again.jvp_gain.value - truth) <= 5 * again.jvp_gain.error + slack * truth, (
                f"tr L of {name}"
            )
        compared += 1
        if compared == 3:
            break
    return f"{len(table)} layers, {compared} Jacobians"


def gradients(subject: Subject) -> str:
    """RMS, mean, variance and noise of every tensor against autograd."""
    model, slack = subject.model, subject.tolerance
    other = tree_map(shifted, subject.inputs)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    stacks = []
    for inputs in (subject.inputs, other):
        with subject.alone():
            output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
            loss, wanted = subject.loss(output), [p for _, p in named]
            # (some models keep parts of their graph from one run to the next)
            stacks.append(torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True))
    table = dx.gradients(model, subject.loss, [(subject.inputs, None), (other, None)])
    reached = [
        name
        for (name, _), pair in zip(named, zip(*stacks, strict=True), strict=True)
        if pair[0] is not None
    ]
    assert [row.parameter for row in table] == reached
    largest = max((row.rms for row in table if math.isfinite(row.rms)), default=0.0)
    for name, (one, two) in zip((n for n, _ in named), zip(*stacks, strict=True), strict=True):
        if one is None:
            assert name in table.notes[0]
            continue
        row, both = table[name], torch.stack([one, two]).double()
        if not bool(both.isfinite().all()):
            assert any("not finite" in note for note in table.notes)
            continue
        finite(row)
        mean = both.mean(0)
        near(row.rms, float(mean.square().mean().sqrt()), slack, f"RMS of {name}", 1e-4 * largest)
        variance, noise, size = float(mean.var(correction=0)), float(both.var(0).mean()), largest**2
        near(row.variance, variance, slack, f"variance of {name}", 1e-4 * size)
        assert row.noise is not None
        near(row.noise, noise, slack, f"noise of {name}", 1e-4 * size)
    return f"{len(table)} tensors"


def shifted(value: Any) -> Any:
    """Another batch: the same samples, moved a little; integers stay."""
    if (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and not bool(((value == 0) | (value == 1)).all())
    ):
        return value * 1.1 + 0.01
    return value


def start_of(subject: Subject) -> str | None:
    """The layer to start from where the inputs are integers."""
    if first((subject.args, subject.kwargs)) is not None and "input_ids" not in subject.kwargs:
        return None
    called: list[str] = []
    tables = {n: m for n, m in subject.model.named_modules() if isinstance(m, nn.Embedding)}
    handles = [
        m.register_forward_hook(lambda *_, name=n: called.append(name)) for n, m in tables.items()
    ]
    with subject.alone():
        subject.model(*subject.args, **subject.kwargs)
    for handle in handles:
        handle.remove()
    return called[0] if called else None


def spectra(subject: Subject) -> str:
    """Products, trace, singular values and density of the Jacobian against each
    other, and against the matrix.
    """
    start = start_of(subject)
    operator = dx.jacobian(subject.model, *subject.args, kwargs=subject.kwargs, start=start)
    rows, columns = operator.shape
    random, slack = np.random.default_rng(0), subject.tolerance
    u, v = random.normal(size=columns), random.normal(size=rows)
    forward, back = operator.matvec(u), operator.rmatvec(v)
    size = float(np.linalg.norm(forward) * np.linalg.norm(v))
    near(float(v @ forward), float(back @ u), 1e-2 * slack, "v (J u) and (v J) u", size)
    trace = dx.trace_k(operator, 20)
    finite(trace)
    if not trace.value:
        return "a Jacobian of zero"
    (top,) = dx.top_singular(operator, 1, tolerance=1e-4)
    near(top.error, 0.0, 1.0, "residual", 1e-1 * top.value)
    assert top.value**2 <= (trace.value + 6 * trace.error) * columns * (1 + slack)
    found = dx.spectrum(operator, probes=3, steps=12)
    other = found.trace_k()
    assert found.largest <= top.value * (1 + 1e-3)
    assert (
        abs(other.value - trace.value)
        <= 6 * math.hypot(other.error, trace.error) + slack * trace.value
    )
    if max(rows, columns) > SMALL:
        return "products, trace, norm, density"
    matrix = operator.dense()
    truth = float((matrix**2).sum()) / columns
    assert abs(trace.value - truth) <= 5 * trace.error + slack * truth
    near(top.value, float(np.linalg.norm(matrix, 2)), 1e-3, "largest singular value")
    if start is None:
        with subject.alone():
            source = first((subject.args, subject.kwargs))

            def run(z: Tensor) -> Any:
                args, kwargs = replaced((subject.args, subject.kwargs), source, z)
                return first(subject.model(*args, **kwargs))

            assert source is not None
            exact = explicit(run, source).reshape(rows, columns).double().numpy()
        size = slack * float(np.abs(exact).max())
        near(float(np.abs(matrix - exact).max()), 0.0, 1.0, "the matrix", size)
    return "the matrix"


def degeneracy(subject: Subject) -> str:
    """Rank against the explicit Jacobian; the deficit adds up; shares add up to the dimensions."""
    if subject.total > MANY:
        raise UnsupportedError("too large for a rank here")
    options: dict[str, Any] = {"max_exact": 700, "max_rows": 40}
    found = dx.degeneracy(
        subject.model, *subject.args, kwargs=subject.kwargs, graph=subject.graph, **options
    )
    finite(found)
    assert found.parameters == subject.total
    assert found.deficit == found.parameters - found.rank
    assert (
        found.deficit
        == found.dead + found.gauge + found.symmetric + found.undetermined + found.unexplained
    )
    assert found.rank <= min(found.outputs, found.parameters - found.dead)
    assert [row.parameter for row in found.tensors] == [
        n for n, p in subject.model.named_parameters() if p.requires_grad
    ]
    if found.method == "exact":
        near(
            sum(row.gauge or 0 for row in found.tensors), found.gauge, 1e-6, "gauge by tensor", 1.0
        )
        shares = sum(row.unexplained or 0 for row in found.tensors)
        near(shares, found.undetermined + found.unexplained, 1e-6, "the rest by tensor", 1.0)
    if found.method == "randomised" or found.outputs > SMALL or not found.clear:
        return found.method
    twin = safe_deepcopy(subject.model).double()
    wanted = {name: p.detach() for name, p in twin.named_parameters() if p.requires_grad}
    args, kwargs = tree_map(
        lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v,
        (subject.args, subject.kwargs),
    )

    def run(*values: Tensor) -> Tensor:
        named = dict(zip(wanted, values, strict=True))
        result = torch.func.functional_call(twin, named, args, kwargs)
        parts = [
            v
            for v in tree_leaves(dict(result) if isinstance(result, Mapping) else result)
            if isinstance(v, Tensor)
        ]
        return torch.cat(
            [v.reshape(-1) for v in parts if v.is_floating_point() and v.requires_grad]
        )

    with sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(devices=[]):
        parts = explicit(run, tuple(wanted.values()))
    matrix = torch.cat([part.reshape(len(part), -1) for part in parts], 1)
    lengths = matrix.norm(dim=0)
    live = matrix[:, lengths > 1e-14 * lengths.max()]
    rank = int(torch.linalg.matrix_rank(live / live.norm(dim=0), rtol=1e-9))
    assert found.rank == rank, f"rank {found.rank} against {rank}"
    return "the explicit rank"


def cost(subject: Subject) -> str:
    """Multiplications against torch's counter and against hooks on linear
    and convolutional layers.
    """
    model, layered = subject.model, [0]

    def count(module: Any, args: Any, output: Tensor) -> None:
        if isinstance(module, nn.RNNBase):
            steps = (
                len(args[0].data)
                if isinstance(args[0], PackedSequence)
                else math.prod(args[0].shape[:2])
            )
            layered[0] += steps * sum(p.numel() for p in module.parameters() if p.dim() > 1)
        elif isinstance(module, nn.Linear):
            layered[0] += output.numel() * module.in_features
        else:
            # a transposed convolution spends a kernel on every input
            place, channels = (
                (args[0], module.out_channels)
                if module.transposed
                else (output, module.in_channels)
            )
            layered[0] += place.numel() * channels // module.groups * math.prod(module.kernel_size)

    convolutions = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d
    kinds = (nn.Linear, *convolutions, nn.RNNBase)
    handles = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, kinds)]
    with subject.alone(), FlopCounterMode(display=False) as counter:
        model(*subject.args, **subject.kwargs)
    for handle in handles:
        handle.remove()
    found = dx.cost(model, *subject.args, kwargs=subject.kwargs)
    finite(found)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.forward >= counter.get_total_flops() // 2
    assert found.forward >= layered[0] > 0 or layered[0] == 0
    assert found.multiplications >= found.forward and found.saved >= 0
    again = dx.cost(model, *subject.args, kwargs=subject.kwargs, repeats=1)
    assert again.multiplications == found.multiplications and (again.seconds or 0) > 0
    return "counted"


def conserved(subject: Subject) -> str:
    """The conserved sums are what the gauge directions make of the weights themselves."""
    if subject.total > MANY:
        raise UnsupportedError("too large for a gauge here")
    found = dx.conserved(subject.graph)
    assert found.shape == (subject.graph.num_units,) and bool(found.isfinite().all())
    names = dict(subject.model.named_parameters())
    sizes = np.cumsum([0, *(p.numel() for p in names.values())])
    starts = dict(zip(names, (int(size) for size in sizes[:-1]), strict=True))
    directions = gauge_directions(subject.graph, starts, int(sizes[-1]))
    flat = np.concatenate([p.detach().double().reshape(-1).numpy() for p in names.values()])
    expected = directions.T @ flat
    assert np.allclose(
        found.numpy(), expected, rtol=1e-9, atol=1e-9 * max(1.0, float(np.abs(flat).max()) ** 2)
    )
    return f"{len(found)} sums"


def chain(subject: Subject) -> str:
    """The chain's products <z, g> against parameter gradients alone, in one pass and in a loop."""
    model = subject.model
    found = dx.MarkovChain.trace(model, *subject.args, kwargs=subject.kwargs)
    assert found.sentence().endswith(".")
    if not len(found):
        try:
            found.observe(subject.loss, subject.inputs, None)
        except InputError as error:
            assert "nothing to observe" in str(error)
            raise
        raise AssertionError("a chain without nodes was observed")
    record = found.observe(subject.loss, subject.inputs, None)
    assert record.names == tuple(node.name for node in found.nodes)
    known = record.cosines[~record.cosines.isnan()]
    assert bool((known.abs() <= 1).all())
    assert bool(record.direction_norms.nan_to_num().isfinite().all())
    compared = 0
    for node in found.nodes:
        total, alone = float(record.products[node.index].sum()), float(record.gauge[node.index])
        bound = float((record.direction_norms * record.gradient_norms)[node.index].sum())
        repeated = (
            sum(
                other.module == node.module and other.site.order == node.site.order
                for other in found.nodes
            )
            > 1
        )
        if alone == alone and total == total and not repeated:
            near(total, alone, subject.tolerance, f"<z, g> of {node.name}", bound)
            compared += 1
    # (by the kernels that were observed)
    with torch.random.fork_rng(devices=[]), found.watch() as watch:
        saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        output = model(*subject.args, **subject.kwargs)
        wanted = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(subject.loss(output), wanted, allow_unused=True)
    for buffer, value in saved:
        buffer.data.copy_(value)
    assert torch.allclose(
        watch.records[-1].products, record.products, equal_nan=True, rtol=1e-3, atol=1e-9
    )
    return f"{len(found)} nodes, {compared} by parameters"


def page(subject: Subject) -> str:
    """The report: every part has numbers or a sentence."""
    found = dx.report(subject.model, *subject.args, kwargs=subject.kwargs)
    assert f"{type(subject.model).__name__}" in found.html
    json.dumps(found.to_dict(), allow_nan=False)
    for name, sentence in found.sentences.items():
        assert sentence.rstrip().endswith((".", "?")), name
    return f"{len(found.facts)} parts"


MEASURED = (signal, gradients, spectra, degeneracy, cost, conserved)
CHECKS: dict[str, Callable[[Subject], str]] = {
    check.__name__: check for check in (*MEASURED, chain, page)
}


def sentence(error: PathspaceError) -> str:
    """The error's message, if it is a sentence: one line, a capital or a name first, a
    full stop or a reason last.
    """
    text = str(error)
    assert "\n" not in text and len(text) > 20, f"no sentence: {text!r}"
    return text


def diagnose(subject: Subject, check: str) -> tuple[bool, str]:
    """Run one check; whether the diagnostic applies, and what was compared or why it does not.

    Raises:
        AssertionError: a number is wrong, or the model is not as it was.
    """
    assert (
        subject.output.numel()
    )  # some libraries' models put hooks on themselves when they first run
    before = state(subject)
    try:
        result = True, CHECKS[check](subject)
    except PathspaceError as error:
        result = False, sentence(error)
    after = state(subject)
    for key, value in before.items():
        assert same(value, after[key]), f"{check} changed {key}"
    return result

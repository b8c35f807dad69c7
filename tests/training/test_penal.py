"""The penal connection against the explicit loss, on hand-written and on real models."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import figures
from cases import network, recomputed
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from zoo import load

from pathspace.diagnostics import MarkovChain
from pathspace.diagnostics.chain.addition_hooks import Addition, Sites
from pathspace.diagnostics.shared.recomputation import RUNNING
from pathspace.errors import InputError, UnsupportedError
from pathspace.models.nested import leaves
from pathspace.training import penalise_
from pathspace.training.penal import penal, penal_add

TAU = 0.3
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:None of the inputs have requires_grad",
)


def into_branch(model: Toy, x: Tensor, block: nn.Module, i: int) -> Tensor:
    z = model.keep(block(x))
    z += x
    return z


def into_stream(model: Toy, x: Tensor, block: nn.Module, i: int) -> Tensor:
    x = x.clone()
    z = model.keep(block(x.clone()))
    x += z
    return x


def parallel(model: Toy, x: Tensor, block: nn.Module, i: int) -> Tensor:
    y = x + model.keep(block(x))
    return y + model.keep(model.blocks[(i + 1) % 3](x).tanh())


STYLES: dict[str, Callable[[Any, Tensor, nn.Module, int], Tensor]] = {
    "plain": lambda m, x, block, i: x + m.keep(block(x)),
    "left": lambda m, x, block, i: m.keep(block(x)) + x,
    "function": lambda m, x, block, i: torch.add(x, other=m.keep(block(x), 0.25), alpha=0.25),
    "alpha_left": lambda m, x, block, i: torch.add(m.keep(block(x)), x, alpha=0.5),
    "difference": lambda m, x, block, i: x - m.keep(block(x), -1.0),
    "scaled": lambda m, x, block, i: x + m.keep(F.dropout(m.scales[i] * block(x), 0.0)),
    "into_branch": into_branch,
    "into_branch_alias": lambda m, x, block, i: m.keep(block(x)).add_(x),
    "into_stream": into_stream,
    "shortcut": lambda m, x, block, i: m.down(x) + m.keep(m.scales[i] * block(x).tanh()),
    "parallel": parallel,
}


class Toy(nn.Module):
    """Three blocks whose forward is written in a given style; `zs` keeps the
    directions, for the explicit loss.
    """

    def __init__(self, style: str, width: int = 6) -> None:
        super().__init__()
        self.style, self.keeps = style, True
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(3)
        )
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(width) + 0.5) for _ in range(3))
        self.down = nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.zs: list[Tensor] = []
        act = nn.ReLU(inplace=True) if self.style.endswith("relu_") else nn.Identity()
        for i, block in enumerate(self.blocks):
            x = act(STYLES[self.style.removesuffix("_relu_")](self, x, block, i))
        return self.head(x)

    def keep(self, z: Tensor, factor: float = 1.0) -> Tensor:
        if self.keeps:
            self.zs.append(factor * (z.clone() if z.requires_grad else z))
        return z


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    names = [name for name, _ in model.named_parameters()]
    return {name: value for name, value in zip(names, found, strict=True) if value is not None}


def explicitly(model: nn.Module, x: Tensor, tau: float = TAU) -> dict[str, Tensor]:
    """Gradients of the explicit loss of a model that keeps its directions."""
    loss = model(x).square().sum()
    return gradients(model, loss + tau / 2 * sum(z.square().sum() for z in model.zs))


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        scale = max(1.0, float(value.abs().max()))
        assert float((value - b[name]).abs().max()) <= tolerance * scale, name


def safe_deepcopy(model: nn.Module) -> Any:
    model.zs = []  # type: ignore[assignment]
    return copy.deepcopy(model)


def toy(style: str, relu: bool = False) -> tuple[Toy, Tensor]:
    torch.manual_seed(0)
    return Toy(style + ("_relu_" if relu else "")).double(), torch.randn(5, 6, dtype=torch.float64)


@pytest.mark.parametrize("relu", [False, True], ids=["", "relu_"])
@pytest.mark.parametrize("style", STYLES)
def test_gradient_is_that_of_the_explicit_loss(style: str, relu: bool) -> None:
    model, x = toy(style, relu)
    loss = model(x).square().sum()
    explicit, plain = explicitly(model, x), gradients(model, loss)
    count = len(model.zs)
    twin = penalise_(safe_deepcopy(model), x, tau=TAU)
    assert len(twin.penal_connection.nodes) == count
    result = twin(x).square().sum()
    assert torch.equal(result, loss)
    got = gradients(twin, result)
    assert_equal(got, explicit)
    assert any(float((got[name] - plain[name]).abs().max()) > 1e-3 for name in plain)


def explicit_on(
    model: nn.Module, chain: MarkovChain, loss: Callable[[], Tensor], tau: float
) -> dict[str, Tensor]:
    """The penalty written out, with the operands seen at the additions."""
    known, squares = chain.by_site(), []

    def note(addition: Addition) -> Tensor:
        if addition.site in known:
            node = known[addition.site]
            squares.append((node.scale * node.split(addition)[1].clone()).square().sum())
        return addition.run()

    with Sites(note).following(model):
        value = loss()
    assert len(squares) == len(chain)
    return gradients(model, value + tau / 2 * torch.stack(squares).sum())


REAL = ["resnet18", "vit_small", "swin_small", "convnext_small_replica", "nfnet_relu", "hf_gpt2",
        "hf_bert", "hf_t5", "hf_albert", "hf_llama_relu"]  # fmt: skip


def real(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model, *inputs = load()[name].make("eval")
    args, kwargs = tree_map_only(
        Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs
    )
    if name == "nfnet_relu":
        for key, parameter in model.named_parameters():
            if key.endswith("skip_gain"):
                parameter.data.fill_(0.7)
    if name == "resnet18":
        args = (args[0][..., :32, :32],)
    return model.double(), args, kwargs


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str) -> None:
    model, args, kwargs = real(name)

    def scalar(output: Any) -> Tensor:
        return next(leaf for leaf in leaves(output) if isinstance(leaf, Tensor)).square().mean()

    chain = MarkovChain.trace(model, *args, kwargs=kwargs)
    keys = list(model.state_dict())
    explicit = explicit_on(model, chain, lambda: scalar(model(*args, **kwargs)), TAU)
    penalise_(model, *args, kwargs=kwargs, tau=TAU)
    assert list(model.state_dict()) == keys
    assert_equal(gradients(model, scalar(model(*args, **kwargs))), explicit)
    model.penal_connection.remove()  # type: ignore[union-attr]
    plain = gradients(model, scalar(model(*args, **kwargs)))
    assert any(float((plain[k] - explicit[k]).abs().max()) > 1e-6 for k in plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_train_mode_with_other_batch_size() -> None:
    model = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.1, batch_first=True, norm_first=True
    ).double()
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    chain = MarkovChain.trace(model, x)
    big = torch.randn(7, 5, 8, dtype=torch.float64)

    def loss() -> Tensor:
        torch.manual_seed(1)
        return model(big).square().sum()

    explicit = explicit_on(model, chain, loss, TAU)
    penalise_(model, x, tau=TAU)
    assert_equal(gradients(model, loss()), explicit)
    model.eval()
    with torch.no_grad():
        assert model(big).shape == big.shape


def kept(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps for the backward pass."""
    storages: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = model(x).square().mean()
    assert loss.requires_grad
    own = {value.untyped_storage().data_ptr() for value in model.parameters()}
    return sum(size for pointer, size in storages.items() if pointer not in own)


@pytest.mark.parametrize("in_place", [False, True])
def test_no_memory_where_a_norm_ends_the_branch(in_place: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        z = net.norm(net.conv(x))
        if in_place:
            z += x
            return F.relu_(z)
        return torch.relu(x + z)

    affine = nn.InstanceNorm2d(4, affine=True)
    norms = [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm([5, 5]), affine]
    blocks = (network(forward, conv=nn.Conv2d(4, 4, 3, padding=1), norm=norm) for norm in norms)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), *blocks).double()
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    plain, chain = kept(model, x), MarkovChain.trace(model, x)
    penalised = penalise_(copy.deepcopy(model), x, tau=TAU)
    for training in (True, False):
        explicit = explicit_on(model, chain, lambda: model(x).square().sum(), TAU)
        if training:
            assert kept(penalised, x) == plain
        assert_equal(gradients(penalised, penalised(x).square().sum()), explicit)
        penalised.load_state_dict(model.eval().state_dict())
        penalised.eval()


def layers(net: Any, x: Tensor) -> Tensor:
    """A layer and functions that call it; `save` names what runs again in the backward pass."""

    def saved(name: str, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        return recomputed(function, x, reentrant=net.reentrant if name in net.save else None)

    def step(x: Tensor) -> Tensor:
        return x + torch.tanh(net.inner(x))

    def several(x: Tensor) -> Tensor:
        x = saved("module", net.layer, x)
        return step(saved("step", step, x + net.norm(net.inner(x))))

    return step(saved("several", several, step(x)))


@pytest.mark.parametrize("save", [("module",), ("step",), ("several",), ("several", "step")])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, save: tuple[str, ...]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    parts = {"layer": layer, "inner": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}
    model = network(layers, **parts, save=(), reentrant=reentrant).double()
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    penalise_(model, x.detach(), tau=TAU)
    results = []
    with MarkovChain.trace(model, x.detach()).watch() as watch:
        for model.save in ((), save):
            model.zero_grad()
            model(x).square().sum().backward()
            results.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert_equal(*results)
    records = [record.cosines for record in watch.records]
    assert len(records) == 2
    assert torch.allclose(*records, rtol=1e-10)
    assert records[0].isfinite().all()
    assert torch._C._len_torch_function_stack() == 0 and not RUNNING


def test_scale_conventions() -> None:
    """Per sample: whole batch = mean of halves = scaled loss unscaled; the raw hook
    depends on each of these.
    """
    model, x = toy("plain")

    def run(per: str, parts: int, factor: float) -> dict[str, Tensor]:
        twin = safe_deepcopy(model)
        options = {"scale": factor / parts} if per == "sample" else {}
        penalise_(twin, x, tau=TAU, per=per, **options)  # type: ignore[arg-type]
        for part in x[:4].chunk(parts):
            (twin(part).square().sum(1).mean() / parts * factor).backward()
        return {name: p.grad / factor for name, p in twin.named_parameters() if p.grad is not None}

    whole = run("sample", 1, 1.0)
    loss = model(x[:4]).square().sum(1).mean()
    assert_equal(
        whole, gradients(model, loss + TAU / 2 / 4 * sum(z.square().sum() for z in model.zs))
    )
    assert_equal(run("sample", 2, 1.0), whole)
    assert_equal(run("sample", 1, 1024.0), whole)
    assert_equal(run("sample", 4, 8.0), whole)
    raw = run("sum", 1, 1.0)
    scaled = run("sum", 1, 1024.0)
    assert max(float((raw[k] - scaled[k]).abs().max()) for k in raw) > 1e-3


def test_per_node_and_schedule() -> None:
    model, x = toy("plain")
    loss = model(x).square().sum()
    explicit = gradients(model, loss + 0.5 / 2 * model.zs[1].square().sum())
    penalise_(model, x, tau={"blocks.1": 0.5})
    assert_equal(gradients(model, model(x).square().sum()), explicit)
    connection = model.penal_connection
    for tau, reason in (
        ({"blocks.7": 1.0}, "none of"),
        ("strong", "expected a finite number"),
        ({"blocks.1": float("inf")}, "expected a finite number"),
    ):
        with pytest.raises(InputError, match=reason):
            connection.tau = tau
    connection.tau, connection.step = {"blocks.1": lambda step: 0.25 * step}, 2
    assert_equal(gradients(model, model(x).square().sum()), explicit)
    connection.remove()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    strong = explicitly(model, x, 0.2)
    penalise_(model, x, tau=lambda step: 0.1 * step, optimizer=optimizer)
    connection = model.penal_connection
    for step in range(3):
        assert connection.coefficient(connection.nodes[0]) == pytest.approx(0.1 * step)
        found = gradients(model, model(x).square().sum())
        optimizer.step()
    assert_equal(found, strong)


def test_functions_for_hand_written_models() -> None:
    model, x = toy("plain")
    explicit = explicitly(model, x)
    for add in (lambda x, z: x + penal(z, TAU), lambda x, z: penal_add(x, z, TAU)):
        y = x
        for block in model.blocks:
            y = add(y, block(y))
        assert_equal(gradients(model, model.head(y).square().sum()), explicit)
    with torch.no_grad():
        assert penal(x, TAU) is x


def test_second_derivatives_are_refused() -> None:
    """Whichever way they are asked for: the penalty's own second derivatives would be missing."""
    model, x = toy("plain")
    x = x.requires_grad_()
    penalise_(model, x.detach(), tau=TAU)
    for backward in (
        lambda y: torch.autograd.grad(y, x, create_graph=True),
        lambda y: y.backward(create_graph=True),
    ):
        with pytest.raises(UnsupportedError, match="create_graph=True"):
            backward(model(x).square().sum())
    y = penal(2 * x, TAU) + penal_add(x, 3 * x, TAU)
    with pytest.raises(UnsupportedError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["plain", "shortcut", "into_branch", "alpha_left"])
def test_transforms_of_torch_func(style: str) -> None:
    """Gradients per sample are explicit ones; derivatives of derivatives are refused."""
    model, x = toy(style)
    chain = MarkovChain.trace(model, x)
    want = [explicit_on(model, chain, lambda y=y: model(y).square().sum(), TAU) for y in x.split(1)]
    model.zs = []
    penalise_(model, x, tau=TAU)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], y: Tensor) -> Tensor:
        return functional_call(model, params, (y[None],)).square().sum()

    def slope(params: dict[str, Tensor]) -> Tensor:
        return grad(loss)(params, x[0])["blocks.0.1.weight"].sum()

    for i, each in enumerate(want):
        per_sample = vmap(grad(loss), in_dims=(None, 0))(params, x)
        assert_equal(each, {name: per_sample[name][i] for name in each})
    with pytest.raises(UnsupportedError, match=r"one transform of torch\.func inside another"):
        grad(slope)(params)
    with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
        jvp(lambda p: loss(p, x[0]), (params,), (params,))
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_penalties_are_not_rounded_away(dtype: torch.dtype) -> None:
    """A term below half a unit in the last place is kept in the mean, and
    nothing changes where it is 0.
    """
    g = torch.randn(64, 256).to(dtype)
    z = torch.randn(64, 256).to(dtype).requires_grad_()
    unit = float(torch.finfo(dtype).eps)
    for tau in (unit / 20, unit / 4, 0.1):
        (found,) = torch.autograd.grad(penal(z, tau), z, g)
        moved, part = found.double() - g.double(), tau * z.detach().double()
        assert float((moved * part).sum() / part.square().sum()) == pytest.approx(1.0, abs=0.1)
        error = (moved - part).abs()
        assert bool((error <= unit * torch.maximum(g.abs(), found.abs()).double() + 1e-6).all())
    still = torch.zeros_like(z).requires_grad_()
    assert torch.equal(torch.autograd.grad(penal(still, 1.0), still, g)[0], g)


def loop() -> nn.Module:
    """One block, used four times, with a scale that no module returns."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            z = net.scale * torch.tanh(net.inner(x))
            x = x + F.dropout(z, 0.0)
        return x

    scale = nn.Parameter(torch.rand(6) + 0.5)
    return network(forward, inner=nn.Linear(6, 6), scale=scale)


def compiled(name: str) -> tuple[nn.Module, Tensor]:
    """Models whose directions are not the output of a module, but the last."""
    x = torch.randn(5, 6, dtype=torch.float64)
    if name == "loop":
        return loop().double(), x
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        return layer.double(), torch.randn(5, 4, 8, dtype=torch.float64)
    model, _ = toy(name)
    model.zs = []
    model.keeps = False
    return model, x


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["plain", "plain_relu_", "scaled", "alpha_left", "into_branch", "into_stream", "parallel",
     "loop", "encoder"],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(name: str, backend: str) -> None:
    """The compiled model, in one graph, has the gradient of the eager one, and
    follows a change of tau.
    """
    model, x = compiled(name)
    plain = gradients(model, model(x.clone()).square().sum())
    penalise_(model, x, tau=TAU)
    torch._dynamo.reset()
    fast = torch.compile(model, backend=backend, fullgraph=True)
    for tau in (TAU, 0.7):
        model.penal_connection.tau = tau
        eager = gradients(model, model(x.clone()).square().sum())
        assert_equal(gradients(model, fast(x.clone()).square().sum()), eager)
        assert any(float((eager[key] - plain[key]).abs().max()) > 1e-3 for key in plain)
    model.penal_connection.remove()
    assert_equal(gradients(model, fast(x.clone()).square().sum()), plain)
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("way", ["wrapped", "in place", "blocks wrapped", "blocks in place"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_first_and_penalised_then(way: str, warm: bool) -> None:
    """Whole or block by block, with ``compile()`` or wrapped, run before or not."""
    model, x = compiled("loop")
    stack = nn.Sequential(model, copy.deepcopy(model))
    plain = penalise_(copy.deepcopy(stack), x, tau=TAU)
    want = gradients(plain, plain(x).square().sum())
    torch._dynamo.reset()
    if way == "blocks wrapped":
        stack = nn.Sequential(*(torch.compile(part, backend="aot_eager") for part in stack))
    for part in {"in place": [stack], "blocks in place": stack}.get(way, []):
        part.compile(backend="aot_eager")
    fast = torch.compile(stack, backend="aot_eager") if way == "wrapped" else stack
    keys = list(fast.state_dict())
    if warm:
        fast(x)
    assert penalise_(fast, x, tau=TAU) is fast
    assert len(stack.penal_connection.nodes) == len(plain.penal_connection.nodes)
    got = gradients(stack, fast(x).square().sum())
    assert_equal({name.replace("_orig_mod.", ""): value for name, value in got.items()}, want)
    assert list(fast.state_dict()) == keys
    torch._dynamo.reset()


def test_a_compiled_model_is_measured_uncompiled() -> None:
    model, x = compiled("into_stream")
    chain = MarkovChain.trace(model, x)
    want = chain.observe(lambda y, _: y.square().sum(), x.clone(), None)
    torch._dynamo.reset()
    model.compile(backend="aot_eager")
    got = chain.observe(lambda y, _: y.square().sum(), x.clone(), None)
    assert torch.equal(got.cosines, want.cosines) and torch.equal(got.gauge, want.gauge)
    fast = torch.compile(copy.deepcopy(model), backend="aot_eager")
    with chain.watch() as watch:
        fast(x.clone()).square().sum().backward()
    assert not watch.records
    torch._dynamo.reset()


def test_a_compiler_that_loses_an_addition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = compiled("loop")
    connection = penalise_(model, x, tau=TAU).penal_connection
    connection._begin(model, (x,), {})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedError, match="met 0 of the 4 additions"):
        connection._end(model, (x,), x)
    with torch.no_grad():
        connection._end(model, (x,), x)


def test_autocast() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    x = torch.randn(3, 4, 16)
    exact = penalise_(copy.deepcopy(layer).double(), x.double(), tau=TAU)
    want = gradients(exact, exact(x.double()).square().sum())
    penalise_(layer, x, tau=TAU)
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(x).float().square().sum()
    got = gradients(layer, loss)
    for name, value in got.items():
        if float(want[name].abs().max()) > 1e-3:
            assert (
                F.cosine_similarity(value.double().flatten(), want[name].flatten(), dim=0) > 0.99
            ), name


def test_copies_and_pickles_stand_alone() -> None:
    model, x = toy("plain")
    penalise_(model, x, tau=TAU)
    want = gradients(model, model(x).square().sum())
    model.zs = []
    stored = pickle.dumps(model)
    twins = [safe_deepcopy(model), pickle.loads(stored)]
    model.penal_connection.tau = 0.0
    for twin in twins:
        assert_equal(gradients(twin, twin(x).square().sum()), want)
        twin.penal_connection.remove()
        assert not hasattr(twin, "penal_connection")
    assert not any("penal" in key for key in model.state_dict())


def test_exceptions_leave_no_mode_behind() -> None:
    model, x = toy("plain")
    penalise_(model, x, tau=TAU)
    with pytest.raises(RuntimeError):
        model(torch.randn(5, 7, dtype=torch.float64))
    assert torch._C._len_torch_function_stack() == 0
    want = gradients(model, model(x).square().sum() + 0)
    assert want and model.penal_connection.sites.stack == []


def both_ways(net: Any, x: Tensor) -> Tensor:
    """One module adds: the direction is the right operand, then the left one, then neither is
    a direction. Directions are kept for the explicit loss.
    """
    net.zs = []

    def right(x: Tensor) -> Tensor:
        net.zs.append(net.f(x).tanh())
        return net.add(x, net.zs[-1])

    def left(x: Tensor) -> Tensor:
        net.zs.append(net.g(x).tanh())
        return net.add(net.zs[-1], x)

    if net.first:
        x = net.add(net.f(x), net.g(x)).sin()
    for step in (left,) if net.skip else (right, left):
        x = recomputed(step, x, reentrant=net.reentrant)
    return x if net.first else net.add(net.f(x), net.g(x)).sin()


def shared(first: bool) -> Any:
    parts = {"add": network(lambda net, a, b: a + b), "f": nn.Linear(6, 6), "g": nn.Linear(6, 6)}
    return network(both_ways, **parts, first=first, skip=False, reentrant=None).double()


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("way", [None, False, True, "compiled"])
def test_one_module_makes_different_additions(way: Any, first: bool) -> None:
    model, x = shared(first), torch.randn(5, 6, dtype=torch.float64)
    wanted = explicitly(model, x)
    model.zs, model.reentrant = [], None if way == "compiled" else way
    assert len(penalise_(model, x, tau=TAU).penal_connection.nodes) == 2
    run = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    run(x.requires_grad_()).square().sum().backward()
    assert_equal({name: p.grad for name, p in model.named_parameters()}, wanted)


def test_another_number_of_calls_that_differ_is_refused() -> None:
    model, x = shared(False), torch.randn(5, 6, dtype=torch.float64)
    penalise_(model, x, tau=TAU)
    model.skip = True
    words = "'add' of Network is called 2 times and was called 3"
    with pytest.raises(UnsupportedError, match=words):
        model(x)
    with torch.no_grad():
        model(x)
    model.skip = False
    model(x).sum().backward()


def test_other_additions_than_were_traced_are_refused() -> None:
    """Fewer steps are penalised like the rest; others have no node."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(net.count):
            x = x + torch.tanh(net.cell(x))
        return net.extra(x) if net.more else x

    model = network(forward, cell=nn.Linear(6, 6), extra=loop(), count=3, more=False).double()
    x, plain = torch.randn(4, 6, dtype=torch.float64), copy.deepcopy(model)
    penalise_(model, x, tau=TAU)
    model.count = plain.count = 2
    chain = MarkovChain.trace(plain, x)
    explicit = explicit_on(plain, chain, lambda: plain(x).square().sum(), TAU)
    assert_equal(gradients(model, model(x).square().sum()), explicit)
    model.count = 5
    with torch.no_grad():
        model(x)
    with pytest.raises(UnsupportedError, match="makes 5 additions in this call and made 3"):
        model(x)
    model.count, model.more = 3, True
    with pytest.raises(UnsupportedError, match=r"'extra' of Network adds two .* and did not run"):
        model(x)
    assert torch._C._len_torch_function_stack() == 0


def test_sequences_first() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True).double()
    twin = copy.deepcopy(model)
    twin.self_attn.batch_first = True
    x = torch.randn(4, 7, 8, dtype=torch.float64)
    found = []
    for net, given, dim in ((model, x, 1), (twin, x.transpose(0, 1), 0)):
        chain = MarkovChain.trace(net, given)
        record = chain.observe(lambda y, _: y.square().sum(), given, None, batch_dim=dim)
        assert record.cosines.shape == (2, 7)
        with chain.watch(batch_dim=dim) as watch:
            net(given).square().sum().backward()
        assert torch.allclose(watch.records[0].cosines, record.cosines, rtol=1e-12)
        penalise_(net, given, tau=TAU, per="sample", batch_dim=dim)
        found.append((record.cosines, gradients(net, net(given).square().sum())))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-9)
    assert_equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"per": "batch"}, "per = "), ({"scale": 2.0}, "scale belongs"), ({}, "penalised already")],
)
def test_bad_input(settings: Any, words: str) -> None:
    model, x = toy("plain")
    with pytest.raises(InputError, match="not a Markov chain"):
        penalise_(nn.Linear(3, 3), torch.ones(2, 3), tau=1.0)
    if not settings:
        penalise_(model, x, tau=1.0)
    with pytest.raises(InputError, match=words):
        penalise_(model, x, tau=1.0, **settings)


def test_observing_a_penalised_model() -> None:
    """Observed is the loss alone, watched the gradients as trained; hooks go away in any order."""
    model, x = toy("plain")
    states, sums = [], [x]
    for block in model.blocks:
        states.append(block(sums[-1]))
        sums.append(sums[-1] + states[-1])
    total = model.head(sums[-1]).square().sum() + TAU / 2 * sum(z.square().sum() for z in states)
    wanted = torch.autograd.grad(total, states)
    chain = MarkovChain.trace(model, x)
    alone = chain.observe(lambda y, _: y.square().sum(), x, None)
    penalise_(model, x, tau=TAU)
    for observed in (chain, MarkovChain.trace(nn.Sequential(model), x)):
        again = observed.observe(lambda y, _: y.square().sum(), x, None)
        assert torch.equal(again.products, alone.products) and torch.equal(again.gauge, alone.gauge)
    with chain.watch() as watch:
        model(x).square().sum().backward()
    (record,) = watch.records
    for node, (z, g) in enumerate(zip(states, wanted, strict=True)):
        # (the total derivative with respect to x_l has no part of the node's own penalty)
        own = (z * (g - TAU * z)).sum(1)
        assert torch.allclose(record.products[node], own, rtol=1e-9, atol=1e-11)
    with chain.watch() as watch:
        model(x).square().sum().backward()
        model.penal_connection.remove()
        model(x).square().sum().backward()
    assert len(watch.records) == 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")
def test_compile_around_graph_breaks_and_block_by_block(backend: str) -> None:
    model, x = compiled("loop")
    stack = nn.Sequential(model, copy.deepcopy(model))
    penalise_(stack, x, tau=TAU)
    want = gradients(stack, stack(x).square().sum())
    torch._dynamo.reset()
    for part in stack:
        part.breaks = True
    assert_equal(gradients(stack, torch.compile(stack, backend=backend)(x).square().sum()), want)
    torch._dynamo.reset()
    for part in stack:
        part.breaks = False
        part.compile(backend=backend)
    assert_equal(gradients(stack, stack(x).square().sum()), want)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("ran", [False, True])
def test_a_penalised_model_in_a_file_keeps_its_penalty(
    tmp_path: Path, norm_first: bool, ran: bool
) -> None:
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    x, optimizer = torch.randn(2, 5, 8), torch.optim.SGD(layer.parameters(), lr=0.0)
    plain = gradients(layer, layer(x).square().sum())
    penalise_(layer, x, tau=TAU, optimizer=optimizer)
    want = gradients(layer, layer(x).square().sum())
    if ran:
        optimizer.step()
    layer.zero_grad()
    torch.save((layer, x), tmp_path / "model.pt")
    code = """
import sys, torch
model, x = torch.load(sys.argv[1], weights_only=False)
(model(x).square().sum()).backward()
found = {name: p.grad for name, p in model.named_parameters()}
model.zero_grad()
model.penal_connection.remove()
(model(x).square().sum()).backward()
torch.save((found, {name: p.grad for name, p in model.named_parameters()}), sys.argv[2])
"""
    files = [str(tmp_path / name) for name in ("model.pt", "gradients.pt")]
    subprocess.run([sys.executable, "-c", code, *files], check=True, timeout=300)
    penalised, removed = torch.load(files[1])
    assert_equal(penalised, want)
    assert_equal(removed, plain)
    twin = pickle.loads(pickle.dumps(layer))
    optimizer.step()
    assert layer.penal_connection.step == 1 + ran and twin.penal_connection.step == ran


def test_figures_of_memory_are_what_the_page_says() -> None:
    from benchmarks.penal_memory import NAME, PAGE, measured, table

    rows = figures.load(NAME)
    assert figures.shows(PAGE, NAME, table(rows))
    # bytes of the model itself depend on the version of torch
    found = [measured(row["block"])["for_a_node"] for row in rows]
    assert (
        [value == 0 for value in found]
        == [row["for_a_node"] == 0 for row in rows]
        == [True] * 3 + [False] * 3
    )
    assert found[4] == rows[4]["for_a_node"] == 1
    for value, row in zip(found, rows, strict=True):
        assert value == pytest.approx(row["for_a_node"], abs=0.01)


def test_figures_in_16_bits_are_what_the_page_says() -> None:
    """No line is further from the float32 gradient than the explicit
    loss, by two standard errors.
    """
    from benchmarks.penal_bf16 import NAME, PAGE, table

    rows = figures.load(NAME)
    assert figures.shows(PAGE, NAME, table(rows))
    assert len(rows) == 16 and all(row["closer"] > -2 * row["error"] for row in rows)

"""Two and four processes, with copies of the weights or with weights cut in every way that torch
offers, take the steps of one process.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import mlp, network
from oracles.networks import OpRNN
from processes import once, several_processes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from training_pairs import maker

import pathspace as ps
from pathspace.training import GSGD, GAdam, GaugeFixed, PathSGD, PathSpace, init_skeleton_

# several processes
pytestmark = pytest.mark.slow

Found = dict[str, object]
Go = Callable[[int], None]
MAKERS: dict[str, Callable[..., PathSpace]] = {
    "gsgd": maker(GSGD, lr=torch.tensor(0.02)),
    "momentum": maker(GSGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    "gadam": maker(GAdam, lr=0.01),
    "bounded": maker(GAdam, lr=0.01, max_multiplier=0.5, weight_decay=0.1),
}
WORLDS = (4, 2)
FUSED = ("momentum", "gadam")


def convolutions() -> nn.Module:
    """Tails that depend on the row (depthwise), channels fewer than processes, batch
    norm, a pinned read-out.
    """

    def forward(net: Any, x: Tensor) -> Tensor:
        x = torch.relu(net.norm(net.depthwise(torch.relu(net.first(x.view(-1, 1, 2, 2))))))
        return net.last(torch.tanh(net.head(torch.relu(net.single(x)).flatten(1))))

    first, depthwise = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1, groups=3)
    norm = nn.BatchNorm2d(3, eps=1e-30, track_running_stats=False)
    single, head, last = nn.Conv2d(3, 1, 1), nn.Linear(4, 3), nn.Linear(3, 1)
    return network(
        forward, first=first, depthwise=depthwise, norm=norm, single=single, head=head, last=last
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "normed": lambda: nn.Sequential(*mlp(4, 8, 4), nn.LayerNorm(4), *mlp(4, 8, 1)),
    # 7, 5 and 1 rows: uneven shards, and one that is empty
    "uneven": lambda: mlp(4, 7, 5, 1),
    "convolutions": convolutions,
    "rnn": lambda: nn.Sequential(
        nn.Unflatten(-1, (2, 2)), OpRNN(2, 3, 1, batch_first=True, num_layers=2)
    ),
}
OTHERS = [name for name in MODELS if name != "normed"]


def setting(
    dtype: torch.dtype = torch.float64, name: str = "normed"
) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.where(parameter < 0, -0.3, 0.3))
    shape = (8, 4) if name == "normed" else (8,)
    return model, torch.randn(*shape, 4, dtype=dtype), torch.randn(*shape, 1, dtype=dtype)


@cache
def skeleton_of(dtype: torch.dtype = torch.float64, name: str = "normed") -> ps.Skeleton:
    model, x, _ = setting(dtype, name)
    return ps.trace(model, x).skeleton()


def ready(
    way: str, member: str, dtype: torch.dtype = torch.float64, name: str = "normed", **more: Any
) -> tuple[nn.Module, PathSpace, Go]:
    """A model, cut, with its optimizer, and so many steps of it."""
    model, x, y = setting(dtype, name)
    init_skeleton_(model, skeleton_of(dtype, name))
    share = WAYS[way](model)
    if name == "convolutions":
        # batch statistics are those of a process, so this one sees the whole batch everywhere
        share = (1, 0)
    optimizer = MAKERS[member](model, skeleton_of(dtype, name), **more)
    return model, optimizer, lambda steps: train(model, optimizer, x, y, share, steps)


# --- ways to cut a model; each returns how many ways the batch is shared, and
# the part of this process


def rows(model: nn.Module) -> tuple[int, int]:
    for layer in list(model.children())[:4]:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return dist.get_world_size(), dist.get_rank()


def columns(model: nn.Module) -> tuple[int, int]:
    world = dist.get_world_size()
    fully_shard(
        model,
        shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % world == 0 else None,
    )
    return world, dist.get_rank()


def hybrid(model: nn.Module) -> tuple[int, int]:
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards")
    )
    for number in (0, 2):
        fully_shard(model[number], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return dist.get_world_size(), dist.get_rank()


PLAN = {
    "0": ColwiseParallel(),
    "2": RowwiseParallel(output_layouts=Shard(1)),
    "3": SequenceParallel(),
    "4": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    ),
}


def tensors(model: nn.Module) -> tuple[int, int]:
    """Rows, columns, copies with gradients that are terms of a sum, and whole tensors."""
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), PLAN)
    return 1, 0


def both(model: nn.Module) -> tuple[int, int]:
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensors")
    )
    parallelize_module(model, mesh["tensors"], PLAN)
    for number in (0, 2):
        fully_shard(model[number], mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return dist.get_world_size() // 2, mesh["data"].get_local_rank()


def meshes(model: nn.Module) -> tuple[int, int]:
    """Two meshes of the same processes, made apart."""
    for number, name in ((0, "a"), (2, "b")):
        fully_shard(
            model[number],
            mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,)),
        )
    fully_shard(model)
    return dist.get_world_size(), dist.get_rank()


def half(model: nn.Module) -> tuple[int, int]:
    """One layer alone; every process sees the whole batch, so that gradients
    of the others are alike.
    """
    fully_shard(model[2])
    return 1, 0


def uncut(model: nn.Module) -> tuple[int, int]:
    return 1, 0


ALL = (rows, columns, hybrid, tensors, both, meshes, half, uncut)
WAYS: dict[str, Callable[[nn.Module], tuple[int, int]]] = {cut.__name__: cut for cut in ALL}
CUT = [way for way in WAYS if way != "uncut"]


def backward(model: nn.Module, x: Tensor, y: Tensor, share: tuple[int, int]) -> None:
    parts, number = share
    nn.functional.mse_loss(model(x.chunk(parts)[number]), y.chunk(parts)[number]).backward()


def train(
    model: nn.Module, optimizer: PathSpace, x: Tensor, y: Tensor, share: tuple[int, int], steps: int
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, x, y, share)
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    return getattr(tensor, "full_tensor", tensor.detach)().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def flat(state: object, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a nested state, whole."""
    if isinstance(state, Tensor):
        return {prefix: whole(state)}
    items = (
        state.items()
        if isinstance(state, dict)
        else enumerate(state)
        if isinstance(state, list)
        else ()
    )
    return {
        key: value for name, one in items for key, value in flat(one, f"{prefix}.{name}").items()
    }


# --- what each process does


def work(rank: int, folder: Path) -> None:
    # an output that is a view of another tensor
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    world = dist.get_world_size()
    found: Found = {f"{way} {member}": trained(way, member) for way in CUT for member in MAKERS}
    for way in ("rows", "both"):
        found[f"after {way}"], found[f"meta {way}"] = after(way), from_meta(way)
    if world == max(WORLDS):
        for member in ("momentum", "gadam"):
            found |= save("both", member, folder) | save("rows", member, folder, torch.float32)
        found["meshes"] = refusal(crossed)
    else:
        found |= refusals() | resumed_alone()
        for member in MAKERS:
            found[f"copies {member}"] = copies(member)
            found |= {f"{name} {member}": stepped("rows", name, member) for name in OTHERS}
    for member in ("momentum", "gadam"):
        found |= load("both", "rows", member, folder) | load(
            "rows", "rows", member, folder, torch.float32
        )
    found |= fused(folder)
    torch.save(found, folder / f"{world}-{rank}.pt")


def trained(way: str, member: str) -> dict[str, Tensor]:
    """Weights after some steps, with the norm of the gradient and changes by
    somebody else on the way.
    """
    model, optimizer, go = ready(way, member)
    go(1)
    optimizer.zero_grad()
    _, x, y = setting()
    backward(model, x, y, (1, 0))
    norm = optimizer.clip_path_grad_norm_(0.5)
    optimizer.step()
    with torch.no_grad():
        for parameter in model[4].parameters():
            parameter.mul_(1.1)
    go(2)
    return {**weights(model), "norm": norm, "counts": optimizer.clip_counts.double()}


def stepped(way: str, name: str, member: str) -> dict[str, Tensor]:
    """Weights of another model after some steps."""
    model, _, go = ready(way, member, name=name)
    go(5)
    return weights(model)


def copies(member: str) -> dict[str, Tensor]:
    """The same by DistributedDataParallel."""
    model, x, y = setting(name="uneven")
    init_skeleton_(model, skeleton_of(name="uneven"))
    optimizer = MAKERS[member](model, skeleton_of(name="uneven"))
    share = dist.get_world_size(), dist.get_rank()
    train(DistributedDataParallel(model), optimizer, x, y, share, 5)
    return weights(model)


def resumed_alone() -> Found:
    """Each process saves and loads its own state."""
    model, optimizer, go = ready("rows", "momentum", name="uneven")
    go(2)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    go(3)
    twin, resumed, again = ready("rows", "momentum", name="uneven")
    file.seek(0)
    kept, state = torch.load(file, weights_only=False)
    twin.load_state_dict(kept)
    resumed.load_state_dict(state)
    again(3)
    return {"straight": weights(model), "resumed": weights(twin)}


def after(way: str) -> dict[str, Tensor]:
    """Traced when it is cut already."""
    model, x, y = setting()
    share = WAYS[way](model)
    graph = ps.trace(model, x)
    assert "before the model is sharded" in refusal(lambda: graph.skeleton(rule="magnitude"))
    assert "before the model is sharded" in refusal(
        lambda: ps.rescale_(model, graph, torch.zeros(graph.num_units))
    )
    init_skeleton_(model, graph.skeleton())
    optimizer = MAKERS["gadam"](model, graph.skeleton())
    train(model, optimizer, x, y, share, 3)
    return weights(model)


def from_meta(way: str) -> dict[str, Tensor]:
    """Traced, and cut, before it has any numbers."""
    source, x, y = setting()
    with torch.device("meta"):
        model = MODELS["normed"]().double()
    skeleton = ps.trace(model, x).skeleton()
    share = WAYS[way](model)
    assert "without values" in refusal(lambda: init_skeleton_(model, skeleton))
    model.to_empty(device="cpu")
    set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
    init_skeleton_(model, skeleton)
    optimizer = MAKERS["gadam"](model, skeleton)
    train(model, optimizer, x, y, share, 3)
    return weights(model)


def fused(folder: Path) -> Found:
    """The same with steps by kernels, saved and loaded."""
    found: Found = {}
    for member in FUSED:
        if dist.get_world_size() == max(WORLDS):
            found |= save("columns", member, folder, fused=True)
        found |= load("columns", "rows", member, folder, fused=True)
    return found


def crossed() -> None:
    """One layer cut over all processes, another over pairs of them."""
    model, _, _ = setting()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("a",)))
    fully_shard(model[2], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("b", "c")))
    MAKERS["gsgd"](model, skeleton_of())


def save(
    way: str, member: str, folder: Path, dtype: torch.dtype = torch.float64, **more: Any
) -> Found:
    model, optimizer, go = ready(way, member, dtype, **more)
    go(2)
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=folder / f"{way} {member}")
    saved = flat(parts)
    go(3)
    return {f"saved {way} {member}": saved, f"straight {way} {member}": weights(model)}


def load(
    source: str,
    way: str,
    member: str,
    folder: Path,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Found:
    model, optimizer, go = ready(way, member, dtype, **more)
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(parts, checkpoint_id=folder / f"{source} {member}")
    set_state_dict(
        model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
    )
    loaded = flat(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)))
    go(3)
    return {f"loaded {source} {member}": loaded, f"resumed {source} {member}": weights(model)}


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except ps.PathspaceError as error:
        return str(error)
    return "none"


def refusals() -> Found:
    model, x, _ = setting()
    skeleton, found = skeleton_of(), {}
    rows(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found["path norm"] = refusal(
        lambda: PathSGD(model.named_parameters(), model=model, example=(x[:1],))
    )
    found["gauge"] = refusal(lambda: GaugeFixed(optimizer, skeleton.graph, model=model))
    for original in (True, False):
        model, x, _ = setting()
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=original, device_id=torch.device("cpu")
        )
        found[f"joined {original}"] = refusal(
            lambda wrapped=wrapped: MAKERS["gsgd"](wrapped, skeleton)
        )
        found[f"traced {original}"] = refusal(lambda wrapped=wrapped, x=x: ps.trace(wrapped, x))
    model, x, _ = setting()
    own = ps.trace(model, x).skeleton()
    found["some"] = refusal(
        lambda: ZeroRedundancyOptimizer(model.parameters(), GSGD, lr=0.1, skeleton=own)
    )
    return found


# --- what they have found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Found]]:
    def fill(place: Path) -> None:
        for world in WORLDS:
            several_processes(work, place, world)

    place = once(tmp_path_factory, "sharded", fill)
    return {
        world: [torch.load(place / f"{world}-{rank}.pt") for rank in range(world)]
        for world in WORLDS
    }


def close(found: object, wanted: object, **tolerance: float) -> None:
    assert isinstance(found, dict) and isinstance(wanted, dict)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, **(tolerance or {"rtol": 1e-11, "atol": 1e-13})
        )


@pytest.mark.parametrize("member", MAKERS)
@pytest.mark.parametrize("way", CUT)
def test_cut_models_take_the_steps_of_whole_ones(
    way: str, member: str, results: dict[int, list[Found]]
) -> None:
    wanted = trained("uncut", member)
    assert wanted["norm"] > 0.5
    for found in (one for every in results.values() for one in every):
        close(found[f"{way} {member}"], wanted)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("member", MAKERS)
def test_two_processes_take_the_steps_of_one(
    member: str, name: str, results: dict[int, list[Found]]
) -> None:
    wanted = stepped("uncut", name, member)
    for found in results[2]:
        # (Adam divides sums in another order by their own small squares)
        close(found[f"{name} {member}"], wanted, rtol=1e-9, atol=1e-9)
        if name == "uneven":
            close(found[f"copies {member}"], wanted, rtol=1e-9, atol=1e-9)


def test_shards_resume_bitwise_each_with_its_own_state(results: dict[int, list[Found]]) -> None:
    for found in results[2]:
        close(found["resumed"], found["straight"], rtol=0.0, atol=0.0)


def test_models_are_traced_after_they_were_cut_or_before_they_have_numbers(
    results: dict[int, list[Found]],
) -> None:
    model, _, go = ready("uncut", "gadam")
    go(3)
    for found in (one for every in results.values() for one in every):
        for key in ("after rows", "after both", "meta rows", "meta both"):
            close(found[key], weights(model))


@pytest.mark.parametrize("member", ["momentum", "gadam"])
@pytest.mark.parametrize("source", ["both", "rows"])
def test_four_processes_save_and_two_go_on(
    source: str, member: str, results: dict[int, list[Found]]
) -> None:
    key, four = f"{source} {member}", results[4][0]
    for found in results[4] + results[2]:
        loaded, saved = found[f"loaded {key}"], four[f"saved {key}"]
        # everything is carried to the last bit, what is kept in double precision of
        # weights in single precision too
        assert isinstance(loaded, dict) and isinstance(saved, dict)
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        close(
            found[f"resumed {key}"],
            four[f"straight {key}"],
            rtol=1e-11 if source == "both" else 1e-5,
            atol=1e-7,
        )
    if source == "rows":
        # where sums are made in the same order, so are the next steps
        close(results[4][0][f"resumed {key}"], four[f"straight {key}"], rtol=0.0, atol=0.0)


def test_fused_steps_on_shards_go_on_where_others_saved_them(
    results: dict[int, list[Found]],
) -> None:
    four, two = results[4], results[2]
    for member in FUSED:
        model, _, go = ready("uncut", member)
        go(5)
        close(four[0][f"straight columns {member}"], weights(model))
        saved = four[0][f"saved columns {member}"]
        for found in four + two:
            loaded = found[f"loaded columns {member}"]
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], saved[name]) for name in saved)
            close(found[f"resumed columns {member}"], weights(model))


def test_meshes_that_share_processes_but_no_dimension_are_refused(
    results: dict[int, list[Found]],
) -> None:
    for found in results[4]:
        assert "expected dimensions of one mesh; give all modules the same mesh" in str(
            found["meshes"]
        )


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("path norm", "use DistributedDataParallel instead"),
        ("gauge", "use DistributedDataParallel, or GSGD and GAdam, which take shards"),
        ("joined True", "as FullyShardedDataParallel hands them out"),
        ("joined False", "as FullyShardedDataParallel hands them out"),
        ("traced True", "pass the model that it was made of"),
        ("traced False", "pass the model that it was made of"),
        ("some", "as ZeroRedundancyOptimizer hands them out"),
    ],
)
def test_other_ways_are_refused_in_one_sentence(
    key: str, words: str, results: dict[int, list[Found]]
) -> None:
    for found in results[2]:
        assert words in str(found[key])
        assert str(found[key]).count(". ") == 0


def test_joined_weights_are_noticed_at_the_first_step() -> None:
    """What the ZeRO optimizers of DeepSpeed do: one long tensor takes the
    place of all parameters.
    """
    _, optimizer, _ = ready("uncut", "gsgd")
    joined = nn.Parameter(torch.zeros(10))
    joined.grad = torch.ones(10)
    optimizer.param_groups[0]["params"] = [joined]
    with pytest.raises(ps.UnsupportedError, match="ZeRO optimizers of DeepSpeed"):
        optimizer.step()

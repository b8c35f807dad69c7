"""The gauge on files against the gauge in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import pathspace as ps
from pathspace.cli.main import app
from pathspace.files import checkpoints, tensor_files


class Net(nn.Module):
    """Convolutions with running statistics, a norm that adds 1 to its weight, a
    shared tensor, an unused one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.deep, self.wide = nn.Conv2d(6, 8, 3, groups=2), nn.Linear(8, 8)
        self.scale, self.out = nn.Parameter(torch.zeros(8)), nn.Linear(8, 4)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.wide.weight
        self.spare = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(self.norm(self.conv(x)).relu()).relu().mean((2, 3))
        x = self.again(self.wide(x).relu()).relu()
        return self.out(nn.functional.rms_norm(x, (8,), eps=1e-9) * (1 + self.scale))


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = Net().eval()
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if tensor.is_floating_point():
            (
                nn.init.uniform_(tensor, 0.5, 2.0)
                if "var" in name
                else nn.init.normal_(tensor, std=0.4)
            )
    return net


def inputs() -> Tensor:
    return torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def stored(net: nn.Module) -> dict[str, Tensor]:
    state = net.state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if name != "again.weight"}


def sharded(net: nn.Module, folder: Path, shards: int = 3, **prefix: str) -> Path:
    folder.mkdir()
    tensors = {prefix.get("prefix", "") + name: tensor for name, tensor in stored(net).items()}
    names = sorted(tensors)
    files = {
        name: f"model-{number % shards + 1:05}-of-{shards:05}.safetensors"
        for number, name in enumerate(names)
    }
    for file in set(files.values()):
        save_file(
            {name: tensors[name] for name in names if files[name] == file},
            folder / file,
            {"format": "pt"},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    (folder / "config.json").write_text("{}")
    return folder


def loaded(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor comes in several pieces."""
    monkeypatch.setattr(tensor_files, "PIECE", 64)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_files_are_rescaled_as_the_model_is(tmp_path: Path, prefix: str) -> None:
    net, x = model(), inputs()
    with ps.without_weights():
        bare = Net().eval()
    graph = ps.trace(bare, x)
    phi = torch.randn(graph.num_units).double()
    source = sharded(net, tmp_path / "source", prefix=prefix)
    ps.rescale_files(graph, phi, source, tmp_path / "new")
    expected = stored(ps.rescale_(model(), graph, phi))
    found = loaded(tmp_path / "new")
    assert found.keys() == {prefix + name for name in expected}
    assert all(torch.equal(found[prefix + name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "new" / "config.json").exists()
    index = "model.safetensors.index.json"
    assert (tmp_path / "new" / index).read_text() == (source / index).read_text()


@pytest.mark.slow
def test_files_are_balanced_as_the_model_is(tmp_path: Path) -> None:
    net, x = model().double(), inputs().double()
    graph = ps.trace(net, x)
    save_file(stored(net), tmp_path / "model.safetensors")
    files = (tmp_path / "model.safetensors", tmp_path / "new.safetensors")
    found = ps.balance_files(graph, *files, tolerance=1e-6, exact=False)
    exact = ps.balancing(net, graph)
    assert found.imbalance <= 1e-6
    assert found.before == pytest.approx(exact.before, rel=1e-12) and found.after == pytest.approx(
        exact.after, rel=1e-9
    )
    torch.testing.assert_close(found.phi, exact.phi, rtol=0, atol=1e-4)
    assert {why: list(units) for why, units in found.left_alone.items()} == {
        why: list(units) for why, units in exact.left_alone.items()
    }
    before = net(x)
    net.load_state_dict(load_file(tmp_path / "new.safetensors"), strict=False)
    torch.testing.assert_close(net(x), before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_of_few_digits_lose_none(tmp_path: Path, dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).to(
        dtype
    )
    nn.init.normal_(net[0].weight, std=20.0)
    x = torch.randn(7, 4, dtype=dtype)
    graph, before = ps.trace(net, x), net(x)
    save_file(net.state_dict(), tmp_path / "a.safetensors")
    found = ps.balance_files(graph, tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    net.load_state_dict(load_file(tmp_path / "b.safetensors"))
    assert torch.equal(net(x), before)
    assert found.after < found.before and 0 < found.imbalance < 0.9
    assert all(tensor.dtype == dtype for tensor in net.state_dict().values())


def test_a_run_that_was_broken_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = model(), inputs()
    graph = ps.trace(net, x)
    phi = torch.randn(graph.num_units)
    source, new = sharded(net, tmp_path / "source"), tmp_path / "new"
    written: list[str] = []
    write = checkpoints.write

    def failing(path: Any, *args: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(str(path))
        write(path, *args)

    monkeypatch.setattr(checkpoints, "write", failing)
    with pytest.raises(KeyboardInterrupt):
        ps.rescale_files(graph, phi, source, new)
    whole = sorted(new.glob("model-*"))
    assert len(whole) == 2 and not (new / "model.safetensors.index.json").exists()
    assert not list(new.glob(".pathspace-*.safetensors"))
    stamps = [file.stat().st_mtime_ns for file in whole]
    monkeypatch.setattr(checkpoints, "write", write)
    ps.rescale_files(graph, phi, source, new)
    assert [file.stat().st_mtime_ns for file in whole] == stamps
    expected = stored(ps.rescale_(net, graph, phi.double()))
    assert all(torch.equal(expected[name], tensor) for name, tensor in loaded(new).items())
    assert not list(new.glob(".pathspace*"))
    # another job writes every file again
    ps.rescale_files(graph, 0 * phi, source, new)
    assert all(torch.equal(tensor, loaded(source)[name]) for name, tensor in loaded(new).items())


def test_bad_files_are_one_sentence(tmp_path: Path) -> None:
    net, x = model(), inputs()
    graph = ps.trace(net, x)
    phi, file = torch.zeros(graph.num_units), tmp_path / "model.safetensors"
    state = stored(net)
    save_file(state, file)
    cases: list[tuple[Any, Any, Any, str]] = [
        (phi[1:], file, "b.safetensors", "one log-scale per unit"),
        (phi, tmp_path / "none", "b.safetensors", "cannot be read"),
        (phi, file, file, "is the source"),
        (phi, file, tmp_path / "no" / "b.safetensors", "does not exist"),
    ]
    for values, source, destination, words in cases:
        with pytest.raises(ps.InputError, match=words):
            ps.rescale_files(graph, values, source, tmp_path / destination)
    save_file(
        {name: tensor for name, tensor in state.items() if name != "deep.weight"},
        tmp_path / "less.safetensors",
    )
    with pytest.raises(ps.InputError, match=r"no tensor 'deep.weight'"):
        ps.rescale_files(graph, phi, tmp_path / "less.safetensors", tmp_path / "b.safetensors")
    save_file(state | {"deep.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ps.InputError, match=r"'deep.weight' of shape \(2, 2\)"):
        ps.rescale_files(graph, phi, tmp_path / "other.safetensors", tmp_path / "b.safetensors")
    save_file(
        state | {"deep.weight": state["deep.weight"] * torch.nan}, tmp_path / "nan.safetensors"
    )
    with pytest.raises(ps.InputError, match=r"'deep.weight' that are NaN"):
        ps.balance_files(graph, tmp_path / "nan.safetensors", tmp_path / "b.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ps.InputError, match="holds 0 files"):
        ps.rescale_files(graph, phi, tmp_path / "folder", tmp_path / "b")
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.slow
def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    net = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, num_attention_heads=2)
    ).eval()
    source, new, tokens = tmp_path / "source", tmp_path / "new", torch.arange(6).reshape(2, 3)
    net.save_pretrained(source, max_shard_size="2KB")
    result = CliRunner().invoke(
        app, ["balance", str(source), str(new), "--json", str(tmp_path / "found.json")]
    )
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "found.json").read_text())["imbalance"] <= 1e-12
    assert len(list(new.glob("*.safetensors"))) == len(list(source.glob("*.safetensors"))) > 1
    after = transformers.LlamaForCausalLM.from_pretrained(new).eval()
    assert not torch.equal(
        after.model.layers[0].mlp.up_proj.weight, net.model.layers[0].mlp.up_proj.weight
    )
    torch.testing.assert_close(after(tokens).logits, net(tokens).logits, rtol=1e-4, atol=1e-5)

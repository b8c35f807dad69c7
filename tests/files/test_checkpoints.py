"""Checkpoint files: what is overwritten, what is accepted, what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import pathspace as ps


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    graph = ps.trace(model, torch.randn(4, 3))
    return model, graph, torch.full((graph.num_units,), 0.7)


def unchanged(path, state):
    return all(torch.equal(tensor, state[name]) for name, tensor in load_file(path).items())


def sharded(folder, state, files=None):
    """A folder of two shards with an index; links to the files given, in their place."""
    folder.mkdir(parents=True, exist_ok=True)
    names, where = list(state), {}
    for number, keys in enumerate((names[:2], names[2:]), 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        target = folder / name if files is None else files / f"blob{number}"
        target.parent.mkdir(exist_ok=True)
        save_file({key: state[key] for key in keys}, target)
        if files is not None:
            os.symlink(target, folder / name)
        where |= dict.fromkeys(keys, name)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_destination_of_links_does_not_overwrite_the_source(tmp_path):
    model, graph, phi = small()
    state, blobs = model.state_dict(), tmp_path / "blobs"
    sharded(tmp_path / "snapshot", state, blobs)
    shutil.copytree(tmp_path / "snapshot", tmp_path / "copy", symlinks=True)
    with contextlib.suppress(ps.PathspaceError):
        ps.rescale_files(graph, phi, tmp_path / "snapshot", tmp_path / "copy")
    assert all(unchanged(blobs / f"blob{number}", state) for number in (1, 2))


def test_a_link_among_the_destinations_shards_is_replaced_and_not_followed(tmp_path):
    model, graph, phi = small()
    state, outside = model.state_dict(), tmp_path / "outside.safetensors"
    sharded(tmp_path / "source", state)
    save_file(state, outside)
    (tmp_path / "to").mkdir()
    os.symlink(outside, tmp_path / "to" / "model-00001-of-00002.safetensors")
    with contextlib.suppress(ps.PathspaceError):
        ps.rescale_files(graph, phi, tmp_path / "source", tmp_path / "to")
    assert unchanged(outside, state)


def language_model(name, config, **settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = getattr(transformers, config)(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False, **settings,
    )  # fmt: skip
    return getattr(transformers, name)(made).eval()


def roundtrip(model, tmp_path):
    """Outputs of a model, and of the checkpoint that rescale_files makes of its own files."""
    ids = torch.arange(10).reshape(2, 5)
    graph = ps.trace(model, kwargs={"input_ids": ids})
    model.save_pretrained(tmp_path / "a")
    phi = 0.5 * torch.randn(graph.num_units, generator=torch.Generator().manual_seed(0))
    ps.rescale_files(graph, phi, tmp_path / "a", tmp_path / "b", exact=True)
    again = type(model).from_pretrained(tmp_path / "b").eval()
    with torch.no_grad():
        return model(input_ids=ids).logits, again(input_ids=ids).logits


def test_the_checkpoint_of_a_mixtral_is_rescaled(tmp_path):
    model = language_model(
        "MixtralForCausalLM", "MixtralConfig", intermediate_size=24, num_local_experts=2
    )
    before, after = roundtrip(model, tmp_path)
    assert float((before - after).abs().max()) < 1e-4 * float(before.abs().max())


def written(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def parts(state):
    """Header and data of a safetensors file."""
    header, data = {}, b""
    for name, tensor in state.items():
        piece = tensor.numpy().tobytes()
        span = [len(data), len(data) + len(piece)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
        data += piece
    return header, data


BROKEN = {
    "negative": {"data_offsets": [-60, 0]},
    "overlapping": {"data_offsets": [20, 80]},
    "other size": {"dtype": "F64"},
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_file_that_safetensors_refuses_is_refused(tmp_path, fault):
    model, graph, phi = small()
    header, data = parts(model.state_dict())
    header["0.weight"] |= BROKEN[fault]
    path = written(tmp_path / "a.safetensors", header, data)
    with pytest.raises(SafetensorError):
        load_file(path)
    with pytest.raises(ps.PathspaceError):
        ps.rescale_files(graph, phi, path, tmp_path / "b.safetensors")


@pytest.mark.parametrize("place", ["../outside.safetensors", 5, None])
def test_an_index_names_files_of_its_own_folder_only(tmp_path, place):
    model, graph, phi = small()
    state = model.state_dict()
    save_file(state, tmp_path / "outside.safetensors")
    sharded(tmp_path / "source", state)
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(state, place)})
    (tmp_path / "source" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ps.PathspaceError):
        ps.rescale_files(graph, phi, tmp_path / "source", tmp_path / "to")


KILLED = """
import os, sys, torch, pathspace as ps
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
graph = ps.trace(model, torch.randn(4, 3))
if sys.argv[3] == "die":
    os.replace = lambda *names: os._exit(9)
ps.rescale_files(graph, torch.full((graph.num_units,), 0.7), sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
def test_a_killed_run_leaves_no_files_once_the_folder_is_complete(tmp_path):
    model, _, _ = small()
    sharded(tmp_path / "source", model.state_dict())
    for how in ("die", "die", "live"):
        where = [str(tmp_path / "source"), str(tmp_path / "to"), how]
        run = subprocess.run([sys.executable, "-c", KILLED, *where], capture_output=True)
        assert run.returncode == (9 if how == "die" else 0), run.stderr
    assert sorted(os.listdir(tmp_path / "to")) == sorted(os.listdir(tmp_path / "source"))

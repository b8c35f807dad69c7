"""Files of tensors: what is written here is what the library of the format
reads, and the other way round.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import pathspace as ps
from pathspace.files import tensor_files
from pathspace.files.tensor_files import TYPES, StoredTensor, TensorFile, as_bytes, write

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(deadline=None, max_examples=30)
@given(
    made=st.dictionaries(
        st.text("ab.é", max_size=4), st.tuples(st.sampled_from(list(TYPES.values())), shapes)
    )
)
def test_there_and_back(
    made: dict[str, tuple[torch.dtype, tuple[int, ...]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tensors = {name: (100 * torch.randn(shape)).to(dtype) for name, (dtype, shape) in made.items()}
    entries = {
        name: StoredTensor.of(tensor.dtype, tensor.shape) for name, tensor in tensors.items()
    }
    write(folder / "ours", entries, lambda name: [as_bytes(tensors[name])], {"format": "pt"})
    theirs = load_file(folder / "ours")
    assert theirs.keys() == tensors.keys()
    assert all(
        torch.equal(theirs[name].nan_to_num(), tensor.nan_to_num())
        for name, tensor in tensors.items()
    )
    save_file(tensors, folder / "theirs", metadata={"a": "b"})
    found = TensorFile.open(folder / "theirs")
    assert found.metadata == {"a": "b"} and found.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for place, part in found.pieces(name):
            own = tensor[place] if tensor.dim() else tensor
            assert part.dtype == tensor.dtype
            assert torch.equal(part.nan_to_num(), own.nan_to_num())
        assert b"".join(found.raw(name)) == bytes(as_bytes(tensor))


def test_pieces_are_small_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "PIECE", 100)
    tensor = torch.randn(13, 7)
    save_file({"w": tensor}, tmp_path / "w.safetensors")
    parts = list(TensorFile.open(tmp_path / "w.safetensors").pieces("w"))
    assert len(parts) == 5 and all(part.numel() * 4 <= 100 for _, part in parts)
    assert all(torch.equal(tensor[place], part) for place, part in parts)


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x02" + bytes(7) + b"[]", b"\xff" * 20])
def test_other_files_are_refused_in_a_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(ps.InputError, match="safetensors file"):
        TensorFile.open(path)
    save_file({"w": torch.randn(8)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ps.InputError, match="safetensors file"):
        TensorFile.open(path)
    with pytest.raises(ps.InputError, match="cannot be read"):
        TensorFile.open(tmp_path / "none")

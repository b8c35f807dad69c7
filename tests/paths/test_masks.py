"""Masks survive the way to a file and back, and a failed write harms nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import pathspace as ps


def skeleton() -> ps.Skeleton:
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2)
    )
    return ps.trace(model, torch.randn(1, 3, 6, 6)).skeleton("random", seed=3)


def test_round_trip(tmp_path: Path) -> None:
    chosen, path = skeleton(), tmp_path / "masks.safetensors"
    ps.save_masks(chosen, path)
    chosen.save(other := tmp_path / "other.safetensors")
    assert other.read_bytes() == path.read_bytes()
    masks = ps.load_masks(path)
    assert len(repr(masks)) < 1000
    for name, mask in chosen.masks.items():
        assert torch.equal(masks["incoming"][name], chosen.incoming[name])
        assert torch.equal(masks["outgoing"][name], chosen.outgoing[name])
        assert torch.equal(masks.masks[name], mask)
        assert mask.shape == chosen.graph.parameters[name].shape
    assert sum(int(mask.sum()) for mask in masks["incoming"].values()) == chosen.graph.num_units


def test_the_header_describes_itself(tmp_path: Path) -> None:
    path = tmp_path / "masks.safetensors"
    ps.save_masks(skeleton(), path)
    with safe_open(str(path), framework="pt") as file:
        header = file.metadata()
    assert {"format", "rule", "seed", "weights", "units", "dimension", "meaning"} <= set(header)
    assert (header["rule"], header["seed"], header["units"]) == ("random", "3", "5")


def test_failures(tmp_path: Path) -> None:
    path = tmp_path / "masks.safetensors"
    with pytest.raises(ps.InputError, match="no file"):
        ps.load_masks(path)
    path.write_bytes(b"not a safetensors file")
    with pytest.raises(ps.InputError, match="cannot be read"):
        ps.load_masks(path)
    with pytest.raises(ps.InputError, match="Cannot write"):
        ps.save_masks(skeleton(), path / "below")
    assert path.read_bytes() == b"not a safetensors file"

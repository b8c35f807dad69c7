"""Pictures: what is in them, and that they are written whole."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from cases import CASES, mlp

import pathspace as ps
from pathspace.paths.draw import BLUE, RED, _blocks, place_nodes, scalar_graph


def skeleton_of(name: str) -> ps.Skeleton:
    model, args = CASES[name]()
    return ps.trace(model, *args).skeleton()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES)[::4])
@pytest.mark.parametrize("level", ["block", "auto"])
def test_every_model_can_be_drawn(name: str, level: str) -> None:
    figure = ps.draw(skeleton_of(name), level=level)
    assert figure.axes[0].get_title(loc="left").split(",")[0].endswith("weights")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_pictures_are_files(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"graph{suffix}"
    skeleton_of("mlp_2x3x5x2").draw(file)
    head = file.read_bytes()
    assert head.startswith({".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix])
    if suffix == ".svg":
        assert ElementTree.fromstring(head).tag.endswith("svg")
        assert RED.encode() in head and BLUE.encode() in head
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name]
    ps.draw(skeleton_of("mlp_2x3x5x2"), file)
    assert file.read_bytes() == head


def test_every_weight_is_an_arrow_and_the_skeleton_is_red() -> None:
    skeleton = skeleton_of("mlp_2x3x5x2")
    path = skeleton.basis()[4]
    graph = scalar_graph(skeleton, path)
    assert len(graph.edges) == 41
    assert sum(data["red"] for *_, data in graph.edges(data=True)) == sum(
        int(m.sum()) for m in skeleton.masks.values()
    )
    assert sum(data["blue"] for *_, data in graph.edges(data=True)) == len(path.numbers)
    places = place_nodes(graph)
    assert len({tuple(place) for place in places.values()}) == len(places)
    assert all(places[u][0] < places[v][0] for u, v in graph.edges() if u != v)


def test_blocks_are_groups_of_units_and_tensors() -> None:
    graph = _blocks(skeleton_of("mlp_2x3x5x2"))
    units = sorted(data["units"] for _, data in graph.nodes(data=True) if "units" in data)
    assert units == [3, 5]
    texts = [data["text"] for *_, data in graph.edges(data=True)]
    assert sorted(texts) == ["0.weight\n3x2", "2.weight\n5x3", "4.weight\n2x5"]
    assert sum(data.get("vectors", 0) for _, data in graph.nodes(data=True)) == 3


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    skeleton = skeleton_of("mlp_3x4x2")
    with pytest.raises(ps.InputError, match="level"):
        ps.draw(skeleton, level="atom")
    with pytest.raises(ps.InputError, match=r"\.svg"):
        ps.draw(skeleton, tmp_path / "graph.gif")
    # (only commands write to standard output)
    with pytest.raises(ps.InputError, match="found the file '-'"):
        ps.draw(skeleton, "-")
    with pytest.raises(ps.InputError, match="22 basis paths"):
        ps.draw(skeleton, path=22)
    with pytest.raises(ps.UnsupportedError, match="level='block'"):
        ps.draw(ps.trace(mlp(40, 40, 2), torch.randn(1, 40)).skeleton(), level="scalar")
    assert not list(tmp_path.iterdir())

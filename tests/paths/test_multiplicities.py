"""How often a path passes a weight is counted without overflow: deep reuse, squares
of squares, their products.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from rescaled import change
from torch import Tensor, nn

import pathspace as ps
from pathspace.inference.records import distinct_columns
from pathspace.inference.relations import Relations
from pathspace.inference.values import NEUTRAL
from pathspace.paths.counting_vectors import whole_product


class Reused(nn.Module):
    """One matrix used `depth` times in a row."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.stem, self.shared, self.head = (
            nn.Linear(*s, bias=False) for s in ((2, 2), (2, 2), (2, 1))
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.abs_()
            self.shared.weight.div_(self.shared.weight.sum(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.depth):
            x = torch.relu(self.shared(x))
        return self.head(x)


class Squares(nn.Module):
    """Layers with squares of squares behind each: `2^times`-th powers."""

    def __init__(self, layers: int, times: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(layers))
        self.head, self.times = nn.Linear(2, 1, bias=False), times

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            for _ in range(self.times):
                x = x * x
        return self.head(x)


def rank(matrix: np.ndarray) -> int:
    return int(np.linalg.matrix_rank(matrix.astype(np.float64)))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [128, 150])
def test_a_matrix_used_often_in_depth_does_not_refute_a_theorem(depth: int) -> None:
    model, x = Reused(depth), torch.rand(3, 2)
    certificate = ps.verify(model, x)
    assert certificate.holds and certificate.theorem1["holds"], certificate
    assert (certificate.units, certificate.rank) == (3, 7)
    basis = ps.trace(model, x).skeleton().basis()
    matrix = basis.counting_matrix()
    assert matrix.dtype == np.int64 and abs(matrix).max() == depth
    # the sparse matrix says what the walks along the trees say, in Python's own integers
    assert np.array_equal(matrix.toarray(), np.stack([path.counting_vector for path in basis]))
    assert rank(matrix.toarray()) == 7


@pytest.mark.parametrize("times", [32, 63, 64])
def test_powers_beyond_what_whole_numbers_hold_are_fixed_and_said(times: int) -> None:
    graph = ps.trace(Squares(1, times), torch.ones(3, 2))
    assert graph.num_units == 0
    assert "2^31" in graph.pinned[-1].reason


def test_counts_beyond_64_bits_are_exact_in_paths_and_refused_in_matrices() -> None:
    model, x = Squares(3, 30), torch.ones(3, 2)
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.copy_(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    graph = ps.trace(model, x)
    basis = graph.skeleton().basis()
    largest = max(abs(count) for path in basis for count in path.counts.tolist())
    assert largest == 2**90
    assert max(abs(path.counting_vector).max() for path in basis) == 2**90
    with pytest.raises(ps.UnsupportedError, match="2\\^63"):
        basis.counting_matrix()
    certificate = ps.verify(model, x)
    assert certificate.theorem1["holds"] and certificate.theorem3["holds"], certificate
    assert certificate.method == "certificate"


def test_a_product_of_whole_numbers_is_exact_or_refused() -> None:
    generator = np.random.default_rng(0)
    for size in (2**10, 2**30, 2**31):
        left, right = (generator.integers(-size, size, shape) for shape in ((3, 4), (4, 2)))
        exact = left.astype(object) @ right.astype(object)
        if (
            max(
                abs(int(entry))
                for entry in (abs(left).astype(object) @ abs(right).astype(object)).ravel()
            )
            < 2**63
        ):
            assert (whole_product(left, right) == exact).all()
        else:
            with pytest.raises(ps.UnsupportedError):
                whole_product(left, right)
    assert whole_product(np.zeros((0, 2), np.int64), np.zeros((2, 3), np.int64)).shape == (0, 3)


@pytest.mark.parametrize("size", [0, 1, 40])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("apart", [1, 2**32])
def test_distinct_columns_are_those_of_a_set(rows: int, size: int, apart: int) -> None:
    """Also for ids of more than 32 bits, of which two need not fit into one number."""
    columns = torch.randint(-2, 3, (rows, size)) * apart + torch.randint(0, 2, (rows, size))
    columns[torch.rand(rows, size) < 0.1] = NEUTRAL
    distinct, which = distinct_columns(columns)
    listed = [tuple(column) for column in columns.T.tolist()]
    wanted = {column for column in listed if NEUTRAL not in column}
    assert sorted(map(tuple, distinct.T.tolist())) == sorted(wanted)
    for column, place in zip(listed, which.tolist(), strict=True):
        assert (
            place == len(wanted)
            if NEUTRAL in column
            else tuple(distinct[:, place].tolist()) == column
        )


class Attending(nn.Module):
    """Attention without a normalisation, whose keys are made of its values."""

    def __init__(self, heads: int, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.function = heads, function
        self.q, self.o = nn.Linear(3, 4 * heads), nn.Linear(4 * heads, 2)
        self.w = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            self.function(w(v), v)
            for w, v in zip(self.w, self.q(x).chunk(self.heads, -1), strict=True)
        ]
        return self.o(torch.cat(parts, -1))


ATTENDING: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "weighted by one product": (lambda u, v: (u * v).sum(-1, keepdim=True) * u, 5),
    "all products": (lambda u, v: (u @ v.mT) @ u, 5),
    "divided by one product": (lambda u, v: u / (u * v).sum(-1, keepdim=True), 5),
    "weighted by a square": (lambda u, v: (u * v).sum(-1, keepdim=True).square() * v, 5),
    "quotients": (lambda u, v: (u / v).sum(-1, keepdim=True) * u, 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", ATTENDING)
def test_units_that_no_weight_has_alone_are_exchanged_for_others(name: str, heads: int) -> None:
    function, each = ATTENDING[name]
    model, x = Attending(heads, function).double(), torch.randn(2, 5, 3).double()
    certificate = ps.verify(model, x, upper_bound=True)
    assert certificate.holds
    assert certificate.units == certificate.units_at_most == each * heads
    graph = ps.trace(model, x)
    assert change(model, graph, x) < 1e-8
    assert len(graph.skeleton().basis()) == graph.num_weights - graph.num_units


def test_multiples_that_grow_from_relation_to_relation_do_not_wrap_around() -> None:
    """Fibonacci numbers of scales: each is the sum of the two before."""
    for count in (20, 120):
        scales = Relations()
        ids = scales.fresh((count,))
        scales.relate((1, ids[2:]), (-1, ids[1:-1]), (-1, ids[:-2]))
        solution = scales.resolve()
        largest = int(abs(solution.forms).max()) if solution.forms.nnz else 0
        assert largest <= 2**31
        if count == 20:
            assert solution.units == 2 and largest > 30
        else:
            assert scales.too_high

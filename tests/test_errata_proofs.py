"""What the list of statements says of the path-space paper's masks for outputs, of its proof of
theorem 2 and of its first table.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import mlp
from scipy.stats import ttest_ind_from_stats
from torch import Tensor

import pathspace as ps
from pathspace.training.experiments.reproduce.recipes import table_cells


@pytest.mark.parametrize(("outputs", "hidden"), [(10, 100), (3, 5), (2, 7)])
def test_the_second_loop_of_algorithm_1_exchanges_its_indices(outputs: int, hidden: int) -> None:
    """``M^o[j][j % n_out]`` with ``j`` over hidden units: ``W^o`` has a row for each output."""
    mask = np.zeros((outputs, hidden), int)
    # (both counts from zero, the other erratum of these loops)
    with pytest.raises(IndexError):
        for j in range(hidden):
            mask[j][j % outputs] = 1
    right = np.zeros((outputs, hidden), int)
    for j in range(hidden):
        right[j % outputs][j] = 1
    assert (right.sum(0) == 1).all()
    graph = ps.trace(mlp(4, hidden, outputs, bias=False), torch.randn(2, 4))
    ours = list(graph.skeleton(rule="modulo").outgoing.values())[-1]
    assert torch.equal(ours.long(), torch.from_numpy(right))


def test_square_read_outs_hide_the_exchange() -> None:
    """With as many outputs as hidden units, and no more, the printed loop gives the same mask."""
    size = 4
    printed, right = np.zeros((2, size, size), int)
    for j in range(size):
        printed[j][j % size] = right[j % size][j] = 1
    assert (printed == right).all()


def second_states(printed: bool, leave: Tensor, enter: Tensor, stay: Tensor, x: Tensor) -> Tensor:
    """The states at step 2 by the proof, from path values and the signs of the leaving weights:
    ``F(1)``, the value of a unit times its leaving weight, is a sum of path values.
    """
    first = leave * (x[0] @ enter.T)
    # in the sum over j' for unit j, the printed indicator has the sign of the weight of j
    signs = leave.sign()[:, None] if printed else leave.sign()[None]
    active = (signs * first[None] > 0).double()
    paths = leave[:, None] * stay / leave[None]
    return (leave * (x[1] @ enter.T) + (paths * active * first[None]).sum(1)) / leave


@pytest.mark.parametrize("signs", [(1, 1, 1), (1, -1, 1), (-1, -1, -1)])
def test_the_fourth_equality_of_proof_c_2_needs_the_sign_of_the_unit_itself(
    signs: tuple[int, ...],
) -> None:
    generator = torch.Generator().manual_seed(3)
    enter, stay = (torch.randn(3, n, generator=generator).double() for n in (2, 3))
    leave = (torch.rand(3, generator=generator).double() + 0.5) * torch.tensor(signs)
    wrong = 0
    for _ in range(50):
        x = torch.randn(2, 2, generator=generator).double()
        exact = x[1] @ enter.T + torch.relu(x[0] @ enter.T) @ stay.T
        assert torch.allclose(second_states(False, leave, enter, stay, x), exact)
        wrong += not torch.allclose(second_states(True, leave, enter, stay, x), exact)
    # where all leaving weights have one sign the slip shows nothing
    assert (wrong > 25) == (len(set(signs)) > 1)


def test_table_1_has_differences_that_are_not_significant() -> None:
    """Three seeds for each cell; the printed ``±`` read as a standard deviation, Welch's test."""
    cells = {
        key: [float(number) for number in cell.printed.replace("*", "").split("±")]
        for key, cell in table_cells("path-space-table-1").items()
    }
    rows = dict.fromkeys(row for row, _ in cells)
    found = {
        (row, other): ttest_ind_from_stats(
            *cells[row, "G-SGD"], 3, *cells[row, other], 3, equal_var=False
        ).pvalue
        for row in rows
        for other in ("SGD", "Path-SGD")
    }
    assert len(found) == 8 and all(
        cells[row, "G-SGD"][0] < cells[row, other][0] for row, other in found
    )
    significant = {key for key, p in found.items() if p < 0.05}
    assert len(significant) == 3
    assert found["permuted sMNIST-98", "Path-SGD"] > 0.2

"""Parts of a reduction graph: where the ends of scalars stand in the tables of a block."""

from __future__ import annotations

import math

import pytest
import torch

from pathspace.graph.parts import WeightBlock


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1, 2, 3), (2, 2, 1), (1, 1, 1), (2, 2, 3)])
def test_a_table_is_read_at_positions_of_the_shape_to_which_it_broadcasts(
    sizes: tuple[int, ...],
) -> None:
    table, shape = torch.arange(math.prod(sizes)).view(sizes), (2, 2, 3)
    tails, _ = WeightBlock("w", shape, table, table).ends_at(torch.arange(12).numpy())
    assert tails.tolist() == table.expand(shape).reshape(-1).tolist()

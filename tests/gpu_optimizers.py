"""G-SGD and its relatives on a GPU: the steps of a processor, in a captured graph
too. Run by ``make gpu``.
"""

from __future__ import annotations

import copy

import pytest
import torch
from training_pairs import Problem, largest_difference

import pathspace as ps
from pathspace.training import GSGD, init_skeleton_
from tests.training.test_optim_device import MEMBERS, MODELS

DEVICE = "cuda"


class Run:
    """A copy of a case's model with an optimizer, inputs and target in one place."""

    def __init__(self, case: Problem, member: str, place: str) -> None:
        self.model = copy.deepcopy(case.model).to(place)
        self.optimizer = MEMBERS[member](self.model, case.skeleton(case.model))
        for group in self.optimizer.param_groups:
            # a copy from the processor cannot be captured
            group["lr"] = (
                group["lr"].to(place) if isinstance(group["lr"], torch.Tensor) else group["lr"]
            )
        self.args, self.target = tuple(a.to(place) for a in case.args), case.target.to(place)

    def step(self) -> None:
        self.optimizer.zero_grad()
        (self.model(*self.args) - self.target).square().mean().backward()
        self.optimizer.step()


@pytest.mark.parametrize(
    "name", ["rnn_op_2_layers", "residual_cnn", "transformer_block", "gated_product"]
)
@pytest.mark.parametrize("member", MEMBERS)
def test_steps_are_those_of_a_processor(member: str, name: str) -> None:
    case = Problem(name, unit=True)
    here, there = (Run(case, member, place) for place in ("cpu", DEVICE))
    for _ in range(5):
        here.step()
        there.step()
    # (a step of Adam is the sign of a gradient at first, which rounding may decide)
    limit = 1e-8 if name == "transformer_block" else 1e-11
    assert largest_difference(here.model, there.model.cpu()) < limit


@pytest.mark.parametrize("member", MEMBERS)
def test_a_captured_graph_takes_the_same_steps(member: str) -> None:
    case = Problem("residual_cnn", unit=True)
    here, there = (Run(case, member, place) for place in ("cpu", DEVICE))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            there.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.step()
    for _ in range(4):
        graph.replay()
    for _ in range(7):
        here.step()
    assert largest_difference(here.model, there.model.cpu()) < 1e-11


@pytest.mark.parametrize("name", MODELS)
def test_a_step_needs_little_memory(name: str) -> None:
    """What stays beside weights and gradients, and the peak of a step, as
    the allocator counts them.
    """
    model, x = MODELS[name]()
    skeleton = ps.trace(model, x).skeleton()
    init_skeleton_(model, skeleton)
    model.to(DEVICE)(x.to(DEVICE)).sum().backward()
    before = torch.cuda.memory_allocated()
    optimizer = GSGD(model.named_parameters(), lr=0.0, skeleton=skeleton)
    optimizer.step()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    # the allocator rounds every vector up to 512 bytes
    few = 512 * 12 * len(list(model.parameters()))
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    assert torch.cuda.memory_allocated() - before < 0.06 * weights + few
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    # (gradients of small tensors by path values, and one tensor at a time)
    assert torch.cuda.max_memory_allocated() - before < weights + few + 2 * largest

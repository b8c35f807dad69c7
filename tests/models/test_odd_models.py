"""Odd models, wrappers and inputs: a sound answer or one sentence, and never a side effect."""

from __future__ import annotations

import copy
import math
import random
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import odd_models
import odder_models  # noqa: F401 (registers its models)
import pytest
import torch
from odd_models import ODD, Named, Net, Odd
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import pathspace as ps
from pathspace.models.copies import safe_deepcopy
from pathspace.models.inputs import arranged
from pathspace.models.nested import leaves, mapped

INTERNAL = re.compile(
    r"GuardOnDataDependent|aten::|aten\.|unhinted|FakeTensor|SymInt|Proxy|pytree|functorch|dynamo|torch\._|Traceback"
    r"|DataDependentOutput|__torch__|zuf\d|\bu0\b"
)
# (a compiler runs)
SLOW = {
    "compiled",
    "compiled_inside",
    "prepared_for_qat",
    "condition_of_torch",
    "functional_call_inside",
}
ENTRIES = [
    pytest.param(entry, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name, entry in ODD.items()
]
pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """Some models change them when they run by themselves."""
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    odd_models.LOG.clear()
    odd_models.TABLE.clear()
    # what others compiled decides how torch.cond runs without a compiler
    torch.compiler.reset()


def make(entry: Odd) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    model, *args = entry.build()
    kwargs = dict(args.pop()) if args and isinstance(args[-1], Named) else {}
    return model, tuple(args), kwargs


def world(model: Any, inputs: Any) -> dict[str, Any]:
    """Everything that a trace has to leave alone, by identity or by value."""
    state = {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[union-attr]
    }
    if not isinstance(model, nn.Module) or type(model).__hash__ is None:
        return state
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for key, value in vars(module).items():
            if key in ("_code", "_lineno_map", "_prologue_start"):
                # what torch.fx writes out from a graph, each time it is asked
                continue
            contents = value.items() if isinstance(value, Mapping) else ()
            state[f"{path}.{key}"] = (
                (value if isinstance(value, bool | int) else id(value)),
                tuple((each, id(entry)) for each, entry in contents),
                len(value) if isinstance(value, list) else None,
            )
    return state


def numbers(model: Any, inputs: Any) -> list[Tensor]:
    tensors = [torch.get_rng_state()]
    held = (
        [*model.parameters(), *model.buffers()]
        if isinstance(model, nn.Module) and type(model).__hash__
        else []
    )
    for tensor in [*held, *leaves(inputs)]:
        lazy = isinstance(tensor, nn.parameter.UninitializedTensorMixin)
        if not (lazy or tensor.is_meta or "Fake" in type(tensor).__name__):
            tensors.append(tensor.detach().to_dense().clone())
    return tensors


def flat(outputs: Any) -> Tensor:
    found = [
        leaf.detach().as_subclass(Tensor).double().reshape(-1)
        for leaf in leaves(outputs)
        if isinstance(leaf, Tensor)
    ]
    found += [
        torch.tensor([leaf], dtype=torch.float64)
        for leaf in tree_leaves(outputs)
        if isinstance(leaf, float)
    ]
    return torch.cat(found) if found else torch.zeros(0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("entry", ENTRIES)
def test_odd_models_get_an_answer_or_a_sentence_and_stay_as_they_are(entry: Odd) -> None:
    model, args, kwargs = make(entry)
    with entry.around():
        before, values = world(model, (args, kwargs)), None
        if "fake" not in str(entry.around) and "mode" not in getattr(entry.around, "__name__", ""):
            values = numbers(model, (args, kwargs))
        for call in (ps.trace, ps.verify):
            try:
                found: Any = call(model, *args, kwargs=kwargs)
            except ps.PathspaceError as error:
                said = str(error)
                assert entry.words, said
                assert entry.words in said
                assert "\n" not in said and said.endswith(".") and len(said) < 700
                assert not INTERNAL.search(said), said
            else:
                assert not entry.words, f"answered, expected to hear of {entry.words}"
                assert entry.units in (None, found.units if call is ps.verify else found.num_units)
                assert call is ps.trace or found.holds
            assert world(model, (args, kwargs)) == before
            if values is not None:
                after = numbers(model, (args, kwargs))
                assert all(
                    (
                        torch.equal(one.nan_to_num(), other.nan_to_num())
                        if one.element_size() > 1
                        else True
                    )
                    for one, other in zip(values, after, strict=True)
                )
    kept = [*odd_models.LOG, *odd_models.TABLE.values()]
    assert not any(
        "Fake" in type(leaf).__name__ or "Functional" in type(leaf).__name__
        for leaf in leaves(kept)
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("entry", [param for param in ENTRIES if not param.values[0].words])
def test_what_is_said_of_odd_models_is_true(entry: Odd) -> None:
    """Rescale one of two equal models; both have the same outputs."""
    one, args, kwargs = make(entry)
    other, again, named = make(entry)
    with entry.around():
        graph = ps.trace(other, *again, kwargs=named)
        size = {torch.float64: 1e-9}.get(
            next((p.dtype for p in one.parameters()), torch.float32), 1e-4
        )
        phi = math.log(2) * torch.randint(-3, 4, (graph.num_units,), device="cpu").double()
        if not any(parameter.is_inference() for parameter in other.parameters()):
            ps.rescale_(other, graph, phi)
        outputs = []
        for model, inputs, keywords in ((one, args, kwargs), (other, again, named)):
            positional, keywords = arranged(model, inputs, keywords)
            torch.manual_seed(1)
            with torch.no_grad():
                outputs.append(
                    flat(model(*mapped(torch.clone, positional), **mapped(torch.clone, keywords)))
                )
    before, after = outputs
    assert (before - after).abs().sum() <= size * (1 + before.abs().sum())


def test_other_threads_never_see_a_trace() -> None:
    """A model that is used in another thread while it is traced computes
    numbers, and its settings stay.
    """
    model = Net()
    model.config = type("Config", (), {})()  # type: ignore[assignment]
    model.config.use_cache = True  # type: ignore[union-attr]
    inputs = torch.randn(5, 3)
    expected, wrong, ended = model(inputs), [], threading.Event()

    def use() -> None:
        while not ended.is_set():
            if not torch.equal(model(inputs), expected) or model.config.use_cache is not True:  # type: ignore[union-attr]
                wrong.append(1)

    other = threading.Thread(target=use)
    other.start()
    try:
        for _ in range(3):
            ps.trace(model, inputs)
    finally:
        ended.set()
        other.join()
    assert not wrong


def test_copies_of_copies_have_parameters_of_their_own() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    twin = copy.deepcopy(safe_deepcopy(model)).double()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in twin.parameters()} == {torch.float64}


def test_two_traces_at_once_do_not_disturb_each_other() -> None:
    from torch.nn.modules import transformer

    before = transformer._detect_is_causal_mask
    found: list[int] = []

    def run() -> None:
        found.append(ps.trace(Net(), torch.randn(5, 3)).num_units)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [4, 4, 4]
    assert transformer._detect_is_causal_mask is before

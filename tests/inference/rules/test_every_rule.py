"""Each rule against the rule to be wrong with: copying the ids of the first operand is
noticed, by units or by outputs.

Every case runs a network of one operation: what its rule claims leaves the outputs unchanged at
two sizes of the input, and with "copy the ids" in place of the rule the number of units
differs, or the outputs do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from operations import (
    Act,
    Net,
    all_pinned,
    copied,
    is_operand,
    network,
    outcome,
    overload_of,
    packet_of,
    registered,
)
from rule_cases import (
    COPYING,
    CREATED,
    DEVICES,
    FORMS,
    NAMES,
    SPARSE,
    TAKEN_APART,
    TELLING,
    WHOLE,
    Case,
    exists,
)
from torch import Tensor
from torch.utils import _pytree as pytree

from pathspace.inference.registry import RULES
from pathspace.inference.scales import Scales
from pathspace.inference.semantics import Place
from pathspace.inference.values import NEUTRAL, ROOT

# what a normalisation saves for its backward pass comes after its result
SAVED = (
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "native_layer_norm",
    "_native_batch_norm_legit_no_training", "native_group_norm", "_fused_rms_norm",
    "_weight_norm_interface",
)  # fmt: skip

# forms that rules leave to torch's decomposition
LEFT = {"as_strided", "einsum0", "scatter_reduce0", "pad0", "pad1"}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def rules_do_not_fail(
    request: pytest.FixtureRequest, rules_that_failed: list[str]
) -> Iterator[None]:
    """Wrong rules, which some tests put in the place of right ones, may fail."""
    yield
    case = getattr(request.node, "callspec", None)
    assert not rules_that_failed or (case is not None and case.id in LEFT), rules_that_failed


def test_every_rule_is_in_one_group() -> None:
    # names that this version of torch has not got
    unreachable = [name for name in NAMES if not exists(name)]
    groups = [TELLING, COPYING, CREATED, WHOLE, DEVICES, SPARSE, unreachable]
    spoken = [name for group in groups for name in group]
    assert sorted(spoken) == NAMES


def compare(name: str, net: Net, wrong_rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is sound and met, and another in its place is not, or counts other units."""
    key, reached = registered(name), []
    rule = RULES[key]

    def watched(*given: Any, **named: Any) -> Any:
        reached.append(name)
        return rule(*given, **named)

    monkeypatch.setitem(RULES, key, watched)
    true, reasons = outcome(net)
    assert reached and not any("does not cover" in reason for reason in reasons)
    assert true[1], "the claimed scales change the outputs"
    monkeypatch.setitem(RULES, key, wrong_rule)
    wrong, _ = outcome(net)
    assert wrong != true


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TELLING)
def test_what_a_rule_claims_is_so_and_copying_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, network(name, *TELLING[name]), copied, monkeypatch)


@pytest.mark.parametrize("name", COPYING)
def test_where_copying_is_right_pinning_loses_units(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, network(name, *COPYING[name]), all_pinned, monkeypatch)


@pytest.mark.parametrize("name", [name for name in SAVED if name in TELLING])
def test_normalisations_keep_units_where_only_their_result_is_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network(name, *TELLING[name], most=1)
    assert outcome(net)[0][0] > 0
    compare(name, net, copied, monkeypatch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[0])
def test_other_forms_are_sound(
    form: tuple[str, tuple[Any, ...], dict[str, Any], int | None],
) -> None:
    name, args, kwargs, units = form
    (found, sound), _ = outcome(network(name, args, kwargs))
    assert sound
    assert units is None or found == units


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TAKEN_APART)
def test_operations_without_a_rule_are_sound(name: str) -> None:
    (_, sound), _ = outcome(network(name, *TAKEN_APART[name]))
    assert sound


def directly(name: str, case: Case, rule: Any) -> tuple[Any, Any, Scales]:
    """What a rule makes of free scales, the operation's own result, and the interpretation."""
    semantics = Scales({}, {})
    ids: dict[int, Tensor] = {}

    def free(leaf: Any) -> Any:
        return (
            ids.setdefault(id(leaf), semantics.equations.fresh(leaf.shape))
            if is_operand(leaf)
            else leaf
        )

    def ones(leaf: Any) -> Any:
        return torch.ones(leaf.shape, dtype=torch.float64) if isinstance(leaf, Act) else leaf

    args, kwargs = pytree.tree_map(ones, case)
    _, shown = overload_of(name, args, kwargs)
    semantics.place = Place(registered(name), result=shown)
    args, kwargs = pytree.tree_map(free, case)
    return rule(semantics, *args, **kwargs), shown, semantics


def is_fixed(ids: Tensor) -> bool:
    """Whether no element has a scale of its own."""
    return bool(((ids == ROOT) | (ids == NEUTRAL)).all())


@pytest.mark.parametrize("name", CREATED)
def test_what_is_made_has_no_scale_of_its_own(name: str) -> None:
    case = CREATED[name]
    found, shown, semantics = directly(name, case, RULES[registered(name)])
    if not isinstance(shown, Tensor):
        assert not isinstance(found, Tensor)
        assert found == shown
        # whether two tensors are equal feels no scale that they share
        assert semantics.observes == (name == "equal")
    else:
        assert is_fixed(found)
        assert found.shape == shown.shape
        if any(is_operand(leaf) for leaf in pytree.tree_leaves(case)):
            assert not is_fixed(directly(name, case, copied)[0])


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_alone_are_read(name: str) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        packet_of(name)(torch.ones(2), torch.ones(2))
    numbers = torch.tensor([1, 2])
    shown = packet_of(name)(numbers, numbers)
    semantics = Scales({}, {})
    semantics.place = Place(registered(name), result=shown)
    free = semantics.equations.fresh([2])
    assert is_fixed(RULES[registered(name)](semantics, free, free))
    assert not is_fixed(copied(semantics, free, free))


@pytest.mark.parametrize("name", [name for name in DEVICES if exists(name)])
def test_operations_of_other_devices_have_a_rule_that_is_tested(name: str) -> None:
    twin = DEVICES[name]
    assert RULES[registered(name)] is RULES[registered(twin)]
    assert twin in TELLING
    with pytest.raises(TypeError, match="does not take these arguments"):
        network(name, *TELLING[twin])


@pytest.mark.parametrize("name", SPARSE)
def test_operations_on_sparse_matrices_have_a_rule_that_is_tested(name: str) -> None:
    twin, args = SPARSE[name]
    assert RULES[registered(name)] is RULES[registered(twin)]
    assert twin in TELLING
    # (nothing that ids could be laid out like)
    assert any(tensor.layout != torch.strided for tensor in (*args, packet_of(name)(*args)))

"""Each rule against the rule to be wrong with: copying the ids of the first operand is noticed, by units or by outputs.

Every case runs a network of one operation in float64: what its rule claims leaves the outputs unchanged, and with
"copy the ids" in place of the rule the number of units differs, or the outputs do.
"""

from __future__ import annotations

from typing import Any

import pytest
from operations import G, H, all_pinned, copied, network, outcome

from pathspace.inference.registry import RULES

M, F, V = (2, 3), (6,), (1, 2, 4)
Case = tuple[tuple[int, ...], tuple[Any, ...]]

# operations that mix, move or fix what they read: names, shape of the activations, arguments
GROUPS: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = [
    ("add sub maximum minimum fmax fmin hypot mul div atan2 copysign rsub subtract multiply divide", M, (H, G)),
    ("true_divide gt lt", M, (H, G)),
    ("sum mean amax amin cumsum argmax argmin sort argsort prod unbind", M, (H, 1)),
    ("gelu silu tanh sigmoid elu selu mish softplus exp sin cos erf round floor ceil sign square", M, (H,)),
    ("relu6 hardswish t flipud fliplr hardtanh", M, (H,)),
    ("transpose movedim swapaxes swapdims moveaxis", M, (H, 0, 1)),
    ("softmax log_softmax", M, (H, -1)),
    ("max_pool1d avg_pool1d adaptive_avg_pool1d", V, (H, [2])),
    ("mm matmul", (3, 3), (H, G)),
    ("bmm", (2, 2, 2), (H, G)),
    ("dot", F, (H, G)),
    ("outer", (3,), (H, G)),
    ("cat stack", M, ([H, G],)),
    ("pow", M, (H, 2)),
    ("permute", M, (H, [1, 0])),
    ("flip", M, (H, [1])),
    ("roll", M, (H, [1], [1])),
    ("lerp", M, (H, G, 0.3)),
    ("addcmul", M, (H, G, G)),
    ("clamp", M, (H, -1.0, 1.0)),
    ("threshold", M, (H, 0.5, 0.5)),
    ("constant_pad_nd", M, (H, [1, 1], 2.0)),
    ("glu", (2, 4), (H, 1)),
]
TELLING: dict[str, Case] = {name: (shape, args) for names, shape, args in GROUPS for name in names.split()}

# positively homogeneous elementwise, or the very same elements in the same order: the ids stay
COPYING: dict[str, Case] = dict.fromkeys(
    ("relu", "abs", "neg", "clone", "detach", "alias", "contiguous", "positive"), (M, (H,))
)
COPYING |= {
    "leaky_relu": (M, (H, 0.1)),
    "dropout": (M, (H, 0.5, False)),
    "alpha_dropout": (M, (H, 0.5, False)),
    "reshape": (M, (H, [3, 2])),
}


@pytest.mark.parametrize("name", [*TELLING, *COPYING])
def test_what_a_rule_claims_is_so_and_copying_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, args = (TELLING | COPYING)[name]
    net, rule, reached = network(name, shape, args, {}), RULES[f"aten.{name}"], []

    def watched(*given: Any, **named: Any) -> Any:
        reached.append(name)
        return rule(*given, **named)

    monkeypatch.setitem(RULES, f"aten.{name}", watched)
    true, reasons = outcome(net)
    assert reached and not any("does not cover" in reason for reason in reasons)
    assert true[1], "the claimed scales change the outputs"
    monkeypatch.setitem(RULES, f"aten.{name}", copied if name in TELLING else all_pinned)
    wrong, _ = outcome(net)
    assert wrong != true

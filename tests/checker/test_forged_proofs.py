"""False statements about a model, in documents that are consistent, are rejected at a batch of 1.

A forger changes one number of a true proof (an end of an edge, a factor of a gate, the dimension
with all that follows from it) and mends the digest. What the checker still accepts must state the
same scales of the model's weights as the true proof, or weaker ones that the true ones imply.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mlp, network
from torch import Tensor, nn
from typer.testing import CliRunner

import pathspace as ps
from pathspace.checker import check
from pathspace.cli.main import app


def gate() -> nn.Module:
    """A product of two rectified features."""
    a, b, o = (nn.Linear(*size, bias=False) for size in ((3, 4), (3, 4), (4, 2)))
    return network(lambda net, x: net.o(torch.relu(net.a(x)) * torch.relu(net.b(x))), a=a, b=b, o=o)


def plain(after: Callable[[Tensor], Tensor] = lambda h: h) -> nn.Module:
    """Two layers with three units, and what happens to these."""
    a, b = nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False)
    return network(lambda net, x: net.b(after(torch.relu(net.a(x)))), a=a, b=b)


def bent(h: Tensor) -> Tensor:
    """A tanh behind one of the three units: two free scales, dimension 9 - 2 = 7."""
    return torch.cat([h[:, :2], h[:, 2:].tanh()], 1)


def sealed(document: dict[str, Any]) -> dict[str, Any]:
    """A changed document with the digest that belongs to it."""
    body = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return body | {"digest": hashlib.sha256(text.encode()).hexdigest()}


def incidence(document: dict[str, Any]) -> np.ndarray:
    """What every unit does to the logarithm of every weight that is no unused one, ``(m, H)``."""
    units, rows = document["units"], []
    for tensor in sorted(document["tensors"], key=lambda entry: entry["name"]):
        parts = tensor["tail"], tensor["head"], tensor["unused"] or {"values": [0], "shape": [1]}
        sides = [np.array(part["values"]).reshape(part["shape"]) for part in parts]
        ends = [np.broadcast_to(side, tensor["shape"]).reshape(-1) for side in sides]
        for tail, head, unused in zip(*ends, strict=True):
            row = np.zeros(units, np.int64)
            for end, sign in ((head, 1), (tail, -1)):
                factors = [[abs(int(end)), 1]]
                if abs(end) > units:
                    factors = document["products"][abs(end) - units - 1]
                for unit, times in factors:
                    if unit:
                        row[unit - 1] += sign * np.sign(end) * times
            if not unused:
                rows.append(row)
    return np.array(rows).reshape(len(rows), units)


def is_true(forged: dict[str, Any], document: dict[str, Any]) -> bool:
    """Whether all scales that a document states are among the model's."""
    if sorted(t["name"] for t in forged["tensors"]) != sorted(
        t["name"] for t in document["tensors"]
    ):
        return False
    known, stated = incidence(document), incidence(forged)
    both = np.concatenate([known, stated], 1)
    return bool(np.linalg.matrix_rank(both) == np.linalg.matrix_rank(known))


def forge(document: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """One number changed: an end of an edge, or a factor of a product."""
    forged = copy.deepcopy(document)
    units = document["units"]
    if document["products"] and generator.random() < 0.4:
        factor = generator.choice(generator.choice(forged["products"]))
        if generator.random() < 0.5:
            factor[0] = generator.randint(1, units)
        else:
            factor[1] = generator.choice((-2, -1, 1, 2, 3))
    else:
        tensor = generator.choice(forged["tensors"])
        values = tensor[generator.choice(("tail", "head"))]["values"]
        place = generator.randrange(len(values))
        largest = units + len(document["products"])
        values[place] = generator.randint(-largest, largest)
    return sealed(forged)


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    return {
        "gate": (gate(), torch.randn(1, 3)),
        "two layers": (plain(), torch.randn(1, 2)),
        "three layers": (mlp(2, 3, 3, 2), torch.randn(1, 2)),
        "leaky": (mlp(3, 4, 2, act=nn.LeakyReLU), torch.randn(1, 3)),
        "convolutions": (
            nn.Sequential(
                nn.Conv1d(1, 3, 2), nn.ReLU(), nn.Conv1d(3, 2, 2), nn.ReLU(), nn.Flatten(),
                nn.Linear(4, 1),
            ),
            torch.randn(1, 1, 4),
        ),
    }  # fmt: skip


@pytest.mark.slow
def test_no_false_proof_of_a_thousand_is_accepted() -> None:
    generator, false, accepted = random.Random(0), 0, []
    seed = 0
    while false < 1000:
        seed += 1
        torch.manual_seed(seed)
        for name, (model, x) in models().items():
            model, x = model.double(), x.double()
            document = ps.proof(ps.trace(model, x, sizes="given").skeleton(), name)
            for _ in range(20):
                forged = forge(document, generator)
                if not check(forged).accepted or is_true(forged, document):
                    continue
                false += 1
                if check(forged, model=model, args=(x,)).accepted:
                    accepted.append((seed, name, forged))
    assert not accepted, (len(accepted), false)


def test_a_proof_of_another_network_is_rejected_at_every_seed() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        model, x = plain(bent).double(), torch.randn(1, 2, dtype=torch.float64)
        document = ps.proof(ps.trace(plain().double(), x, sizes="given").skeleton(), "net")
        assert not check(document, model=model, args=(x,)).accepted, seed


def test_what_no_run_shows_is_said() -> None:
    model, x = plain(lambda h: 0 * h), torch.randn(1, 2)
    document = ps.proof(ps.trace(plain(), x, sizes="given").skeleton(), "net")
    judgement = check(document, model=model, args=(x,))
    assert (judgement.compared, judgement.unseen) == ("tensors", ())
    assert "all outputs are 0" in judgement.reason

    # a unit whose output is not read
    half = plain(lambda h: h * torch.tensor([1.0, 1.0, 0.0], dtype=h.dtype))
    judgement = check(document, model=half, args=(x,))
    assert judgement.accepted
    assert "the effect of 2 of 6 scalars of a.weight" in judgement.unseen
    seen = check(document, model=plain(), args=(x,))
    assert seen.accepted and not seen.unseen


def test_a_small_document_cannot_ask_for_gigabytes() -> None:
    document = ps.proof(ps.trace(plain(), torch.randn(1, 2)).skeleton(), "net")
    tensor, many = document["tensors"][0], 1 << 29
    tensor |= {"shape": [many, 2], "edges": 2 * many}
    tensor["head"] = {"shape": [many, 1], "values": {"runs": [[1, 0, many]]}}
    judgement = check(sealed(document))
    assert not judgement.accepted and "536,870,912 numbers" in judgement.reason


def test_outputs_that_could_not_be_compared_have_an_exit_code_of_their_own(tmp_path: Path) -> None:
    net, file = tmp_path / "net.py", str(tmp_path / "proof.json")
    text = (
        "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))\n"
        "    def forward(self, x):\n        return 1 * super().forward(x)\n"
    )
    net.write_text(text)
    target = [f"{net}:Net", "--input", "1x2"]
    runner = CliRunner()
    assert runner.invoke(app, ["verify", *target, "--proof", file]).exit_code == 0
    judged = runner.invoke(app, ["check", file, *target])
    assert (judged.exit_code, judged.stdout[:8]) == (0, "Accepted")
    net.write_text(text.replace("1 * super", "0 * super"))
    judged = runner.invoke(app, ["check", file, *target])
    assert (judged.exit_code, judged.stdout[:12]) == (3, "Not compared")

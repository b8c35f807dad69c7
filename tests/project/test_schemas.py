"""The documents that programs read: they fit their schemas, and so do those of earlier versions.

``python tests/project/test_schemas.py`` writes the documents of this version; those of released
versions stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

import pathspace as ps
from pathspace.diagnostics import report

DOCUMENTS = Path(__file__).parents[1] / "documents"
NAMES = ("certificate", "proof", "report")


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (resources.files("pathspace") / "schemas" / f"{name}.json").read_text()
    )
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def model() -> tuple[nn.Module, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 3), nn.LayerNorm(3), nn.ReLU(), nn.Linear(3, 2)
        ), torch.randn(8, 4)


def recurrent() -> tuple[nn.Module, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.RNN(2, 3, nonlinearity="relu"), torch.randn(4, 2, 2)


def documents(build: Callable[[], tuple[nn.Module, torch.Tensor]]) -> dict[str, dict[str, Any]]:
    net, x = build()
    found = {
        "certificate": ps.verify(net, x).to_dict(),
        "proof": ps.proof(ps.trace(net, x).skeleton()),
        "report": report(net, x).to_dict(),
    }
    return {name: json.loads(json.dumps(found[name])) for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("build", [model, recurrent])
def test_documents_fit_their_schemas(build: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    for name, document in documents(build).items():
        jsonschema.validate(document, schema(name))
        for key in schema(name)["required"]:
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({k: v for k, v in document.items() if k != key}, schema(name))


@pytest.mark.parametrize("path", sorted(DOCUMENTS.glob("*.json")), ids=lambda path: path.stem)
def test_documents_of_earlier_versions_are_still_read(path: Path) -> None:
    document = json.loads(path.read_text())
    name = path.stem.split("-")[0]
    jsonschema.validate(document, schema(name))
    if name == "proof":
        net, x = model()
        assert ps.check(document).accepted
        assert ps.check(document, dict(net.named_parameters()), net, (x,)).accepted


if __name__ == "__main__":
    for name, document in documents(model).items():
        # what takes time differs from run to run, and says nothing here
        (DOCUMENTS / f"{name}-0.1.json").write_text(json.dumps(document) + "\n")

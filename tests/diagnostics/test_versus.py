"""Two reports on one page: the figures are those of the reports, the
sentences follow from the numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

import loaded_nets
import pytest
import torch
from command_line import call
from torch import nn

from pathspace.diagnostics import report, versus


@pytest.mark.slow
def test_a_checkpoint_and_another_architecture(tmp_path: Path) -> None:
    model = loaded_nets.Net()
    torch.save(model.state_dict(), tmp_path / "before.pt")
    with torch.no_grad():
        model[1].branch.weight.mul_(100)
    torch.save(model.state_dict(), tmp_path / "after.pt")
    file = loaded_nets.__file__
    words = ["report", f"{file}:Net", "--data", f"{file}:loader", "--loss", "cross_entropy"]
    words += ["--checkpoint", tmp_path / "after.pt", "-o", tmp_path / "r.html", "--json", "-"]
    result = call(*words, "--against", tmp_path / "before.pt")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    rows = {row["figure"]: (row["first"], row["second"]) for row in found["figures"]}
    assert rows["units"][0] == rows["units"][1] and rows["alarms"] == ("exploding", "none")
    assert found["sentences"][0].startswith("The variance of activations differs most at 1.branch:")
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") >= 4 and "<script" not in page
    assert all(s in page for s in found["sentences"])


def test_models_of_other_shapes() -> None:
    x = torch.randn(16, 4)
    one = report(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), x)
    other = report(nn.Sequential(nn.Linear(4, 3)), x)
    both = versus(one, other, ("one", "other"))
    rows = {title: (a, b) for title, a, b in both.rows}
    assert rows["units"] == (6, 0) and rows["dimension"][0] == one.facts["certificate"]["dimension"]
    same = versus(one, one)
    assert same.sentences == [s for s in same.sentences if "same everywhere" in s]
    assert len(same.sentences) >= 2
    assert same.to_dict()["first"] == one.to_dict()

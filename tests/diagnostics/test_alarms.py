"""Alarms name the fault itself, and stay away where nothing is wrong; watching ends no run."""

from __future__ import annotations

import itertools
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from cases import network
from torch import Tensor, nn
from torch.nn import functional as F

from pathspace.diagnostics import diagnose, report

logging.getLogger("pathspace").setLevel(logging.ERROR)


def causes(found: Any) -> dict[str, str]:
    return {alarm.kind: alarm.place for alarm in found.alarms if not alarm.because}


def test_a_layer_that_the_layer_before_it_kills_is_its_consequence() -> None:
    model, (x, y) = runs.mlp((20, 32, 32, 32, 3)), runs.vectors(64)
    with torch.no_grad():
        model[2].weight.mul_(1000).abs_()
        model[4].weight.abs_().neg_()
    found = diagnose(model, x, loss=F.cross_entropy, targets=y)
    assert {alarm.kind: alarm.because for alarm in found.alarms}["dead"] == "exploding"


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_value_, nn.utils.clip_grad_norm_])
def test_gradients_that_clipping_takes_away_are_clipped(clip: Any) -> None:
    model, (x, y) = runs.mlp(), runs.vectors(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    watch = runs.steps(optimizer, loss, 12, model, lambda: clip(model.parameters(), 1e-9), every=10)
    assert [alarm.kind for alarm in watch.causes] == ["clipped"]


@pytest.mark.parametrize("end", [nn.LayerNorm(1), nn.Softmax(-1)])
def test_a_network_that_ignores_its_input_is_told_so(end: nn.Module) -> None:
    model = nn.Sequential(*runs.mlp((20, 16, 1)), end)
    x, y = torch.randn(32, 20), torch.rand(32, 1)
    assert causes(diagnose(model, x, loss=F.mse_loss, targets=y)).keys() == {"constant outputs"}
    optimizer = torch.optim.Adam(model.parameters())
    watch = runs.steps(optimizer, lambda: F.mse_loss(model(x), y), 8, model, every=10)
    assert [alarm.kind for alarm in watch.causes] == ["constant outputs"]


def test_equal_inputs_or_a_head_of_zeros_are_no_ignored_inputs() -> None:
    model, x, y = runs.mlp((20, 16, 1)), torch.randn(32, 20), torch.rand(32, 1)
    for spoil, given in ((False, torch.ones(32, 20)), (True, x)):
        if spoil:
            nn.init.zeros_(model[-1].weight)
        found = diagnose(model, given, loss=F.mse_loss, targets=y)
        assert "constant outputs" not in {alarm.kind for alarm in found.alarms}


@pytest.mark.parametrize(
    "given", [F.mse_loss, F.l1_loss, lambda z, y: (z - y).square().sum(), None]
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_that_a_loss_broadcasts_are_named(given: Any) -> None:
    model, x = runs.mlp((20, 16, 1)), torch.randn(24, 20)
    for targets in (torch.randn(24), torch.randn(24, 5)):
        found = diagnose(model, x, loss=given, targets=targets)
        assert list(causes(found)) == ["broadcast targets"]
        assert str(tuple(targets.shape)) in found.alarms[0].text
    assert not diagnose(model, x, loss=given, targets=torch.randn(24, 1)).alarms


def blurred() -> nn.Module:
    """Equal filters of different channels."""
    blur = nn.Conv2d(3, 3, 3, padding=1, groups=3)
    nn.init.constant_(blur.weight, 1 / 9)
    return nn.Sequential(blur, nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))


def scaled() -> nn.Module:
    """A branch whose channels have a scale each, as in ConvNeXt."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        return net.head((x + net.scale * F.gelu(net.branch(x))).mean((2, 3)))

    first, branch = (nn.Conv2d(n, 8, 3, padding=1) for n in (3, 8))
    scale, head = nn.Parameter(torch.full((8, 1, 1), 1e-6)), nn.Linear(8, 3)
    return network(forward, first=first, branch=branch, scale=scale, head=head)


def narrow() -> nn.Module:
    """All units of a layer are alike, where each has one weight."""
    model = runs.mlp((1, 4, 3))
    nn.init.constant_(model[0].weight, 0.5)
    return model


@pytest.mark.parametrize(
    ("build", "data", "place"),
    [
        (blurred, lambda: runs.images(16), None),
        (scaled, lambda: runs.images(32), None),
        (narrow, lambda: (torch.randn(16, 1), torch.arange(16) % 3), "0.weight"),
    ],
)
def test_equal_rows_are_copies_only_where_they_do_the_same(
    build: Any, data: Any, place: str | None
) -> None:
    model, (x, y) = build(), data()
    found = diagnose(model, x, loss=F.cross_entropy, targets=y).alarms
    copies = [alarm for alarm in found if alarm.kind == "copies"]
    assert bool(copies) == (place is not None)
    assert all(alarm.place.startswith(str(place)) for alarm in copies)


def trained(model: nn.Module, before: Any = lambda step: None, **options: Any) -> Any:
    numbers = itertools.count()

    def loss() -> Tensor:
        before(next(numbers))
        return model(torch.randn(8, 20)).square().mean()

    watch = runs.steps(torch.optim.SGD(model.parameters(), lr=0.1), loss, 8, model, **options)
    assert watch.steps == 8
    return watch


def fails(*_: Any) -> None:
    raise OSError("no room is left")


class Writer:
    """A writer of events whose disc is full."""

    add_scalar = flush = fails


@pytest.mark.parametrize("what", ["page", "csv", "tensorboard", "on_alarm"])
def test_what_fails_beside_a_run_does_not_end_it(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    model = runs.mlp((20, 8, 2))
    nn.init.constant_(model[0].bias, -1e4)
    given = {"tensorboard": Writer(), "on_alarm": fails}.get(what, folder / f"run.{what}")
    with caplog.at_level(logging.WARNING, "pathspace"):
        watch = trained(model, lambda step: step == 3 and shutil.rmtree(folder), **{what: given})
    said = [text for text in caplog.messages if "the run goes on" in text]
    assert said and len(said) == len(set(said)) and set(said) <= set(watch.notes)
    assert "dead" in [alarm.kind for alarm in watch.alarms]


@pytest.mark.slow
def test_names_of_any_letters_are_drawn(tmp_path: Path) -> None:
    letters, model = "\x00\x07\x08\x0c\x1b\x7f\ufffe", nn.Sequential()
    for number in range(2):
        model.add_module(f"a{letters}{number}", nn.Linear(20, 20))
    report(model, torch.randn(8, 20)).save(tmp_path / "page.html")
    trained(model, page=tmp_path / "run.html")
    for page in tmp_path.glob("*.html"):
        assert "<svg" in page.read_text(encoding="utf-8")


def test_a_loss_scale_is_not_clipping() -> None:
    model, (x, y) = runs.mlp(), runs.vectors(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def unscale() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(2**16)

    loss = lambda: 2**16 * F.cross_entropy(model(x), y)  # noqa: E731
    assert not runs.steps(optimizer, loss, 12, model, unscale, every=10).alarms


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_scales_that_a_step_has_changed_are_not_the_cause_of_the_step(norm: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(20, 32), norm(32), nn.ReLU(), nn.Linear(32, 3))

    watch = runs.Run(model, options={"lr": 1.0}).watched(structure=True)
    assert [alarm.kind for alarm in watch.causes] == ["rate"]


def loop(own: bool) -> nn.Module:
    """A recurrence whose state grows at every step, as a layer of torch or in a loop of its own."""

    def forward(net: Any, x: Tensor) -> Tensor:
        if not own:
            return net.head(net.rnn(x)[0][:, -1])
        h = torch.zeros(len(x), 24)
        for step in x.unbind(1):
            h = torch.relu(net.enter(step) + net.stay(h))
        return net.head(h)

    rnn = nn.RNN(4, 24, nonlinearity="relu", batch_first=True)
    enter, stay, head = nn.Linear(4, 24), nn.Linear(24, 24), nn.Linear(24, 3)
    for weight in (rnn.weight_hh_l0, stay.weight):
        nn.init.orthogonal_(weight, gain=6)
    return network(forward, rnn=rnn, enter=enter, stay=stay, head=head)


@pytest.mark.parametrize("own", [False, True])
def test_a_state_that_grows_is_exploding_and_not_a_matter_of_float16(own: bool) -> None:
    x, y = runs.sequences(32)
    for found in (
        diagnose(loop(own), x, loss=F.cross_entropy, targets=y),
        runs.Run(lambda: loop(own), runs.sequences).watched(structure=False),
    ):
        kinds = {alarm.kind: alarm.because for alarm in found.alarms}
        assert kinds["exploding"] == "" and kinds.get("overflow", "exploding") == "exploding"
        assert not any(alarm.advice.startswith("Use bfloat16") for alarm in found.alarms)

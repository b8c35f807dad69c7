"""Watched training loops: nothing of them changes, rows say what
happened, alarms name the cause.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from cases import ResidualMLP
from descent import descend
from torch import nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.diagnostics import MarkovChain, conserved, diagnose, signal, watching
from pathspace.diagnostics.run.alarms import RULES
from pathspace.diagnostics.run.outputs_judged import loss_fault
from pathspace.diagnostics.run.weights import Units, fan_in
from pathspace.errors import InputError
from pathspace.models.copies import safe_deepcopy
from pathspace.training import penalise_

logging.getLogger("pathspace").setLevel(logging.ERROR)
# units and chain cost a trace of the model, which the other alarms do without
TRACED = {"unbalanced", "unbalanced-block", "pulled"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", runs.BROKEN)
def test_broken_runs_are_put_down_to_what_was_broken(name: str) -> None:
    kind, place, run = runs.BROKEN[name]
    watch = run.watched(seed=11, structure=name in TRACED)
    (cause,) = watch.causes
    assert cause.kind == kind and cause.place.startswith(place) and cause.advice.endswith(".")
    assert math.isnan(cause.value) or cause.value == pytest.approx(cause.value)
    known = {rule.kind for rule in RULES}
    assert all(
        alarm.kind in known and (not alarm.because or alarm.because in known)
        for alarm in watch.alarms
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", runs.HEALTHY)
def test_healthy_runs_raise_none(name: str) -> None:
    watch = runs.HEALTHY[name].watched(seed=12, structure=name in ("residual", "mlp-sgd"))
    assert watch.alarms == []
    assert [int(row["step"]) for row in watch.rows] == [1, 2, 4, 8, 10, 20, 30, 40]


def test_passes_for_another_network_leave_no_stale_gradients() -> None:
    maker, judge = runs.mlp((8, 32, 20)), runs.mlp((20, 32, 1))
    optimizers = [torch.optim.Adam(model.parameters(), 2e-4) for model in (maker, judge)]
    data, loss = runs.vectors()[0], nn.functional.binary_cross_entropy_with_logits
    with watching(judge, every=4, structure=False) as watch:
        for _ in range(12):
            made = maker(torch.randn(64, 8))
            optimizers[1].zero_grad()
            (
                loss(judge(data[:64]), torch.ones(64, 1))
                + loss(judge(made.detach()), torch.zeros(64, 1))
            ).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            loss(judge(made), torch.ones(64, 1)).backward()
            optimizers[0].step()
    assert watch.alarms == []
    assert watch.notes == ["Units and chain are not measured: structure=False."]


def test_every_kind_of_alarm_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    assert all(f"| {rule.kind} |" in page for rule in RULES)


def test_a_watched_run_is_bitwise_the_run() -> None:
    plain, ends = nn.Sequential(*runs.residual(), nn.Dropout(0.1)), []
    x, y = runs.vectors(64)
    for every in (None, 1):
        torch.manual_seed(5)
        model = copy.deepcopy(plain)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        loss = lambda model=model: runs.loss_of(model(x + torch.randn_like(x)), y)  # noqa: E731
        if every is None:
            descend(optimizer, loss, 6)
        else:
            watch = runs.steps(optimizer, loss, 6, model, every=1, structure=None)
        ends.append(model.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert len(watch.rows) == 6 and watch.notes == []
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (0, 5), (4, 0), (4, 1), (2, 3, 4, 5)])
def test_outputs_of_any_shape_are_judged_without_an_error(shape: tuple[int, ...]) -> None:
    outputs = torch.randn(shape, requires_grad=True)
    slope = torch.autograd.grad(outputs.square().sum(), outputs)[0]
    assert loss_fault(outputs.detach(), slope) is None


def test_rows_are_what_a_slow_look_finds() -> None:
    model, (x, y) = runs.residual(16), runs.vectors(32)
    graph, chain = ps.trace(model, x), MarkovChain.trace(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    start = None
    with watching(model, every=1) as watch:
        for step in range(3):
            optimizer.zero_grad()
            record = chain.observe(runs.loss_of, x, y)
            hidden = float(model[0](x).detach().square().mean().sqrt())
            runs.loss_of(model(x), y).backward()
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            optimizer.step()
            row = watch.rows[-1]
            assert row["signal/0"] == pytest.approx(hidden, rel=1e-5)
            if step:
                assert row["efficiency"] == pytest.approx(record.mean_efficiency, abs=1e-6)
                assert row["cosine/2.leave"] == pytest.approx(
                    float(record.cosines[1].mean()), abs=1e-6
                )
            for name, p in model.named_parameters():
                if p.ndim > 1:
                    usual = math.sqrt(p.numel() / (3 * p.shape[1]))
                    size = max(float(before[name].norm()), usual)
                    assert row[f"step/{name}"] == pytest.approx(
                        float((p.detach() - before[name]).norm()) / size, rel=1e-4
                    )
            units = Units(model, graph, fan_in(model))
            incoming, outgoing = units.sums(before)
            if start is None:
                start = incoming - outgoing, incoming + outgoing
            drift = abs(incoming - outgoing - start[0])[start[1] > 0] / start[1][start[1] > 0]
            assert row["conserved_drift"] == pytest.approx(drift.max(), rel=1e-6)
            assert 0 < row["unit_step"] <= row["unit_step_largest"]
            values = ps.path_statistics(graph.skeleton(rule="magnitude"))
            assert row["path_value_median"] == pytest.approx(values.median / math.log(10), abs=0.05)
    # biases are conserved, too; the rows compare matrices and norms
    assert conserved(graph).shape == (graph.num_units,)


@pytest.mark.slow
def test_files_hold_the_rows(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    table, page, events = tmp_path / "run.csv", tmp_path / "run.html", tmp_path / "events"
    run = runs.BROKEN["unbalanced"][2]
    watch = run.watched(3, csv=table, page=page, tensorboard=events)
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(float(row["step"])) for row in rows] == [int(row["step"]) for row in watch.rows]
    assert float(rows[-1]["step/2.weight"]) == watch.rows[-1]["step/2.weight"]
    found = EventAccumulator(str(events)).Reload().Scalars("pathspace/relative_step")
    assert [event.step for event in found] == [int(row["step"]) for row in watch.rows]
    text = page.read_text()
    assert "unbalanced" in text
    assert watch.causes[0].advice in text
    assert 'http-equiv="refresh"' not in text
    assert text.count("<svg") >= 5 and "<script" not in text and "src=" not in text
    with pytest.raises(InputError, match="Cannot write"):
        watching(nn.Linear(1, 1), page=tmp_path / "none" / "run.html")
    with pytest.raises(InputError, match="every=0, expected a whole number from 1"):
        watching(nn.Linear(1, 1), every=0)


def test_loops_of_all_kinds() -> None:
    """Accumulated gradients, two optimizers, an exception, parameters of others."""
    model, other, (x, y) = runs.mlp(), nn.Linear(2, 2), runs.vectors(32)
    first = torch.optim.SGD(model[:2].parameters(), lr=0.01)
    second = torch.optim.Adam(model[2:].parameters())
    third = torch.optim.SGD(other.parameters(), lr=1.0)
    seen: list[str] = []
    with (
        pytest.raises(ValueError, match="stop"),
        watching(model, every=2, on_alarm=lambda a: seen.append(a.kind)) as watch,
    ):
        for _ in range(8):
            for optimizer in (first, second, third):
                optimizer.zero_grad()
            for part in range(2):
                runs.loss_of(model(x[part::2]), y[part::2]).backward()
            other(torch.ones(1, 2)).sum().backward()
            for optimizer in (first, second, third):
                optimizer.step()
        raise ValueError("stop")
    assert watch.steps == 8
    assert [row["step"] for row in watch.rows] == [1, 2, 4, 6, 8]
    assert seen == [] == watch.alarms
    assert not any(module._forward_hooks for module in model.modules()) and not watch.running
    runs.loss_of(model(x), y).backward()
    first.step()
    assert watch.steps == 8


@pytest.mark.parametrize(
    ("options", "traced"), [({}, False), ({"structure": True}, True), ({"planned": 10**9}, True)]
)
def test_tracing_waits_until_it_is_a_small_part_of_the_run(
    options: dict[str, Any], traced: bool
) -> None:
    """At the default cadence; a model that is traced in half a second does not wait."""
    x, y = runs.vectors(32)
    for model, waits in ((runs.mlp((20, *[12] * 12, 3)), True), (runs.mlp(), False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        given = {"every": 100, "structure": None, **options}
        loss = lambda model=model: runs.loss_of(model(x), y)  # noqa: E731
        watch = runs.steps(optimizer, loss, 3, model, **given)
        found = traced or not waits
        assert ("gauge_drift" in watch.rows[-1]) == found == (watch.preparation > 0)
        assert (watch.notes == []) == found
        assert all("structure=True" in note for note in watch.notes)


@pytest.mark.parametrize("named", [False, True])
def test_passes_made_inside_of_the_step_are_seen(named: bool) -> None:
    """A closure handed to the optimizer: the rows are those of the loop
    that calls backward first.
    """

    def rows(closed: bool) -> tuple[list[dict[str, float]], nn.Module]:
        torch.manual_seed(3)
        model, (x, y) = runs.residual(16), runs.vectors(32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = runs.loss_of(model(x), y)
            loss.backward()
            return loss

        with watching(model, every=1) as watch:
            for _ in range(3):
                if closed:
                    optimizer.step(closure=closure) if named else optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
        assert watch.notes == [] == watch.alarms
        return [{k: v for k, v in row.items() if k != "seconds"} for row in watch.rows], model

    (closed, first), (plain, second) = rows(True), rows(False)
    assert closed == plain and "efficiency" in closed[-1]
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_lightning_is_watched(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    from pathspace.diagnostics import lightning_callback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = runs.residual(16)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return runs.loss_of(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    callback = lightning_callback(every=4, page=tmp_path / "run.html")
    options = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    options |= {"max_steps": 8, "accelerator": "cpu", "devices": 1, "callbacks": [callback]}
    trainer = lightning.Trainer(default_root_dir=tmp_path, **options)
    data = torch.utils.data.TensorDataset(*runs.vectors(256))
    trainer.fit(Module(), torch.utils.data.DataLoader(data, 64))
    watch = callback.watch
    assert [row["step"] for row in watch.rows] == [1, 2, 4, 8] and watch.notes == [] == watch.alarms
    assert {"efficiency", "gauge_drift", "signal/0", "unit_step"} <= watch.rows[-1].keys()
    assert watch.planned == 8
    assert (tmp_path / "run.html").exists() and not watch.running


@pytest.mark.slow
def test_a_trainer_of_transformers_is_watched(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from pathspace.diagnostics import transformers_callback

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=17, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 17, (32, 8))]
    callback = transformers_callback(every=4, page=tmp_path / "run.html")
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=8, report_to=[], use_cpu=True
    )
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    assert [row["step"] for row in callback.watch.rows] == [1, 2, 4] and callback.watch.causes == []
    assert callback.watch.rows[0]["loss"] == pytest.approx(7 / 8 * math.log(17), abs=0.1)
    assert "efficiency" in callback.watch.rows[-1] and (tmp_path / "run.html").exists()
    assert json.dumps(callback.watch.rows)


@pytest.mark.parametrize(
    "name", ["unbalanced", "exploding", "vanishing", "eps", "copies", "dead", "saturated"]
)
def test_what_is_wrong_shows_without_a_run(name: str) -> None:
    kind, place, run = runs.BROKEN[name]
    torch.manual_seed(3)
    (x, y), model = run.data(), run.model()
    data = [(x[i : i + 64], y[i : i + 64]) for i in range(0, 256, 64)]
    assert diagnose(model, data=data[:1]).alarms == []
    with torch.no_grad():
        run.spoil(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = diagnose(model, data=data)
    assert [alarm.kind for alarm in found.alarms if not alarm.because] == [kind]
    assert found.alarms[0].place.startswith(place) and found.to_dict()["alarms"][0]["kind"] == kind
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_judged_by_their_gradients(classes: int, dtype: torch.dtype) -> None:
    """What is squashed twice is told from every loss that only looks like it."""
    torch.manual_seed(classes)
    z, aim = torch.randn(32, classes).to(dtype), torch.randn(32, classes).to(dtype)
    y, weight = torch.randint(0, classes, (32,)), torch.rand(classes).to(dtype) + 0.1
    hot, bits = F.one_hot(y, classes).to(dtype), torch.randint(0, 2, (32, classes)).to(dtype)
    p, s = z.softmax(1), z.sigmoid()

    def kind(outputs: torch.Tensor, loss: Any) -> str:
        outputs = outputs.detach().requires_grad_()
        found = loss_fault(outputs.detach(), torch.autograd.grad(loss(outputs), outputs)[0])
        return found.kind if found else ""

    right = [
        (z, lambda z: F.cross_entropy(z, y)),
        (z, lambda z: F.cross_entropy(z, y, weight=weight, label_smoothing=0.8)),
        (z.log_softmax(1), lambda z: F.nll_loss(z, y)),
        (p, lambda p: F.nll_loss(p.clamp(min=1e-6).log(), y)),
        (p, lambda p: F.mse_loss(p, hot)),
        (z, lambda z: F.mse_loss(z, aim)),
        (z, lambda z: F.binary_cross_entropy_with_logits(z, bits)),
        (s, lambda s: F.mse_loss(s, bits)),
        (z, lambda z: F.multi_margin_loss(z.float(), y)),
        (z, lambda z: z.mean()),
    ]
    assert [kind(*case) for case in right] == [""] * len(right)
    if dtype == torch.float32:
        assert kind(p, lambda p: F.cross_entropy(p, y)) == "squashed twice"
        assert kind(z, lambda z: F.cross_entropy(z.softmax(1), y)) == "squashed twice"
        assert kind(z, lambda z: F.cross_entropy(z, y, label_smoothing=1.0)) == "uniform targets"
        images = z.reshape(8, 4, classes).movedim(-1, 1).softmax(1)
        assert kind(images, lambda p: F.cross_entropy(p, y.reshape(8, 4))) == "squashed twice"
    assert kind(s, lambda s: F.binary_cross_entropy_with_logits(s, bits)) == "squashed twice"


@pytest.mark.slow
@pytest.mark.parametrize("penalised", [False, True])
def test_a_watched_model_is_traced_and_copied_without_the_watch(penalised: bool) -> None:
    """Before the pass, after it, and when chain and units are observed, too."""
    model, x, y = ResidualMLP(6, 6, (6,), 3), torch.randn(8, 6), torch.randint(0, 3, (8,))
    if penalised:
        penalise_(model, x, tau=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    units, layers = ps.trace(model, x).num_units, [row.layer for row in signal(model, x)]
    own = sum(len(module._forward_hooks) for module in model.modules())

    def used() -> None:
        assert ps.trace(model, x).num_units == units and ps.verify(model, x).holds
        assert len(MarkovChain.trace(model, x)) == 1
        assert [row.layer for row in signal(model, x)] == layers
        twin, stored = safe_deepcopy(model), io.BytesIO()
        assert sum(len(module._forward_hooks) for module in twin.modules()) == own
        torch.save(model, stored)
        stored.seek(0)
        for other in (twin, copy.deepcopy(model), torch.load(stored, weights_only=False)):
            assert torch.equal(other(x), model(x))

    with watching(model, every=1, structure=True) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            used()
            loss.backward()
            used()
            optimizer.step()
            used()
    assert len(watch.rows) == 3 and not any("not measured" in note for note in watch.notes)
    assert sum(len(module._forward_hooks) for module in model.modules()) == own


def test_two_backward_passes_of_one_step_leave_no_stale_gradients() -> None:
    model, x, y = runs.mlp((10, 16, 5)), torch.randn(64, 10), torch.randint(0, 5, (64,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss() -> torch.Tensor:
        logits = model(x)
        F.cross_entropy(logits, y).backward(retain_graph=True)
        return 1e-3 * logits.square().mean()

    assert runs.steps(optimizer, loss, 8, model).alarms == []

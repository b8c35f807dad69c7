"""Diagnoses of the run one has: checkpoints, data and losses as people have them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import loaded_nets
import pytest
import torch
from cases import network
from command_line import call
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pathspace.diagnostics import ChainRecord, MarkovChain, diagnose
from pathspace.diagnostics.shared.losses import choose_loss
from pathspace.diagnostics.shared.subject import load_weights, make_subject, read_batches
from pathspace.errors import InputError
from pathspace.models.values import without_weights


def tied() -> nn.Module:
    table, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = table.weight
    return network(lambda net, x: net.head(net.table(x)), table=table, head=head)


def run(*words: str) -> tuple[int, str]:
    result = call(*words)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        nn.MSELoss(reduction="sum"),
        lambda y, t: (y - t).square().sum(),
        lambda y, t: (y - t).square().mean(),
        lambda y, t: (y - t).square().sum(1),
        lambda y, _: y.abs().mean(),
    ],
)
def test_merged_micro_batches_are_the_whole_batch(loss) -> None:
    model = nn.Sequential(loaded_nets.Block(), loaded_nets.Block(), loaded_nets.Block())
    x = torch.randn(12, 6)
    target = torch.randn(12, 6)
    chain = MarkovChain.trace(model, x)
    whole = chain.observe(loss, x, target)
    parts = [(x[:2], target[:2]), (x[2:7], target[2:7]), (x[7:], target[7:])]
    merged = ChainRecord.merge(chain.observe(loss, *part) for part in parts)
    assert merged.reduction == whole.reduction and merged.samples == 12
    for name in ("gauge", "products", "gradient_norms", "cosines", "stream_norms"):
        assert torch.allclose(getattr(merged, name), getattr(whole, name), rtol=1e-4, atol=1e-7), (
            name
        )


def test_records_of_different_losses_need_to_be_told() -> None:
    model, x = nn.Sequential(loaded_nets.Block()), torch.randn(4, 6)
    chain = MarkovChain.trace(model, x)
    records = [chain.observe(nn.MSELoss(reduction=kind), x, x * 0) for kind in ("mean", "sum")]
    with pytest.raises(InputError, match="reductions"):
        ChainRecord.merge(records)
    both = records[0].gauge + records[1].gauge
    assert ChainRecord.merge(records, "sum").gauge == pytest.approx(both)


@pytest.mark.parametrize("kind", ["safetensors", "pt", "wrapped", "compiled"])
def test_checkpoints_load_and_the_users_model_stays(tmp_path: Path, kind: str) -> None:
    source, model = (nn.Sequential(loaded_nets.Block(), nn.BatchNorm1d(6)) for _ in range(2))
    state, before = source.state_dict(), copy.deepcopy(model.state_dict())
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    if kind == "safetensors":
        save_file(state, path)
    else:
        named = {"_orig_mod.module." * (kind == "compiled") + k: v for k, v in state.items()}
        torch.save(named if kind == "pt" else {"epoch": 3, "state_dict": named}, path)
    found = make_subject(model, (torch.randn(4, 6),), checkpoint=path).model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in found.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_checkpoints_that_do_not_fit_are_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(loaded_nets.Block(), nn.BatchNorm1d(6))
    before = copy.deepcopy(model.state_dict())
    state = {name: torch.ones_like(value) for name, value in before.items()}
    for bad, part in (
        ({k: v for k, v in state.items() if k != "0.norm.bias"}, "lacks 0.norm.bias"),
        ({**state, "more": torch.ones(1)}, "holds more besides"),
        ({**state, "0.branch.bias": torch.ones(7)}, r"shape \(7,\), expected \(6,\)"),
    ):
        torch.save(bad, tmp_path / "bad.pt")
        with pytest.raises(InputError, match=part):
            load_weights(model, tmp_path / "bad.pt")
    for name in ("a.safetensors", "a.pt"):
        (tmp_path / name).write_bytes(b"junk")
        with pytest.raises(InputError, match="cannot be read"):
            load_weights(model, tmp_path / name)
    with pytest.raises(InputError, match="no file"):
        load_weights(model, tmp_path / "none.pt")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tied_weights_may_stand_under_one_name(tmp_path: Path) -> None:
    source, model = tied(), tied()
    save_file({"table.weight": source.table.weight.detach()}, tmp_path / "t.safetensors")
    load_weights(model, tmp_path / "t.safetensors")
    assert torch.equal(model.head.weight, source.head.weight)
    assert model.head.weight is model.table.weight


def test_checkpoints_fill_models_without_values(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    source = nn.Sequential(tied(), nn.BatchNorm1d(3))
    torch.save(source.state_dict(), tmp_path / "t.pt")
    for build in (without_weights, lambda: torch.device("meta")):
        with build():
            model = nn.Sequential(tied(), nn.BatchNorm1d(3))
        load_weights(model, tmp_path / "t.pt")
        assert model[0].head.weight is model[0].table.weight and not len(recwarn)  # type: ignore[union-attr]
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in source.state_dict().items())


def test_batches_in_all_their_forms() -> None:
    x, y, model = torch.randn(70, 6), torch.randint(0, 3, (70,)), nn.Linear(6, 3).double()
    for data, sizes in (
        ((x, y), [70]),
        ([(x, y)] * 7, [70] * 4),
        (TensorDataset(x, y), [32, 32, 6]),
        (DataLoader(TensorDataset(x, y), batch_size=20), [20, 20, 20, 10]),
        ({"x": x, "labels": y}, [70]),
    ):
        found = read_batches(model, data, 4)
        assert [len(t) for _, t in found] == sizes
        assert all(
            torch.is_tensor(i) and i.dtype == torch.float64 and i.shape[1] == 6 for i, _ in found
        )
    assert read_batches(model, x, 4)[0][1] is None
    for data, part in (([], "no batch"), (3, "expected batches"), ([3], "expected a tensor")):
        with pytest.raises(InputError, match=part):
            read_batches(model, data, 4)


def test_losses_by_name() -> None:
    scores, classes = torch.randn(4, 7, 5), torch.randint(0, 5, (4, 7))
    by_tokens = F.cross_entropy(scores.flatten(0, 1), classes.flatten())
    for name in ("cross_entropy", "CrossEntropyLoss"):
        assert choose_loss(name)(scores, classes) == pytest.approx(float(by_tokens))
        assert choose_loss(name)({"logits": scores, "more": None}, classes) == pytest.approx(
            float(by_tokens)
        )
    assert choose_loss(None)(scores, classes) == pytest.approx(float(by_tokens))
    assert choose_loss(None)({"loss": scores.mean(), "logits": scores}, None) == scores.mean()
    assert choose_loss("torch.nn:L1Loss")(scores, scores + 2) == pytest.approx(2)
    own = type("Own", (), {"__call__": lambda *_: scores.mean(), "__module__": "zoo"})()
    losses = "mse_loss", F.mse_loss, nn.MSELoss(reduction="sum"), "torch.nn:L1Loss", own
    named = [choose_loss(loss).reduction for loss in losses]
    assert named == ["mean", "mean", "sum", "mean", None]
    wrong = {"cross": "no loss named", "torch.nn:nothing": "There is no", "math:pi": "is a float"}
    for name, part in wrong.items():
        with pytest.raises(InputError, match=part):
            choose_loss(name)
    with pytest.raises(InputError, match="needs targets"):
        choose_loss("mse_loss")(scores, None)


def shifted(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def test_the_loss_of_a_language_model_is_its_own() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=19, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    model, ids = GPT2LMHeadModel(config).eval(), torch.randint(0, 19, (4, 6))
    found = diagnose(model, data={"input_ids": ids, "labels": ids}, names="transformer.h.0.*")
    assert found.subject.loss.says == "the loss that the model returns"
    subject = make_subject(model, data={"input_ids": ids, "labels": ids}, loss=shifted)
    named = found.chain.observe(subject.loss, *subject.batches[0])
    last = list(model.transformer.h[1].mlp.c_proj.parameters())
    own = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, last)
    exact = sum(float((p.detach() * g).sum()) for p, g in zip(last, own, strict=True))
    for each in (found.record, named):
        assert float(each.gauge[-1]) == pytest.approx(exact, rel=1e-3)


@pytest.mark.slow
def test_commands_take_checkpoint_data_and_loss(tmp_path: Path) -> None:
    path, weights = loaded_nets.__file__, tmp_path / "w.safetensors"
    model, data = loaded_nets.Net(), loaded_nets.loader()
    save_file(model.state_dict(), weights)
    words = [f"{path}:Net", "--checkpoint", str(weights), "--data", f"{path}:loader"]
    words += ["--batches", "3"]
    for loss, function in {
        "cross_entropy": F.cross_entropy,
        f"{path}:focal": loaded_nets.focal,
    }.items():
        code, text = run("diagnose", *words, "--loss", loss, "--json", "-")
        assert code == 0, text
        found = json.loads(text)
        chain = MarkovChain.trace(model, data[0][0])
        record = ChainRecord.merge(chain.observe(function, *batch) for batch in data[:3])
        assert found["samples"] == 24
        assert found["efficiency"] == pytest.approx(record.mean_efficiency, abs=1e-6)
    code, text = run("report", *words, "--loss", "cross_entropy", "-o", str(tmp_path / "r.html"))
    assert code == 0
    assert "Gradients are those of cross_entropy." in (tmp_path / "r.html").read_text()

"""Gradients summed over several passes are those of all their examples at
once, in float64 to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_command import exact, stop_at, weights

from pathspace.training.batches import Batches
from pathspace.training.experiments.tasks import Split
from pathspace.training.penal import penalize
from pathspace.training.recipe import Recipe, prepare
from pathspace.training.trainer import Tick, Trainer

pytestmark = pytest.mark.usefixtures("one_core")


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "gsgd", "gmomentum"])
# 1197 examples: 4 passes of 90 leave 117, which are passes of 90 and of 27;
# 2 of 400 leave one of 397
@pytest.mark.parametrize(("batch_size", "passes"), [(90, 4), (400, 2), (7, 200)])
def test_accumulated_steps_are_those_of_the_joined_batch(
    optimizer: str, batch_size: int, passes: int
) -> None:
    task, seen = exact(), []
    model, chosen = prepare(task, Recipe(optimizer))
    model.register_forward_pre_hook(
        lambda _, args: seen.append(args[0]) if model.training else None
    )
    history = Trainer(task, model, chosen, epochs=2, batch_size=batch_size, accumulate=passes).fit()

    # The oracle: a loop over the joined examples that were seen, without a trainer.
    rows = {
        row.numpy().tobytes(): target
        for row, target in zip(task.train.inputs, task.train.targets, strict=True)
    }
    other, plain = prepare(task, Recipe(optimizer))
    per_epoch, losses = len(seen) // 2, []
    for epoch in range(2):
        part = seen[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sum(map(len, part)) == 1197
        for first in range(0, per_epoch, passes):
            inputs = torch.cat(part[first : first + passes])
            targets = torch.stack([rows[row.numpy().tobytes()] for row in inputs])
            plain.zero_grad()
            loss = task.loss(other(inputs), targets)
            loss.backward()
            plain.step()
            losses.append(loss.item() * len(inputs))
    torch.testing.assert_close(weights(model), weights(other), rtol=1e-9, atol=1e-11)
    assert history.records[1].step == len(losses)
    assert history.records[1].train_loss == pytest.approx(
        sum(losses[len(losses) // 2 :]) / 1197, rel=1e-10
    )


def test_accumulation_meets_the_examples_of_the_larger_batch() -> None:
    task = exact()

    def run(batch_size: int, accumulate: int) -> tuple[Tensor, float, int]:
        model, optimizer = prepare(task, Recipe("gsgd"))
        history = Trainer(
            task, model, optimizer, epochs=2, batch_size=batch_size, accumulate=accumulate
        ).fit()
        assert history.last is not None
        return weights(model), history.last.valid_loss, history.last.step

    small, large = run(50, 6), run(300, 1)
    torch.testing.assert_close(small[0], large[0], rtol=1e-9, atol=1e-11)
    assert small[1] == pytest.approx(large[1], rel=1e-10) and small[2] == large[2] == 8


def test_penal_connection_is_that_of_the_joined_batch() -> None:
    task = exact("digits-images")
    task = replace(task, train=Split(task.train.inputs[:100], task.train.targets[:100]))

    def run(batch_size: int, accumulate: int) -> Tensor:
        # Batch norm would look at the examples of a pass only.
        model = task.make_model(0).eval()
        model.train = lambda mode=True: model  # type: ignore[method-assign]
        penalize(model, task.train.inputs[:2], tau=1e-3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        Trainer(
            task, model, optimizer, epochs=1, batch_size=batch_size, accumulate=accumulate
        ).fit()
        return weights(model)

    torch.testing.assert_close(run(20, 3), run(60, 1), rtol=1e-9, atol=1e-11)


def test_resuming_between_accumulated_steps_is_exact(tmp_path: Path) -> None:
    task = exact()

    def trainer(watch: Callable[[Tick], None] | None) -> Trainer:
        model, optimizer = prepare(task, Recipe("gmomentum"))
        options = {"epochs": 2, "batch_size": 50, "accumulate": 7, "checkpoint_every": 2}
        return Trainer(task, model, optimizer, folder=tmp_path, watch=watch, **options)

    whole, steps = trainer(None), []
    whole.fit()
    with pytest.raises(KeyboardInterrupt):
        trainer(stop_at(7)).fit()
    rest = trainer(lambda tick: steps.append((tick.step, tick.steps)))
    rest.fit(resume=True)
    assert steps == [(7, 8), (8, 8)] and torch.equal(weights(rest.model), weights(whole.model))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("size", "batch_size", "accumulate"), [(23, 4, 2), (7, 7, 1), (9, 4, 3), (1, 4, 2), (12, 3, 4)]
)
def test_shares_count_every_example_once(
    size: int, batch_size: int, accumulate: int, world: int
) -> None:
    for skip in (0, 1):
        counted, totals = [], {}
        for rank in range(world):
            batches = Batches(size, batch_size, accumulate=accumulate, rank=rank, world=world)
            batches.skip = skip
            passes = list(zip(batches.shares(), batches, strict=True))
            assert sum(share.last for share, _ in passes) == max(batches.steps - skip, 0)
            step = skip
            for share, rows in passes:
                assert rows and share.examples in (0, len(rows))
                counted += rows[: share.examples]
                totals[step] = totals.get(step, 0.0) + share.weight / world
                step += share.last
        assert sorted(counted) == list(range(min(skip * batch_size * accumulate, size), size))
        assert all(total == pytest.approx(1.0) for total in totals.values())

"""What watching a run costs: a small GPT on the King James Bible under the Trainer
of transformers, in pairs.

``PYTHONPATH=tests python -m benchmarks.watching`` trains each pair with and without the callback
(two minutes on one core), in the process's own time, and writes ``docs/data/watching.json`` and the
paragraph of ``docs/watching.md``.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from benchmarks.figures import keep, page_of, write
from pathspace.diagnostics import transformers_callback
from pathspace.diagnostics.run.watching import EVERY
from pathspace.training.experiments.data import bible_text, given

NAME, PAGE = "watching", "watching.md"
LENGTH, BATCH = 64, 16


def text() -> list[dict[str, torch.Tensor]]:
    """Pieces of the Bible as bytes."""
    verses = bible_text(given("watching", None, "bible") / "bible.data")
    letters = torch.frombuffer(bytearray(verses.encode()), dtype=torch.uint8).long()
    pieces = letters[: len(letters) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces[:20_000]]


class StepTimes(TrainerCallback):  # type: ignore[misc]
    """Seconds of every step, from its batch to its update, in the process's own time."""

    def __init__(self) -> None:
        self.began, self.seconds = 0.0, list[float]()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins."""
        self.began = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Its weights have moved."""
        self.seconds.append(time.process_time() - self.began)


def trained(data: Any, steps: int, watched: bool, **options: Any) -> tuple[float, Any, list[float]]:
    """Seconds of a run, what the callback has seen, and the seconds of every step."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    callback, times = transformers_callback(**options), StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=1e-3,
            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
            logging_strategy="no",
        )  # fmt: skip
        callbacks = [times, callback] if watched else [times]
        trainer = Trainer(
            GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=callbacks
        )
        start = time.process_time()
        trainer.train()
        return time.process_time() - start, callback.watch, times.seconds


def step_costs(data: Any, steps: int = 48, every: int = 4) -> dict[str, float]:
    """What a measured step takes more than its neighbours, and what tracing takes."""
    _, watch, seconds = trained(data, steps, True, every=every, structure=True)
    plain = [t for step, t in enumerate(seconds, 1) if not watch.due(step)]
    full = [t for step, t in enumerate(seconds, 1) if step > every and watch.due(step)]
    row = statistics.median(full) - statistics.median(plain)
    return {
        "weights": sum(p.numel() for p in watch.model.parameters()),
        "step": statistics.median(plain),
        "row": row,
        "tracing": seconds[0] - statistics.median(plain) - row,
        "share": row / statistics.median(plain) / EVERY,
    }


def main(steps: int = 200) -> None:
    """Measure, and write the data and the paragraph of the page."""
    torch.set_num_threads(1)
    data, rows = text(), list[dict[str, Any]]()
    trained(data, 3, True, structure=True)  # imports
    costs = step_costs(data)
    for order in ((False, True), (True, False)):
        runs = {watched: trained(data, steps, watched) for watched in order}
        overhead = runs[True][0] / runs[False][0] - 1
        rows.append({"steps": steps, "overhead": overhead, "traced": runs[True][1].preparation > 0})
    found = {**costs, "pairs": rows}
    print(found)
    keep(NAME, found)
    write(PAGE, NAME, paragraph(found))


def paragraph(found: dict[str, Any]) -> str:
    """The figures as the page on watching says them."""
    first = (EVERY - 1).bit_length()
    early = first * found["row"]
    enough = math.ceil(early / (0.02 * found["step"] - found["row"] / EVERY) / 10) * 10
    facts = {"first": first, "early": early, "enough": enough, "batch": BATCH, "length": LENGTH}
    return page_of("watching", found=found, **facts).rstrip()


if __name__ == "__main__":
    main()

"""What watching a run costs: a small GPT on the King James Bible under the Trainer of transformers, in pairs.

``PYTHONPATH=tests python -m benchmarks.watching`` trains each pair with and without the callback (two minutes on one
core), in the process's own time, and writes ``docs/data/watching.json``; ``--page FILE`` keeps a page.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from pathspace.diagnostics import transformers_callback
from pathspace.files import replacing
from pathspace.training.experiments.data import bible_text, given

DATA = Path(__file__).parent.parent.parent / "docs" / "data" / "watching.json"
LENGTH, BATCH = 64, 16


def text() -> list[dict[str, torch.Tensor]]:
    """Pieces of the Bible as bytes."""
    verses = bible_text(given("watching", None, "bible") / "bible.data")
    letters = torch.frombuffer(bytearray(verses.encode()), dtype=torch.uint8).long()
    pieces = letters[: len(letters) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces[:20_000]]


def trained(data: Any, steps: int, watched: bool, page: str | None, structure: bool | None) -> tuple[float, Any]:
    """Seconds of a run, and what the callback has seen."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, bos_token_id=None, eos_token_id=None
    )
    callback = transformers_callback(page=page, structure=structure)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=1e-3, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(
            GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[callback] if watched else []
        )
        start = time.process_time()
        trainer.train()
        return time.process_time() - start, callback.watch


def main(steps: int = 400, pairs: int = 2, page: Annotated[str | None, typer.Option()] = None) -> None:
    """Measure, and write the data."""
    torch.set_num_threads(1)
    data, rows = text(), []
    trained(data, 3, True, None, True)  # imports
    for number in range(pairs):
        seconds: dict[bool, float] = {}
        for watched in (True, False) if number % 2 else (False, True):
            seconds[watched], watch = trained(data, steps, watched, page, None)
            rows += [watch] if watched else []
        watch = rows.pop()
        rows.append(
            {
                "steps": steps,
                "step": seconds[False] / steps,
                "overhead": seconds[True] / seconds[False] - 1,
                "rows": len(watch.rows),
                "row": statistics.median(row["seconds"] for row in watch.rows),
                "preparation": watch.preparation,
                "alarms": [alarm.kind for alarm in watch.alarms],
                "loss": [watch.rows[0]["loss"], watch.rows[-1]["loss"]],
            }
        )
        typer.echo(json.dumps(rows[-1]))
    with replacing(DATA) as temporary:
        temporary.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

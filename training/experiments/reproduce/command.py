"""The work of ``pathspace reproduce`` after its options were read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from pathspace.errors import InputError
from pathspace.files.writing import ensure_writable, make_folder, save_picture, write_text

from ..json_lines import read_lines
from ..names import expect_known
from ..trainer import lightning_trainer
from . import EXPERIMENTS
from .baselines import published
from .page import in_words, render, render_recipes, render_statements, with_tables
from .recipes import load_cells
from .record import Record, Table, judged_again
from .statements import Judged, judge_all, load_statements
from .trial import Outcome, Trial, together
from .trial_cache import TRIALS, TrialCache, connected, run_all
from .tuning import TUNING_SEEDS, Experiment, Setting, fresh_seeds

COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=20),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)


def run_reproduction(
    name: str,
    console: Console,
    *,
    out: str = "reproduction",
    scale: str = "embedded",
    data: str | None = None,
    jobs: int = 1,
    seeds: int | None = None,
    most_seeds: int | None = None,
    shrink: int = 1,
    device: str = "cpu",
    cluster: str | None = None,
) -> Record | None:
    """Run one experiment and write record, picture and page; or write one of :data:`PAGES`."""
    folder = Path(out)
    if name in PAGES:
        PAGES[name](folder, console)
        return None
    expect_known("experiment", name, EXPERIMENTS)
    experiment = EXPERIMENTS[name]
    check_scale(experiment, scale, data)
    if cluster is not None and (jobs > 1 or not experiment.trials):
        raise InputError(
            f"'{name}' with --jobs {jobs} found --cluster, whose workers take the place of"
            " processes, expected an experiment with trials and no --jobs; leave one of them out."
        )
    by_power = scale == "fetched" and seeds is None
    if most_seeds is not None and not by_power:
        raise InputError(
            "--most-seeds bounds the number of seeds that their spread asks for, which --scale"
            " fetched without --seeds has alone; leave it out."
        )
    # before anything is computed: the device has to be there
    lightning_trainer(device=device)
    first = (experiment.full_seeds if scale == "full" else None) or experiment.seeds
    setting = Setting(
        run=lambda _: [],
        scale=scale,
        data=Path(data) if data else None,
        seeds=fresh_seeds(seeds or min(first, most_seeds or first)),
        # experiments of several hours start with one seed per rate, and end with the
        # necessary number of seeds
        tuning_seeds=TUNING_SEEDS[:1] if scale == "fetched" else TUNING_SEEDS,
        by_power=by_power,
        most_seeds=most_seeds,
        shrink=shrink,
        device=device,
    )
    journal = None
    if experiment.journal or scale == "fetched":
        journal = folder / (experiment.journal or f"{name}-trials.jsonl")
    make_folder(folder)
    ensure_writable(folder.with_suffix(".md"))
    # Trials are stored separately from the records, so that an interrupted experiment can continue.
    cache = TrialCache(TRIALS, journal)

    def run(trials: Sequence[Any]) -> list[Any]:
        placed = [setting.placed(trial) for trial in trials]
        with Progress(*COLUMNS, console=console) as progress:
            bar = progress.add_task("runs", total=len({*placed}))

            def done(trial: Any) -> None:
                progress.update(bar, advance=1, description=trial.label)

            return run_all(placed, cache, jobs, done, elsewhere)

    with connected(cluster) if cluster else nullcontext() as elsewhere:
        record = experiment.run(replace(setting, run=run))
    # trials of an earlier run may come from other code or another computer
    record = replace(record, versions=together(cache.origins) or record.versions)
    record.write(folder / f"{name}.json")
    save_picture(experiment.draw(record), folder / f"{name}.png")
    _write_pages(folder)
    show(record, console)
    console.print(
        f"Wrote {folder / name}.json, {folder / name}.png and {folder.with_suffix('.md')}.",
        highlight=False,
    )
    return record


def _write_again(folder: Path, console: Console) -> None:
    """Write records, pictures and pages again, from the records and journals."""
    if not (known := records(folder)):
        raise InputError(
            f"There is no record in '{folder}' to write a page of; run an experiment first, or name"
            " the folder with --out."
        )
    ensure_writable(folder.with_suffix(".md"))
    for record in known:
        again = up_to_date(record, EXPERIMENTS[record.name], folder / f"{record.name}-trials.jsonl")
        judged_again(again).write(folder / f"{record.name}.json")
        save_picture(EXPERIMENTS[record.name].draw(record), folder / f"{record.name}.png")
    _write_pages(folder)
    console.print(f"Wrote {folder.with_suffix('.md')} from {len(known)} records.", highlight=False)


def _write_pages(folder: Path) -> None:
    """Write the page of all records, and that of all statements where there is one."""
    _write(folder.with_suffix(".md"), render(records(folder), folder.name, folder))
    if folder.with_name("claims.md").is_file():
        _write_statements(folder)


def _write_statements(folder: Path) -> list[Judged]:
    """Judge all statements; write their page, and the tables in that of errata."""
    judged = judge_all(load_statements(), folder)
    text = render_statements(judged, Path(os.path.relpath(folder)))
    _write(folder.with_name("claims.md"), text)
    if (errata := folder.with_name("errata.md")).is_file():
        _write(errata, with_tables(errata.read_text(encoding="utf-8"), load_statements()))
    return judged


def _write_claims(folder: Path, console: Console) -> None:
    said = in_words(_write_statements(folder))
    console.print(f"Wrote {folder.with_name('claims.md')}: {said}.", highlight=False)


def _write_recipes(folder: Path, console: Console) -> None:
    _write(page := folder.with_name("paper-recipes.md"), render_recipes())
    console.print(f"Wrote {page}: {len(load_cells())} cells.", highlight=False)


def _write(page: Path, text: str) -> None:
    write_text(text.removesuffix("\n"), str(page))


PAGES = {"page": _write_again, "claims": _write_claims, "recipes": _write_recipes}


def check_scale(experiment: Experiment, scale: str, data: str | None) -> None:
    """Refuse a scale that an experiment does not have, and the paper's setting without its data."""
    name, needs = experiment.name, experiment.needs
    if (scale == "full" and not needs) or (scale == "fetched" and not experiment.fetched):
        raise InputError(f"Experiment '{name}' has no --scale {scale}; leave it out.")
    if scale == "full" and (data is None or not Path(data).is_dir()):
        given = "The" if data is None else f"There is no folder '{data}': the"
        raise InputError(
            f"{given} paper's setting of '{name}' needs {needs}; give their folder with --data DIR,"
            " or leave out --scale full."
        )


def records(folder: Path) -> list[Record]:
    """Return the records in a folder, in the order of :data:`EXPERIMENTS`."""
    return [
        Record.read(folder / f"{name}.json")
        for name in EXPERIMENTS
        if (folder / f"{name}.json").is_file()
    ]


def show(record: Record, console: Console) -> None:
    """Print our figures and the verdicts."""
    ours = RichTable(title=record.title, title_justify="left")
    for place, column in enumerate(record.ours.columns):
        ours.add_column(column, justify="right" if place else "left")
    for row in record.ours.rows:
        ours.add_row(*row)
    console.print(ours)
    for claim in record.claims:
        why = claim["nothing"]
        if not why and claim["verdict"] == "undecided":
            why = f"needs about {claim['needed']} repetitions"
        said = f"{claim['statement']}: [bold]{claim['verdict']}[/]{f' ({why})' * bool(why)}"
        console.print(said, highlight=False)


def up_to_date(record: Record, experiment: Experiment, journal: Path) -> Record:
    """Return a record as today's code describes it, from the journal: with today's list of
    differences and published baselines. Where the journal lacks a run, or arms end with other
    figures, it stays.
    """
    if not experiment.trials or record.scale != "fetched" or not journal.is_file():
        return record
    # (of several lines of one trial, the last)
    known = {
        trial_of(line["trial"]): Outcome.from_dict(line["outcome"]) for line in read_lines(journal)
    }
    setting = Setting(
        run=lambda trials: [known[trial] for trial in trials],
        scale=record.scale,
        seeds=fresh_seeds(max(len(arm["tests"]) for arm in record.data["arms"])),
        tuning_seeds=TUNING_SEEDS[:1],
        bars=published,
    )
    try:
        today = experiment.run(setting)
    except (KeyError, InputError):
        return record
    if _results(today) != _results(record):
        return record
    return replace(
        record,
        differs=today.differs,
        ours=_with_published(record.ours, today.ours),
        claims=tuple(
            old | {"nothing": new["nothing"] or old["nothing"]}
            for old, new in zip(record.claims, today.claims, strict=True)
        ),
    )


def trial_of(values: Mapping[str, Any]) -> Trial:
    """Return a trial from the plain values of a journal."""
    # (some lines name a precision, which is the same for all)
    told = {key: value for key, value in values.items() if key != "precision"}
    told["options"] = tuple((key, value) for key, value in told.get("options", ()))
    betas = told.get("betas")
    return Trial(**(told | {"betas": betas and tuple(betas)}))


def _results(record: Record) -> list[object]:
    arms = [(arm["label"], arm["task"], arm["lr"], arm["tests"]) for arm in record.data["arms"]]
    return [*arms, *(claim["statement"] for claim in record.claims)]


def _with_published(ours: Table, today: Table) -> Table:
    told = {row[0]: row for row in today.rows if "published: " in row[0]}
    kept = [row for row in ours.rows if "published: " not in row[0] or row[0] in told]
    names = {row[0] for row in kept}
    return Table(ours.columns, (*kept, *(row for name, row in told.items() if name not in names)))

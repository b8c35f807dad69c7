"""The work of ``pathspace reproduce`` after its options were read."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable

from pathspace.errors import InputError
from pathspace.files.pictures import save
from pathspace.files.writing import ensure_writable, make_folder

from ..names import expect_known
from ..progress import counting
from ..trainer import lightning_trainer
from . import EXPERIMENTS, Experiment, Setting
from .cluster import connected, run_on
from .dry_run import show_missing
from .experiment import TUNING_SEEDS, fresh_seeds
from .page import write_page
from .provenance import together
from .recipes import load_cells
from .recipes.page import write_recipes
from .record import Record, judged_again
from .statements.page import show_statements, write_statements
from .trial_cache import TRIALS, Spread, TrialCache, run_all
from .up_to_date import up_to_date

PAGE, CLAIMS, RECIPES = "page", "claims", "recipes"


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
    minutes: float | None = None,
    dry_run: bool = False,
    cluster: str | None = None,
    precision: str = "32-true",
) -> Record | None:
    """Run one experiment and write its record, its picture and the page of
    all records in the folder.

    Args:
        name: an experiment; ``page`` to write page and pictures again from the records that are
            there; or ``claims`` to judge all statements of the papers by them; or ``recipes`` for a
            page of the papers' recipes.
        console: where to print.
        out: folder of the records; the page is ``out`` with the suffix ``.md``.
        scale: ``embedded``, ``fetched`` or ``full``.
        data: folder of the paper's data.
        jobs: processes.
        seeds: how many seeds are reported; ``None``: as many as the experiment, or the
            spread of the first, asks for.
        most_seeds: at most so many where the spread asks for them; ``None``: no bound.
        shrink: divide budgets by this.
        device: where runs compute.
        minutes: after so many, a contest of many runs begins no further one.
        dry_run: count the runs, and for the paper's setting say what would differ from it; write
            nothing.
        cluster: address or file of a Dask scheduler, whose workers run the trials.
        precision: of the numbers of the runs.

    Returns:
        The record, ``None`` for ``page``, ``claims``, ``recipes`` and a dry run.

    Raises:
        InputError: an unknown name, missing data or records, or a file that cannot be written.
    """
    if name == CLAIMS:
        show_statements(write_statements(Path(out), Path(out).with_name(f"{CLAIMS}.md")), console)
        return None
    if name == RECIPES:
        write_recipes(page := Path(out).with_name(f"paper-{RECIPES}.md"))
        console.print(f"Wrote {page}: {len(load_cells())} cells.", highlight=False)
        return None
    experiment = find(name) if name != PAGE else None
    if experiment is None and not records(Path(out)):
        raise InputError(
            f"There is no record in '{out}' to write a page of; run an experiment first, or name"
            " the folder with --out."
        )
    if experiment is not None:
        check_scale(experiment, scale, data)
    for option, given in (
        ("--cluster", cluster is not None),
        ("--precision", precision != "32-true"),
    ):
        if given:
            check_trials(name, option)
    if cluster is not None and jobs > 1:
        raise InputError(
            f"--jobs {jobs} asks for processes here, --cluster for the workers of a cluster; give"
            " one of them."
        )
    by_power = scale == "fetched" and seeds is None
    if most_seeds is not None and not by_power:
        raise InputError(
            "--most-seeds bounds the number of seeds that their spread asks for, which --scale"
            " fetched without --seeds has alone; leave it out."
        )
    # before anything is computed: the device has to be there
    lightning_trainer(device=device, devices=1, precision=precision)
    folder = Path(out)
    if experiment is None:
        _write_again(folder, console)
        return None
    usual = (experiment.full_seeds if scale == "full" else None) or experiment.seeds
    setting = Setting(
        run=lambda _: [],
        scale=scale,
        data=Path(data) if data else None,
        seeds=fresh_seeds(seeds or min(usual, most_seeds or usual)),
        # experiments of several hours start with one seed per rate, and end with the
        # necessary number of seeds
        tuning_seeds=TUNING_SEEDS[:1] if scale == "fetched" else TUNING_SEEDS,
        by_power=by_power,
        most_seeds=most_seeds,
        shrink=shrink,
        device=device,
        precision=precision,
    )
    journal = None
    if experiment.journal or scale == "fetched":
        journal = folder / (experiment.journal or f"{name}-trials.jsonl")
    if dry_run:
        show_missing(
            experiment,
            setting,
            TrialCache(TRIALS if TRIALS.is_dir() else None, journal),
            console,
        )
        return None
    make_folder(folder)
    ensure_writable(folder.with_suffix(".md"))
    # Trials are stored separately from the records, so that an interrupted experiment can continue.
    cache = TrialCache(TRIALS, journal)
    with connected(cluster) if cluster else nullcontext() as client, counting(console) as progress:
        elsewhere = partial(run_on, client) if client else None
        run = partial(
            run_counted,
            cache=cache,
            jobs=jobs,
            progress=progress,
            setting=setting,
            elsewhere=elsewhere,
            until=time.time() + 60 * minutes if minutes is not None else math.inf,
        )
        record = experiment.run(replace(setting, run=run))
    # trials of an earlier run may come from other code or another computer
    record = replace(record, versions=together(cache.origins) or record.versions)
    record.write(folder / f"{name}.json")
    save(experiment.draw(record), folder / f"{name}.png")
    _write_pages(folder)
    show(record, console)
    console.print(
        f"Wrote {folder / name}.json, {folder / name}.png and {folder.with_suffix('.md')}.",
        highlight=False,
    )
    return record


def _write_again(folder: Path, console: Console) -> None:
    """Write records with today's differences and verdicts, pictures and pages, from the records
    and journals that are there.
    """
    make_folder(folder)
    ensure_writable(folder.with_suffix(".md"))
    for record in (known := records(folder)):
        again = up_to_date(record, EXPERIMENTS[record.name], folder / f"{record.name}-trials.jsonl")
        judged_again(again).write(folder / f"{record.name}.json")
        save(EXPERIMENTS[record.name].draw(record), folder / f"{record.name}.png")
    _write_pages(folder)
    console.print(f"Wrote {folder.with_suffix('.md')} from {len(known)} records.", highlight=False)


def _write_pages(folder: Path) -> None:
    """Write the page of all records, and that of all statements where there is one."""
    write_page(records(folder), folder.with_suffix(".md"))
    if (page := folder.with_name(f"{CLAIMS}.md")).is_file():
        write_statements(folder, page)


def find(name: str) -> Experiment:
    """Return the experiment of this name.

    Raises:
        InputError: there is none.

    Example:
        >>> find("smnist").name
        'smnist'
    """
    expect_known("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def check_scale(experiment: Experiment, scale: str, data: str | None) -> None:
    """Raise an error for a scale that an experiment does not have, and for the paper's
    setting without its data.

    Raises:
        InputError: there is no such scale, no folder was given, or it is not there.

    Example:
        >>> check_scale(find("race"), "full", None)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        pathspace.errors.InputError: Experiment 'race' has no paper's own setting; leave out ...
    """
    if scale == "fetched" and not experiment.fetched:
        having = ", ".join(name for name, other in EXPERIMENTS.items() if other.fetched)
        raise InputError(
            f"Experiment '{experiment.name}' has no setting for fetched data; leave out --scale"
            f" fetched, or take one of: {having}."
        )
    if scale != "full":
        return
    if not experiment.needs:
        having = ", ".join(name for name, other in EXPERIMENTS.items() if other.needs)
        raise InputError(
            f"Experiment '{experiment.name}' has no paper's own setting; leave out --scale full, or"
            f" take one of: {having}."
        )
    if data is None:
        raise InputError(
            f"The paper's setting of '{experiment.name}' needs {experiment.needs}; give their"
            " folder with --data DIR, or leave out --scale full."
        )
    if not Path(data).is_dir():
        raise InputError(
            f"There is no folder '{data}'; --data names the folder with {experiment.needs}."
        )


def check_trials(name: str, option: str) -> None:
    """Raise an error for an option of trials where there are none.

    Raises:
        InputError: the experiment does not consist of trials.
    """
    if name not in EXPERIMENTS or not EXPERIMENTS[name].trials:
        having = ", ".join(name for name, experiment in EXPERIMENTS.items() if experiment.trials)
        raise InputError(
            f"'{name}' has no trials for {option}; leave it out, or take one of: {having}."
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
        needed = (
            f" (needs about {claim['needed']} repetitions)"
            if claim["verdict"] == "undecided"
            else ""
        )
        why = f" ({claim['nothing']})" if claim["nothing"] else needed
        console.print(f"{claim['statement']}: [bold]{claim['verdict']}[/]{why}", highlight=False)


def run_counted(
    trials: Sequence[Any],
    *,
    cache: TrialCache,
    jobs: int,
    progress: Progress,
    setting: Setting,
    elsewhere: Spread | None = None,
    until: float = math.inf,
) -> list[Any]:
    """Run trials behind a progress bar:
    :func:`~pathspace.training.experiments.reproduce.trial_cache.run_all`.
    """
    trials = [setting.placed(trial) for trial in trials]
    bar = progress.add_task("runs", total=len(set(trials)))

    def done(trial: Any, _outcome: Any) -> None:
        progress.update(bar, advance=1, description=trial.label)

    return run_all(trials, cache, jobs, done, elsewhere, until)

"""``pathspace reproduce NAME --dry-run``: what is missing, and about how long it takes."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from .estimate import of_trials
from .estimate_others import OTHERS
from .experiment import Experiment, Setting
from .trial_cache import TrialCache


def show_estimate(
    experiment: Experiment, setting: Setting, cache: TrialCache, console: Console
) -> float:
    """Print how many runs there are, how many are known, and about how long the others take; for
    the paper's own setting also what would differ from it, the data first.

    Runs take as long as those that are known; where none is, a few steps are timed.

    Args:
        experiment: what would be run.
        setting: how, and with how many processes.
        cache: knows trials that have ended.
        console: where to print.

    Returns:
        The minutes.
    """
    with console.status("Timing a few steps where no run is known"):
        if experiment.trials:
            found = of_trials(experiment, setting, cache)
        else:
            found = OTHERS[experiment.name](setting)
    *columns, counted = found.columns
    table = Table(*columns, counted, "seconds each", "minutes", title_justify="left")
    for part in found.parts:
        minutes = part.count * part.seconds / 60
        table.add_row(*part.what, f"{part.count}", f"{part.seconds:.3g}", f"{minutes:.1f}")
    console.print(table)
    minutes = found.seconds / 60
    if counted == "runs":
        minutes /= setting.jobs
        sentence = (
            f"{found.known + found.missing} runs{found.seeds}; {found.known} are known. The others"
            f" take about {minutes:.0f} minutes with --jobs {setting.jobs}."
        )
    else:
        sentence = f"'{experiment.name}' takes about {minutes:.2g} minutes on one thread."
    console.print(sentence, highlight=False, soft_wrap=True)
    if setting.scale == "full" and found.differs:
        data_first = sorted(found.differs, key=lambda line: not line.startswith("Data:"))
        lines = ["Differences from the paper:", *(f"  {line}" for line in data_first)]
        console.print(*lines, sep="\n", highlight=False, markup=False, soft_wrap=True)
    return minutes

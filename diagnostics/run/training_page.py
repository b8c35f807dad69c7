"""An HTML page about a run: its problems with their causes, and its numbers over the steps."""

from __future__ import annotations

from markupsafe import Markup

from ..shared import charts, pages
from ..shared.wording import plural
from .log import RunLog

# title, columns or the prefix of columns, what is shown, logarithmic
CHARTS = (
    ("Loss", ("loss",), "loss", False),
    ("Efficiency of the residual chain", ("efficiency",), "mean cosine with descent", False),
    ("Cosine of each branch with descent", "cosine/", "cosine", False),
    ("Relative step of each tensor", "step/", "|step| / |weights|", True),
    ("Relative step of units", ("unit_step", "unit_step_largest"), "|step| / |weights|", True),
    ("Signal of each layer", "signal/", "RMS of the outputs", True),
    ("Gradient at each layer", "gradient/", "norm", True),
    ("Drift of gauge and conserved quantities", ("gauge_drift", "conserved_drift"), "drift", True),
    ("Size of path values", ("path_value_median", "path_value_largest"), "power of ten", False),
    ("Largest share of dead units in a layer", ("dead_share_largest",), "share", False),
)
# largest number of lines in a chart; of more layers, this many are chosen at equal distances
MOST_LINES = 12


def render(watch: RunLog, running: bool) -> str:
    """The page as self-contained HTML.

    Args:
        watch: the run.
        running: whether the page reloads itself.

    Returns:
        The page.
    """
    return pages.render(
        "run.html.j2",
        name=type(watch.model).__name__,
        verdict=verdict(watch),
        figures=_figures(watch.rows),
        alarms=watch.alarms,
        notes=watch.notes,
        last=watch.rows[-1],
        watch=watch,
        running=running,
    )


def verdict(watch: RunLog) -> str:
    """The alarms in one sentence."""
    found = watch.causes
    if not found:
        return f"Nothing is wrong at {plural(len(watch.rows), 'measured step')} of {watch.steps:,}."
    others = len(watch.alarms) - len(found)
    follow = (
        f", and {plural(others, 'more alarm')} that {'follows' if others == 1 else 'follow'}"
        " from it"
        if others
        else ""
    )
    return (
        f"{plural(len(found), 'cause')} of trouble:"
        f" {', '.join(alarm.kind for alarm in found)}{follow}."
    )


def _figures(rows: list[dict[str, float]]) -> list[tuple[str, Markup]]:
    known = list(dict.fromkeys(name for row in rows for name in row))
    found = []
    for title, wanted, up, log in CHARTS:
        if isinstance(wanted, str):
            names = [name for name in known if name.startswith(wanted)]
            if len(names) > MOST_LINES:
                names = [
                    names[round(i * (len(names) - 1) / (MOST_LINES - 1))] for i in range(MOST_LINES)
                ]
                title += f" ({MOST_LINES} of them)"
            columns = {name: name.removeprefix(wanted) for name in names}
        else:
            columns = {name: name.replace("_", " ") for name in wanted if name in known}
        if any(
            row.get(name, 0) > 0 or (not log and name in row) for row in rows for name in columns
        ):
            found.append((title, charts.lines(rows, columns, title, up, log)))
    return found

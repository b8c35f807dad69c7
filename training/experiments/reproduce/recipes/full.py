"""The run of a recipe: ``--scale full``."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pathspace.errors import InputError

from ...task import task_options
from ...tasks.files import find, read_bytes, read_text
from ...tasks.papers import WMT
from ..trial import Trial, task_data
from ..tuning import Arm, Setting
from .cells import NONE, ROOT, Cell, table_cells
from .compare import BETAS, EPS, NETWORKS, OPTIMIZERS, OPTIONS, describe, differences

# data sets by the digests of their files: several have one format
KNOWN: dict[str, dict[str, Any]] = tomllib.loads(
    (ROOT / "digests.toml").read_text(encoding="utf-8")
)
# the learning rate of the original transformer when its warm-up ends, and pairs of WMT-16's news
ORIGINAL_RATE, WMT_PAIRS = "(width x steps of warm-up)^(-1/2)", 4_548_885


def runnable(cell: Cell) -> str:
    """Return the reason why this library cannot train a cell, or an empty text."""
    if why := cell.ours.get("why"):
        return str(why)
    return "" if "task" in cell.ours else "This library has no task of this kind."


def full_trial(cell: Cell, data: Path | str | None = None) -> Trial:
    """Return the run that a recipe asks for, at the first of its learning rates and seed 0."""
    if why := runnable(cell):
        raise InputError(f"The cell '{cell.name}' cannot be trained here: {why}")
    wanted = (cell.value("optimizer"), cell.value("momentum"), cell.value("path_space"))
    kinds = [kind for kind, known in OPTIMIZERS.items() if known == wanted]
    if not kinds:
        raise InputError(
            f"The cell '{cell.name}' needs {wanted[0]} with momentum {wanted[1]} and {wanted[2]} in"
            " path space, which the trainer does not have."
        )
    cell = settled(cell, data)
    schedule, epochs = cell.value("schedule"), cell.value("epochs")
    if schedule in ("cosine", "inverse-root"):
        schedule = f"{schedule} {cell.value('warmup') / epochs:.10g}"
    # of several decays the paper tunes over, the one its file names
    decay = cell.fill["decay"] if isinstance(cell.value("decay"), list) else cell.value("decay")
    return Trial(
        task=cell.ours["task"],
        optimizer=kinds[0],
        lr=cell.value("rates")[0],
        seed=0,
        epochs=epochs,
        batch_size=cell.value("batch"),
        init="unit-skeleton" if cell.value("start") == "unit skeleton" else "default",
        tau=cell.value("tau"),
        options=_options(cell, data),
        schedule=schedule,
        clip=None if cell.value("clip") == NONE else cell.value("clip"),
        decay=decay,
        augment=cell.value("augmentation"),
        betas=_unless(cell.value("betas"), (NONE, list(BETAS))),
        eps=_unless(cell.value("eps"), (NONE, EPS)),
    )


def _unless(value: Any, plain: Sequence[Any]) -> Any:
    """Return a setting of an optimizer, ``None`` where it has it by itself."""
    return None if value in plain else tuple(value) if isinstance(value, list) else value


def settled(cell: Cell, data: Path | str | None = None) -> Cell:
    """Return a cell with a number in place of the original transformer's learning rate, which
    follows from the width and the steps of the warm-up (Vaswani et al., section 5.3); without a
    folder there are as many training pairs as in the news of WMT-16.
    """
    if cell.recipe["rates"] != ORIGINAL_RATE:
        return cell
    steps = cell.value("warmup") * -(-_pairs(data) // cell.value("batch"))
    rate = float(f"{(cell.value('width') * steps) ** -0.5:.3g}")
    return replace(cell, recipe={**cell.recipe, "rates": [rate]})


@cache
def _pairs(data: Path | str | None) -> int:
    if data is None:
        return WMT_PAIRS
    return len(read_text(find(Path(data), ("train.en",), WMT), WMT).splitlines())


def full_arm(label: str, cell: Cell, setting: Setting) -> Arm:
    """Return the contender of a recipe, with its learning rates."""
    trial = full_trial(cell, setting.data)
    rates = tuple(settled(cell, setting.data).value("rates"))
    said = cell.value("decay")
    # (of an optimizer without weight decay there is none to choose)
    decays = tuple(said) if isinstance(said, list) and trial.decay else ()
    return Arm(label, replace(trial, epochs=setting.budget(trial.epochs)), rates, decays)


def full_arms(table: str, setting: Setting) -> tuple[dict[tuple[str, str], Arm], list[str]]:
    """Return the contenders of all cells of a table that can be trained, by row and column; and a
    sentence for each reason why others are not.
    """
    arms: dict[tuple[str, str], Arm] = {}
    left: dict[str, list[str]] = {}
    for place, cell in table_cells(table).items():
        if why := runnable(cell) or _missing(cell, setting):
            left.setdefault(why, []).append(", ".join(place))
        else:
            arms[place] = full_arm(": ".join(place), cell, setting)
    if not arms:
        raise InputError(f"No cell of {table} can be trained here: {next(iter(left))}")
    return arms, [f"Not trained ({'; '.join(cells)}): {why}" for why, cells in left.items()]


def _missing(cell: Cell, setting: Setting) -> str:
    """Return the sentence with which a cell's task refuses the folder of data, if it does."""
    if setting.data is None:
        return ""
    try:
        trial = full_trial(cell, setting.data)
        task_data(trial.task, trial.options)
    except InputError as error:
        return str(error)
    return ""


def listed(
    pairs: Sequence[tuple[Cell, Arm]], setting: Setting, seeds: int | None = None
) -> tuple[str, ...]:
    """List differences from recipes, of all contenders first; others end with their names."""
    found: dict[str, list[str]] = {}
    for cell, arm in pairs:
        trial = setting.placed(arm.base)
        counts = seeds or len(setting.seeds), len(setting.tuning_seeds)
        run = describe(trial, arm.rates, *counts, arm.decays)
        lines = []
        if setting.scale == "full" and setting.data is not None:
            # other data may have the same format
            run["data"], unchecked = found_in(setting.data, trial.task, run["data"])
            lines = [unchecked] * bool(unchecked)
        for line in (*lines, *differences(settled(cell, setting.data), run)):
            found.setdefault(line, []).append(arm.label)
    common = [line for line, labels in found.items() if len(labels) == len(pairs)]
    return (
        *common,
        *(
            f"{line} ({'; '.join(_grouped(labels, [arm.label for _, arm in pairs]))})"
            for line, labels in found.items()
            if line not in common
        ),
    )


def _grouped(labels: Sequence[str], every: Sequence[str]) -> list[str]:
    """Write labels "group: name" shortly: whole groups, and names of every group, once."""
    if not all(": " in label for label in every):
        return list(labels)
    short = []
    for label in labels:
        group, _, name = label.partition(": ")
        mine = [one for one in every if one.startswith(f"{group}: ")]
        same = [one for one in every if one.endswith(f": {name}")]
        whole, everywhere = {*mine} <= {*labels}, len(same) > 1 and {*same} <= {*labels}
        short.append(group if whole and len(mine) > 1 else name if everywhere else label)
    return list(dict.fromkeys(short))


def _options(cell: Cell, data: Path | str | None) -> tuple[tuple[str, Any], ...]:
    task = cell.ours["task"]
    known, model = task_options(task), cell.value("model")
    networks = {str(said["model"]): network for network, said in NETWORKS.items()}
    if "network" in known and model not in networks:
        raise InputError(
            f"The cell '{cell.name}' has the model '{model}', expected one of:"
            f" {', '.join(networks)}; correct its file."
        )
    network, layers = networks.get(model), cell.value("layers")
    given = {
        **{option: cell.value(key) for option, key in OPTIONS.items()},
        "network": network,
        # the first layer of a recurrent network is not recurrent
        "depth": layers - 1 if network == "recurrent" else layers,
        "original": cell.value("normalisation") == "layer norm after the sum",
        "overlapping": "over 3 x 3" in str(cell.value("halving")),
        "reverse": cell.ours.get("reverse"),
        "data": None if data is None else str(data),
    }
    # the options of text models that are the paper's already are no options of their tasks
    return tuple(
        (key, value) for key, value in given.items() if key in known and known[key] != value
    )


def found_in(folder: Path, task: str, wanted: str) -> tuple[str, str]:
    """Say which data a task of the papers reads from a folder."""
    candidates = [name for name, known in KNOWN.items() if task in known["tasks"]]
    if not candidates:
        return (
            wanted,
            f"Data: no digests of {wanted} are known here, so the files were not checked.",
        )
    own = candidates[0]
    for name in candidates:
        if _matches(folder, name):
            return wanted.replace(own, name), ""
    return f"files that are not recognised as {own}", ""


def _matches(folder: Path, name: str) -> bool:
    """Whether those of a data set's files that are there have its digests."""
    inner = folder / KNOWN[name].get("folder", "")
    place = inner if inner.is_dir() else folder
    found = {file: _digest(place, file) for file in KNOWN[name]["files"]}
    there = {file: digest for file, digest in found.items() if digest}
    return bool(there) and there.items() <= KNOWN[name]["files"].items()


@cache
def _digest(folder: Path, file: str) -> str:
    """The MD5 of a file's unpacked contents; empty where it is not there."""
    try:
        content = read_bytes(find(folder, (file,), ""), "")
    except InputError:
        return ""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()

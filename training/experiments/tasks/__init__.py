"""Tasks: data, model, loss and metric under one name; all optimizers solve the same problem.

Options have the same names everywhere: ``hidden`` is the size of the model, ``layers`` or ``depth``
its layers or blocks, ``length`` or ``longest`` the tokens of an example, ``limit`` and ``tests``
the numbers of examples, and ``data`` the user's folder, in place of fetched data.
"""

from ..task import Split, Task, load_task, register_task, task_names
from . import digits, fetched, images, papers, translation

__all__ = ["Split", "Task", "load_task", "register_task", "task_names"]
__all__ += ["digits", "fetched", "images", "papers", "translation"]

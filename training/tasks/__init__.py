"""Tasks: data, model, loss and metric under one name, so that every optimizer meets the same problem."""

from training.tasks.digits import digits_rows
from training.tasks.task import Split, Task, load_task, register_task, task_names

__all__ = ["Split", "Task", "digits_rows", "load_task", "register_task", "task_names"]

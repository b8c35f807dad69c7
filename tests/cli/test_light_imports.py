"""What needs no torch does not import it: a help text and a refusal answer in a
fraction of torch's own import.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from pathspace.training.experiments import names
from pathspace.training.experiments.reproduce import EXPERIMENTS
from pathspace.training.experiments.tasks import task_names

HEAVY = {"torch", "numpy", "scipy", "sympy", "matplotlib", "sklearn"}


def imported(code: str) -> tuple[set[str], str]:
    """Run code in an interpreter of its own; return the heavy packages that it has
    imported, and what it said.
    """
    tail = "\nfinally:\n    import sys; print('IMPORTED', *sys.modules)"
    body = "try:\n    " + code.replace("\n", "\n    ") + tail
    done = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, check=False, timeout=120
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("IMPORTED"))
    return HEAVY & set(line.split()), done.stderr


@pytest.mark.parametrize("package", ["pathspace", "pathspace.diagnostics", "pathspace.training"])
def test_packages_import_nothing_heavy(package: str) -> None:
    assert imported(f"import {package}; dir({package})") == (set(), "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--help", ""),
        ("train --help", ""),
        ("verfy", "No such command 'verfy' (did you mean 'verify'?)"),
        ("train digit-rows", "There is no task 'digit-rows' (did you mean digits-rows"),
        ("train ptbb", "There is no task 'ptbb' (did you mean ptb?)"),
        ("reproduce rce", "There is no experiment 'rce' (did you mean race?)"),
        ("data fetch bibel", "There is no data set 'bibel' (did you mean bible?)"),
    ],
)
def test_help_and_refusals_import_nothing_heavy(words: str, sentence: str) -> None:
    code = (
        f"import sys; sys.argv = ['pathspace', *{words.split()}]\nfrom pathspace.cli.main import"
        " main\nmain()"
    )
    heavy, said = imported(code)
    assert not heavy and sentence in said and said.count("\n") == bool(sentence)


def test_light_names_are_those_that_exist() -> None:
    assert set(names.TASKS) == set(task_names())
    assert (*EXPERIMENTS, "page", "claims", "recipes") == names.EXPERIMENTS


@pytest.mark.parametrize(
    "module", ["pathspace.cli.main", "typer", "pathspace.training.experiments.cli"]
)
def test_an_interrupt_while_the_command_is_imported_is_one_line(module: str) -> None:
    code = f"""
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.argv = ["pathspace", "train", "digits-rows"]
from pathspace.cli.start import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "",
        "Error: Interrupted before the end.\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize("module", ["pathspace.inference.registry", "pathspace.diagnostics.signal"])
def test_the_table_of_operations_is_complete_whoever_reads_it_first(module: str) -> None:
    code = (
        f"import {module}\nfrom pathspace.inference.registry import FACTS\nseen = len(FACTS)\n"
        "import pathspace.inference.rules\nassert 300 < seen == len(FACTS), (seen, len(FACTS))"
    )
    assert imported(code)[1] == ""

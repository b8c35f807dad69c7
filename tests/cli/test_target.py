"""A TARGET becomes a model and example inputs; whatever is wrong with it is
one sentence with a way out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import importable
from torch import nn

from pathspace.cli.target import load_target, parse_input
from pathspace.errors import InputError

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x)

class Pair(nn.Module):
    def forward(self, a, b=None):
        return a if b is None else a + b

class Silent(nn.Module):
    def forward(self):
        return torch.ones(2)

class Wide(nn.Module):
    def __init__(self, width, depth):
        super().__init__()

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, "four")

class Nothing:
    pass

net = Net()
double = nn.Linear(3, 2).double()
pair, silent = Pair(), Silent()
number = 7

class Holder:
    net = Net()

def build():
    return Net()

def with_tensor():
    return Net(), torch.ones(4, 3)

def with_tuple():
    return Pair(), (torch.ones(2), torch.zeros(2))

def with_list():
    return Pair(), [torch.ones(2), torch.zeros(2)]

def with_dict():
    return Pair(), {"b": torch.ones(2), "a": torch.zeros(2)}

def with_nothing():
    return Silent(), ()

def wrong_example():
    return Net(), 3

def wrong_keys():
    return Net(), {0: torch.ones(2)}

def wrong_name():
    return Pair(), {"a": torch.ones(2), "c": torch.ones(2)}

def wrong_result():
    return None

def needs(width):
    return Net()

def optional(width=3):
    return Net()

def fails():
    return [][0]

def leaves():
    raise SystemExit(3)

def fails_with_a_book():
    raise RuntimeError("first line\\nsecond line " + "word " * 200)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable current folder with ``nets.py`` in it; imports are forgotten afterwards."""
    yield from importable(tmp_path, monkeypatch, "nets", NETS)


def complaint(spec: str, *inputs: str) -> str:
    """The message about a target, after checking that it is one sentence on one line."""
    with pytest.raises(InputError) as error:
        load_target(spec, inputs)
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert ". " not in text.replace(" ... ", " ").replace(" ...)", ")")
    assert len(text) < 700
    return text


@pytest.mark.parametrize("place", ["nets", "nets.py", "./nets.py"])
@pytest.mark.parametrize("name", ["net", "Net", "build", "optional", "Holder.net"])
def test_modules_classes_and_functions(folder: Path, place: str, name: str) -> None:
    target = load_target(f"{place}:{name}", ["5x3"])
    assert type(target.model).__name__ == "Net"
    assert target.kwargs == {}
    assert [tuple(tensor.shape) for tensor in target.args] == [(5, 3)]
    assert target.model(*target.args).shape == (5, 2)


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("with_tensor", [torch.ones(4, 3)], {}),
        ("with_tuple", [torch.ones(2), torch.zeros(2)], {}),
        ("with_list", [torch.ones(2), torch.zeros(2)], {}),
        ("with_dict", [], {"b": torch.ones(2), "a": torch.zeros(2)}),
        ("with_nothing", [], {}),
        ("silent", [], {}),
    ],
)
def test_example_inputs_of_the_target(
    folder: Path, name: str, args: list[torch.Tensor], kwargs: dict[str, torch.Tensor]
) -> None:
    target = load_target(f"nets:{name}")
    assert list(map(torch.Tensor.tolist, target.args)) == [tensor.tolist() for tensor in args]
    assert {key: value.tolist() for key, value in target.kwargs.items()} == {
        key: value.tolist() for key, value in kwargs.items()
    }


def test_the_seed_decides_weights_and_inputs_and_global_state_is_kept(folder: Path) -> None:
    def state(seed: int) -> list[list[float]]:
        target = load_target("nets:Net", ["2x3"], seed=seed)
        return [target.model.layer.weight.flatten().tolist(), target.args[0].flatten().tolist()]

    before = torch.random.get_rng_state()
    first, again, other = state(1), state(1), state(2)
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("2x3", (2, 3), None),
        ("5", (5,), None),
        ("2x3:float64", (2, 3), torch.float64),
        ("2x3:bfloat16", (2, 3), torch.bfloat16),
        ("2x3:complex64", (2, 3), torch.complex64),
        ("2x16:int64", (2, 16), torch.int64),
        ("2x16:uint8", (2, 16), torch.uint8),
        ("2x16:bool", (2, 16), torch.bool),
    ],
)
def test_inputs_are_read(text: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    assert parse_input(text) == (shape, dtype)
    (tensor,) = load_target("torch.nn:Identity", [text]).args
    assert (tensor.shape, tensor.dtype) == (shape, dtype or torch.float32)


def test_inputs_take_the_dtype_and_device_of_the_model(folder: Path) -> None:
    assert load_target("nets:double", ["2x3"]).args[0].dtype == torch.float64
    assert load_target("nets:double", ["2x3:float32"]).args[0].dtype == torch.float32
    (folder / "elsewhere.py").write_text(
        "from torch import nn\nnet = nn.Linear(3, 2, device='meta')\n"
    )
    assert load_target("elsewhere:net", ["2x3"]).args[0].device.type == "meta"


def test_several_inputs_come_in_order(folder: Path) -> None:
    shapes = [tuple(tensor.shape) for tensor in load_target("nets:pair", ["2", "3:int64"]).args]
    assert shapes == [(2,), (3,)]


@pytest.mark.parametrize(
    "text", ["", "x", "2x", "2 x 3", "-2", "2.5", "2;3", "2x3x", "9" * 5000, "٣"]
)
def test_malformed_inputs(text: str) -> None:
    with pytest.raises(InputError, match="cannot be read: give sizes joined by x"):
        parse_input(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0x3", "has a size of zero"),
        ("2x3:", "the unknown dtype ''"),
        ("2x3:float46", "did you mean float64"),
        ("2x3:long", "choose one of float16"),
    ],
)
def test_impossible_inputs(text: str, said: str) -> None:
    with pytest.raises(InputError, match="input '" + text) as error:
        parse_input(text)
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["999999999x999999999", "99999999999x1000000", "9" * 18])
def test_inputs_that_do_not_fit_into_memory(text: str) -> None:
    said = complaint("torch.nn:Identity", text)
    assert f"The input '{text}' of " in said
    assert "GiB cannot be created on cpu (RuntimeError): give smaller sizes" in said


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nets", "give package.module:name or path/to/file.py:name"),
        ("nets:", "give package.module:name or path/to/file.py:name"),
        (":net", "give package.module:name or path/to/file.py:name"),
        ("some/nets:net", "is not the name of a Python module"),
        ("my nets:net", "is not the name of a Python module"),
        ("nest:net", "no module 'nest': install it, run from the folder"),
        ("qqqqqqqq:net", "no module 'qqqqqqqq': install it"),
        ("torch.nn.modules.lineer:Linear", "no module 'torch.nn.modules.lineer'"),
        ("nest.py:net", "no file 'nest.py': give a Python file"),
        ("missing/nets.py:net", "from the current folder"),
        ("folder.py:net", "no file 'folder.py'"),
        ("nets:Nut", "no 'Nut' in 'nets' (did you mean Net"),
        ("nets:qqqqqqqq", "check the name after the colon"),
        ("nets.py:buidl", "no 'buidl' in 'nets.py' (did you mean build?); check"),
        ("nets:Holder.nat", "no 'Holder.nat' in 'nets'"),
        ("nets:number", "type int: name a torch.nn.Module, its class, or a function"),
        ("nets:Nothing", "is the class Nothing: name a torch.nn.Module"),
        ("nets:Wide", "needs arguments (missing a required argument: 'width'): name a function"),
        ("nets:needs", "needs arguments (missing a required argument: 'width'): name a function"),
        ("nets:wrong_result", "NoneType: return a torch.nn.Module"),
        ("nets:wrong_example", "type int as example inputs: return a tensor"),
        ("nets:wrong_keys", "type dict as example inputs: return a tensor"),
        ("nets:wrong_name", "Pair.forward takes (a, b=None) (got an unexpected keyword"),
        ("nets:Net", "Net.forward takes (x) (the target has no example inputs): give"),
        ("nets:pair", "Pair.forward takes (a, b=None) (the target has no"),
    ],
)
def test_wrong_targets(folder: Path, spec: str, said: str) -> None:
    (folder / "folder.py").mkdir()
    assert said in complaint(spec)


@pytest.mark.parametrize("inputs", [["2x3", "2x3"], ["2x3"] * 3])
def test_too_many_inputs(folder: Path, inputs: list[str]) -> None:
    said = complaint("nets:net", *inputs)
    assert "Net.forward takes (x) (too many positional arguments" in said
    assert f"given {len(inputs)})" in said


def line_of(text: str, source: str = NETS) -> int:
    return next(number for number, line in enumerate(source.splitlines(), 1) if text in line)


@pytest.mark.parametrize("place", ["nets", "nets.py"])
@pytest.mark.parametrize(
    ("name", "said", "line"),
    [
        ("Broken", "failed when it was called, TypeError (", 'nn.Linear(3, "four")'),
        ("fails", "failed when it was called, IndexError (list index out of range)", "[][0]"),
        ("leaves", "failed when it was called, SystemExit (3)", "SystemExit(3)"),
        ("fails_with_a_book", "RuntimeError (first line second line word", "first line"),
    ],
)
def test_exceptions_of_the_users_code_name_its_line(
    folder: Path, place: str, name: str, said: str, line: str
) -> None:
    text = complaint(f"{place}:{name}", "2x3")
    assert said in text
    assert f"nets.py:{line_of(line)}: " in text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(:\n", "bad_net.py:1"),
        ("\nimport no_such_thing\n", "bad_net.py:2"),
        ("import sys\nsys.exit(1)\n", "bad_net.py:2: put what only a script"),
        ("import helper\n", "helper.py:2"),
        ("import torch\ntorch.ones(2) @ torch.ones(3)\n", "bad_net.py:2"),
    ],
)
def test_modules_that_cannot_be_imported(folder: Path, source: str, said: str) -> None:
    (folder / "bad_net.py").write_text(source)
    (folder / "helper.py").write_text("\n{}['lost']\n")
    text = complaint("bad_net.py:net", "2x3")
    assert said in text
    assert "bad_net" in text


def test_a_package_module_given_as_a_file(folder: Path) -> None:
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("")
    (folder / "pack" / "layers.py").write_text("from torch import nn\nnet = nn.Identity()\n")
    (folder / "pack" / "models.py").write_text("from .layers import net\n")
    assert isinstance(load_target("pack.models:net", ["2"]).model, nn.Identity)
    assert "give the target as package.module:name" in complaint("pack/models.py:net", "2")


def test_a_file_may_import_its_neighbours_and_have_the_name_of_a_library(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "helpers_of_mine.py").write_text("width = 3\n")
    (folder / "deep" / "random.py").write_text(
        "from torch import nn\nimport helpers_of_mine\nnet = nn.Linear(helpers_of_mine.width, 2)\n"
    )
    before = sys.modules.get("random")
    target = load_target(f"{folder}/deep/random.py:net", ["1x3"])
    assert target.model.in_features == 3
    assert sys.modules.get("random") is before


def test_an_interrupt_is_not_swallowed(folder: Path) -> None:
    (folder / "slow.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_target("slow:net")

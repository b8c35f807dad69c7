"""Triton's kernels without a device: their tests in its interpreter, and
the compiler's word on them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def run(*command: str, **environment: str) -> str:
    """What a process of its own writes: Triton decides when it is
    imported whether it interprets.
    """
    ran = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    return ran.stdout


@pytest.mark.slow
def test_kernels_take_the_steps_of_whole_tensors() -> None:
    assert " passed" in run(
        "-m",
        "pytest",
        "tests/training/test_fused_kernels.py",
        "tests/fused_sweeps.py",
        "-rN",
        "-vv",
        TRITON_INTERPRET="1",
    )


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pathspace.training.optim import triton_kernels, triton_sweep
from tests.training.test_optim_fused import SIGNATURES

for name, types in SIGNATURES.items():
    kernel = getattr(triton_kernels, name, None) or getattr(triton_sweep, name)
    for adam, kind in ((False, -1), (True, 1)):
        sizes = {"ADAM": adam, "KINDS": kind, "MIXED": kind < 0, "AT_ONCE": 4, "BLOCK": 128}
        sizes |= {"OTHERS": True, "SIGNED": True}
        sizes = {key: value for key, value in sizes.items() if key in kernel.arg_names}
        types = {key: "constexpr" if key in sizes else types[key] for key in kernel.arg_names}
        source = ASTSource(kernel, types, constexprs=sizes)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""
# what the host hands over, by name
LONG = ("pointers", "chains", "rates", "starts", "units", "voters")
INT = (
    "programs",
    "numbers",
    "places",
    "target",
    "of_tails",
    "of_edges",
    "counts",
    "balanced",
    "groups",
)
COUNT = ("count", "tails", "edges", "tensors", "blocks", "pairs", "votes", "cleared")
DOUBLE = (
    *(
        "total",
        "signs",
        "tree",
        "settings",
        "factor",
        "limits",
        "step",
        "keep",
        "static",
        "heads",
        "shares",
        "ages",
    ),
    *("sums", "found", "powers", "kinds", "changes", "kept", "phi", "rate", "weights"),
)
TYPES = {
    **dict.fromkeys(LONG, "*i64"),
    **dict.fromkeys(INT, "*i32"),
    **dict.fromkeys(COUNT, "i32"),
    **dict.fromkeys(DOUBLE, "*fp64"),
}
NAMES = ("reduce", "pass_on", "update", "finish", "squares", "change_units", "scale")
OWN = {
    "reduce": {"groups": "i32"},
    "change_units": {"target": "*fp64", "places": "*i64", "groups": "*i64"},
}
SIGNATURES = {name: TYPES | OWN.get(name, {}) for name in NAMES}


@pytest.mark.slow
def test_kernels_compile_for_a_device_that_is_not_there() -> None:
    run("-c", COMPILE, TRITON_INTERPRET="0", TRITON_DEFAULT_FP_FUSION="1")

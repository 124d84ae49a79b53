"""Other libraries that put something on `nn.Module.__new__`: fine where they call ours, refused where they don't."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch
from torch import nn

seen = []


def counting(cls, *args, **kwargs):
    seen.append(cls)
    return object.__new__(cls)


class Own(nn.Linear):
    pass


def check():
    with modelpatch.patched({{nn.Linear: Own}}):
        assert type(nn.Linear(2, 2)) is Own


def check_refused():
    try:
        check()
    except modelpatch.EngineConflictError as error:
        assert "belongs to another library" in str(error) and "counting" in str(error)
    else:
        raise AssertionError("the patch was lost without a word")


{body}
"""
BEFORE = """
nn.Module.__new__ = staticmethod(counting)
import modelpatch
check_refused()
assert nn.Module.__new__ is counting
"""
CHAINED = """
import modelpatch
check()
ours = nn.Module.__new__
nn.Module.__new__ = staticmethod(lambda cls, *args, **kwargs: ours(cls, *args, **kwargs))
check()
"""
CUT_OFF = """
import modelpatch
check()
nn.Module.__new__ = staticmethod(counting)
check_refused()
assert type(nn.Linear(2, 2)) is nn.Linear
"""


@pytest.mark.parametrize("body", [BEFORE, CHAINED, CUT_OFF], ids=["before", "chained", "cut off"])
def test_an_allocator_of_another_library(body):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr

"""Why a process ended, as a value: causes.py."""

import errno
import signal

import pytest
import torch

from paceline.causes import Cause, cause_of, ending_of, explained
from paceline.exceptions import AuthError, CheckpointError, LinkError, UsageError


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


MEMORY, RESOURCES, USER = Cause.OUT_OF_MEMORY, Cause.NO_RESOURCES, Cause.USER_ERROR


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MEMORY),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
            MEMORY,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), MEMORY),
        (OSError(errno.EMFILE, "Too many open files"), RESOURCES),
        (OSError(errno.EIO, "Input/output error"), RESOURCES),
        (ConnectionResetError(), RESOURCES),
        (TimeoutError("timed out"), RESOURCES),
        (RuntimeError("received 0 items of ancdata"), RESOURCES),
        (RuntimeError("can't start new thread"), RESOURCES),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), Cause.DEVICE),
        (RuntimeError("CUDA error: device-side assert triggered"), Cause.DEVICE),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Cause.DEVICE),
        (
            LinkError("CUDA error: a flag cannot be raised: device-side assert triggered"),
            Cause.DEVICE,
        ),
        (LinkError("CUDA error: the memory of another process cannot be opened (code 201)"), Cause.LOST_LINK),
        (RuntimeError("CUDA error: invalid device ordinal"), USER),
        (RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed."), Cause.CRASHED),
        (RuntimeError("DataLoader worker (pid(s) 71) exited unexpectedly"), Cause.CRASHED),
        (LinkError("lost"), Cause.LOST_LINK),
        (AuthError("who"), Cause.LOST_LINK),
        (raised_from(RuntimeError("loading failed"), OSError(errno.EIO, "…")), RESOURCES),
        # What a new process would meet again:
        (NameError("x"), USER),
        (ValueError("no"), USER),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x2)"), USER),
        (FileNotFoundError(errno.ENOENT, "No such file"), USER),
        (PermissionError(errno.EACCES, "Permission denied"), USER),
        (OSError("image file is truncated"), USER),
        (UsageError("no"), USER),
        (raised_from(CheckpointError("cannot write"), OSError(errno.EIO, "…")), USER),
        (KeyboardInterrupt(), USER),
    ],
    ids=repr,
)
def test_an_exception_has_a_cause(error, cause):
    assert cause_of(error) is cause


def test_exceptions_that_were_raised_from_each_other_have_a_cause_too():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert cause_of(first) is USER


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("Too many open files")]
)
def test_too_many_open_files_names_the_limit_and_how_to_raise_it(error):
    assert "Too many open files" in explained(error)
    assert "`ulimit -n`" in explained(error)


def test_a_memory_error_without_a_word_is_explained():
    assert explained(MemoryError()).startswith("no memory left. Use a smaller batch")
    assert explained(ValueError("no")) == "no"


def test_how_a_process_ended():
    assert ending_of(7, None).cause is Cause.EXITED
    assert ending_of(7, None).how == "exited with code 7"
    crashed = ending_of(None, signal.SIGSEGV)
    assert (crashed.cause, crashed.how) == (Cause.CRASHED, "was killed by SIGSEGV")
    assert "Compiled code" in crashed.hint
    assert ending_of(None, 40).how == "was killed by signal 40"

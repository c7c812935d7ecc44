"""Errors of the host library that its callers tell apart. csrc/runtime/ throws them by these names."""

from __future__ import annotations


class RejectedKernelError(RuntimeError):
    """The driver does not load a cubin."""


class MissingKernelError(RuntimeError):
    """A run needs a kernel that was not loaded; the message is its name in csrc/."""


class InUseError(RuntimeError):
    """Another thread is in a plan or a run of the same Attention."""


OF_THE_LIBRARY = (RejectedKernelError, MissingKernelError, InUseError)

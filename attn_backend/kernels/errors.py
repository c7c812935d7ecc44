"""Errors of the host library that callers here tell from others: classes of their own, by the names that csrc/runtime/ throws them by."""

from __future__ import annotations


class RejectedKernelError(RuntimeError):
    """The driver does not load a cubin."""


class MissingKernelError(RuntimeError):
    """A run needs a kernel that was not loaded; the message is its name in csrc/."""


class InUseError(RuntimeError):
    """Another thread is in a plan or a run of the same Attention."""


OF_THE_LIBRARY = (RejectedKernelError, MissingKernelError, InUseError)

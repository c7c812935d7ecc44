from . import cascade  # noqa: F401

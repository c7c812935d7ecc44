from . import mnnvl  # noqa: F401

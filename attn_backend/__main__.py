"""`python -m attn_backend`: the command `attn-backend`, also in a checkout that is not installed."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())

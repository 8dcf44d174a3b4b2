"""``python -m mxmoe info | demo | bench | convert``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

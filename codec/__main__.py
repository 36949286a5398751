"""The command ``codec``, also ``python -m codec``: see :mod:`codec.cli`."""

import sys

from codec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

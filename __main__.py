"""`python -m vserve …` is `vserve …`."""

import sys

from .server.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m firsttoken`` is the command ``firsttoken``."""

import sys

from firsttoken.cli.main import main

sys.exit(main())

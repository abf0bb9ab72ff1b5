"""``python -m mca_convert``."""

import sys

from mca_convert.cli import main

sys.exit(main())

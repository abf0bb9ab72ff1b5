"""``python -m mca_train``: the command line, for torchrun."""

import sys

from mca_train.cli import main

sys.exit(main())

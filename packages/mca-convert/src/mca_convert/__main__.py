"""``python -m mca_convert``.

It only calls the command.
"""

import sys

from mca_convert.cli import main

sys.exit(main())

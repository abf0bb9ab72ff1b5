"""What a run needs is computed in this room, by arithmetic. Whether it is possible is checked in ``run``."""

"""Planner: memory and time of a run, by arithmetic. The package ``run`` checks whether the run is possible."""

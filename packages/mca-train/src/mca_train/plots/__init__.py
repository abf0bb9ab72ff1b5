"""Pictures of a plan and its dry run. What they show is computed elsewhere."""

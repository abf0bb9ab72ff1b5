"""Figures of a plan and its dry run."""

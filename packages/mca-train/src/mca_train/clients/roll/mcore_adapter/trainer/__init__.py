"""Helpers of ROLL's strategies."""

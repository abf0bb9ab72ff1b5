"""Patches of torch that ROLL asks for; mca's supported versions of torch need none of them."""


def patch_torch_find_nd_overlapping_shards() -> None:
    """Do nothing: torch finds overlapping shards fast enough since 2.9.1."""


def patch_torch_validate_global_plan() -> None:
    """Do nothing: torch validates plans of shards fast enough since 2.9.1."""

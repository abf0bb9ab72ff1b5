"""In-memory ``datasets.map`` without cache files."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mca_config.types import JsonObject

if TYPE_CHECKING:
    import datasets


def map_in_memory(
    rows: "datasets.Dataset",
    function: Callable[..., JsonObject],
    features: JsonObject,
    workers: int | None,
    batched: bool = False,
) -> "datasets.Dataset":
    """Map ``function`` over rows or batches with their indices; return the columns ``features``.

    The result has a random fingerprint. `datasets` would compute one by pickling ``function`` with all its references,
    such as the tokenizer, which takes half a second or more for a cache that is not used here.
    """
    import datasets
    from datasets.fingerprint import generate_random_fingerprint

    return rows.map(
        function,
        batched=batched,
        with_indices=True,
        remove_columns=rows.column_names,
        num_proc=workers,
        keep_in_memory=True,
        load_from_cache_file=False,
        new_fingerprint=generate_random_fingerprint(),
        features=datasets.Features(features),
    )

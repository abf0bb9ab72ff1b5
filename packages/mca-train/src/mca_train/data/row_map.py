"""Every row through a function, in memory: what `datasets` does for that, without its cache of files."""

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
    """The columns ``features`` of what ``function`` makes of each row, or batch of rows, and its index.

    The result has a random fingerprint. `datasets` would make one of ``function`` by pickling all that it refers to,
    the tokenizer and the code of its modules: half a second and more, for a cache that is not used here.
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

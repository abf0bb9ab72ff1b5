"""Memory that a rank needs to load its part of a model and to write all of it.

``MCA_TEST_LAYERS=40 pytest -s integration_tests/checkpoints/test_factory_memory.py`` prints the figures for a larger
model.
"""

from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from large_model import HIDDEN, ROWS, make_model
from layouts import arguments
from memory import MIB, peak
from reference import make_reference

pytestmark = [pytest.mark.ranks, pytest.mark.one_fork]

SLACK = 12 * MIB  # what imports and Python leave behind
KINDS = (("hf", "tp2"), ("torch_dist", "pp2"), ("mca", "pp2"))  # the last one with `--cases all`


def save_kinds(source: Path, folder: Path, kinds: tuple[tuple[str, str], ...]) -> None:
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(source, arguments("tp2"))
    for kind, _ in kinds[1:]:
        models.save_pretrained(folder / kind, ckpt_format=kind)


def load_and_save_all(
    small: Path, folder: Path, kinds: tuple[tuple[str, str], ...]
) -> dict[str, tuple[int, int, int]]:
    """``load_and_save`` of every kind on its layout. Runs on every rank."""
    return {
        f"{kind} on {layout}": load_and_save(small, folder / kind, layout, folder / f"{kind}-{layout}")
        for kind, layout in kinds
    }


def load_and_save(small: Path, source: Path, layout: str, target: Path) -> tuple[int, int, int]:
    """Bytes held, peak of loading and peak of the export."""
    from mca_models.megatron import AutoModel

    first = AutoModel.from_pretrained(small, arguments(layout))  # what is imported and made once
    first.save_pretrained_as_hf(target.with_suffix(".small"))
    with peak() as loading:
        models: Any = AutoModel.from_pretrained(source, arguments(layout))
    held = sum(tensor.nbytes for _, tensor in models.local_params())
    with peak() as saving:
        models.save_pretrained_as_hf(target, max_shard_bytes=64 * MIB)
    return held, loading[0], saving[0]


def test_a_rank_needs_little_more_than_what_it_holds(tmp_path: Path, every_case: bool) -> None:
    source = make_model(tmp_path / "hf")
    small = make_reference("llama", tmp_path / "small").path
    whole = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    biggest = 2 * HIDDEN * ROWS
    kinds = KINDS if every_case else KINDS[:2]
    run_ranks(2, save_kinds, source, tmp_path, kinds)
    for of_rank in run_ranks(2, load_and_save_all, small, tmp_path, kinds):
        for name, (held, loading, saving) in of_rank.items():
            print(  # noqa: T201
                f"{name}: holds {held / MIB:.0f} of {whole / MIB:.0f} MiB, loading peaks at {loading / held:.2f} "
                f"of it; the export needs {saving / MIB:.0f} MiB, {saving / biggest:.1f} biggest parameters"
            )
            assert held < 0.55 * whole
            assert 0.7 * held < loading < 1.1 * held + biggest + SLACK
            # a parameter put together, its pieces, and those of the one before until these have come
            assert saving < 2 * biggest + SLACK

"""Bytes that a plan foresees: of stored tensors, of the threads' buffers, and of each pipeline rank."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mca_config.errors import McaError
from mca_convert import forecast
from mca_convert.fills import Chunk, Fill
from mca_models.storage.byte_ranges import Gather, Move
from mca_models.storage.safetensors import TensorInfo
from mca_models.storage.source import Part
from mca_models.weights import Param

PARAM = Param(mca="x", hf=("x",))
INFO = TensorInfo("w", "F32", (10,), 0, 40, Path("file"))


def sized(**values: int) -> Any:
    return SimpleNamespace(**{name: SimpleNamespace(nbytes=nbytes) for name, nbytes in values.items()})


def test_a_quantised_tensor_is_stored_as_its_values_and_its_scales() -> None:
    assert forecast._stored_bytes(INFO) == 40
    assert forecast._stored_bytes(sized(weight=10, scale=5)) == 15
    assert forecast._stored_bytes(sized(blocks=7, scales=4)) == 11


def test_the_largest_chunk_and_the_largest_move_of_the_scratch_buffer_count() -> None:
    def move(run: int, repeat: int, source: int, target: int) -> Move:
        return Move(0, 0, 0, run, repeat, source, target)

    chunks = (
        Chunk(0, 5, (move(2, 1, 2, 2), move(1, 2, 1, 3)), ()),
        Chunk(5, 12, (move(2, 3, 2, 5), move(9, 4, 20, 30), move(9, 4, 9, 9)), ()),
        Chunk(12, 14, (), ()),
    )
    assert forecast._largest_chunk(chunks) == (7, 6), "of moves with gaps at the target alone"
    assert forecast._largest_chunk(()) == (0, 0)


def computed(size: int) -> Any:
    return SimpleNamespace(info=SimpleNamespace(itemsize=2), shape=(size,))


@pytest.mark.parametrize(
    ("sizes", "kept"), [([], None), ([12], 24), ([13], 0), ([12, 5], 34), ([12, 13], 24)]
)
def test_computed_parts_are_kept_if_they_are_small(sizes: list[int], kept: int | None) -> None:
    """Computed tensors need memory for their computation."""
    parts: Any = (Part(INFO, (10,)), *map(computed, sizes))
    fill = Fill("file", "w", 0, Gather((10,), ()), parts, "BF16", "BF16", PARAM)
    limits: Any = SimpleNamespace(computed_bytes=24)
    expected = 0 if kept is None else kept + forecast._COMPUTE_BYTES
    assert forecast._computed_bytes(fill, limits) == expected


def test_each_thread_has_the_largest_of_every_buffer() -> None:
    straight = Gather((10,), (Move(0, 0, 0, 10, 1, 10, 10),))
    spread = Gather((6,), (Move(0, 0, 0, 1, 3, 1, 2), Move(1, 0, 1, 1, 3, 1, 2)))
    plain: Any = (Part(INFO, (10,)),)
    fills = [
        Fill("file", "a", 0, straight, plain, "F32", "F32", PARAM),
        Fill("file", "b", 0, spread, plain, "BF16", "BF16", PARAM),
    ]
    limits: Any = SimpleNamespace(workers=3, buffer_bytes=16, computed_bytes=24)

    def nbytes(*more: Fill) -> int:
        each, rest = divmod(forecast._buffer_bytes(SimpleNamespace(fills=[*fills, *more]), limits), 3)  # type: ignore[arg-type]
        assert rest == 0
        return each - forecast._THREAD_BYTES

    assert nbytes() == 16 + 3 * 2, "four numbers of fp32, and three of bf16 that have gaps"
    cast = Fill("file", "c", 0, straight, plain, "F32", "BF16", PARAM)
    assert nbytes(cast) == 22 + 4 * 2
    made = Fill("file", "d", 0, straight, (computed(12),), "F32", "F32", PARAM)
    assert nbytes(made) == 22 + 24 + forecast._COMPUTE_BYTES
    assert nbytes(made, cast) == nbytes(made) + 8
    blocks = Fill("file", "e", 0, Gather((2, 5), straight.moves), plain, "F32", "F8_E4M3", PARAM, "s")
    assert nbytes(blocks) == 10 * 4 + 6 + 10 + forecast.TILE_BYTES, "a row of blocks is not cut"


class Held(SimpleNamespace):
    """Layers of a chunk."""

    def __str__(self) -> str:
        return str(self.words)


def test_a_pipeline_rank_has_the_largest_file_of_its_ranks() -> None:
    first = Held(words="layers 0", mtp_layers=(), has_embedding=True, has_loss=False)
    last = Held(words="layers 1", mtp_layers=(0,), has_embedding=False, has_loss=True)
    plan = SimpleNamespace(chunks=[[first], [first, last]], rank_layers=lambda rank: (rank, rank + 2))
    config = SimpleNamespace(layout=SimpleNamespace(pp=2), pipeline_plan=lambda: plan)
    params = [Param(mca=name, hf=(name,)) for name in "abc"]
    files = {
        "pp_001/tp_000": [(params[0], 0)],
        "pp_000/tp_001": [(params[0], 0), (params[1], 0)],
        "pp_000/tp_000": [(params[0], 0), (params[2], 0)],
        "pp_000/ep_000": [(params[2], 0)],
        "pp_000/ep_001": [(params[2], 1)],
    }
    sizes = dict(zip(files, (5, 7, 6, 30, 40), strict=True))
    target: Any = SimpleNamespace(config=config, files=files)
    found = list(forecast.plan_stages(target, sizes))
    assert [(stage.rank, stage.tensors, stage.dense_bytes, stage.expert_bytes) for stage in found] == [
        (0, 3, 7, 40),
        (1, 1, 5, 0),
    ]
    assert [stage.holds for stage in found] == ["layers 0", "layers 0; layers 1"]
    assert [(stage.layers, stage.prediction_layers) for stage in found] == [((0, 2), ()), ((1, 3), (0,))]
    assert [(stage.has_embedding, stage.has_loss) for stage in found] == [(True, False), (True, True)]


def test_an_output_path_needs_a_directory_above_it(tmp_path: Path) -> None:
    forecast._require_writable(tmp_path / "a" / "b" / "c")
    assert forecast._existing_parent(tmp_path / "a" / "b" / "c") == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(McaError, match=f"{tmp_path / 'file'} is not a directory; name another path"):
        forecast._require_writable(tmp_path / "file" / "b")

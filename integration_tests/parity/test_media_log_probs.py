"""Logits and log-probabilities of a live model with images, videos and audio are transformers'.

`--cases all` tests all families on all layouts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from case_tables import MEDIA_LOG_PROBS
from cases import Case, as_params, group_for_forks, needed, skip_unsupported
from harness import run_ranks
from layouts import arguments
from mca_config.errors import McaError
from vision_reference import LENGTH, as_processed, logits_of, rows_of, vision_model

pytestmark = pytest.mark.ranks

ALLOWED = 1e-4
"""The tolerance of logits in fp32; tower and text model add their rounding."""
SHIFT = 4
"""Padding tokens on the left of some rows."""
Differences = dict[str, float]


def expected(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Return the log-probabilities of each row's tokens."""
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(len(input_ids), 1), chosen], 1)


def compute(work: dict[Case, tuple[str, Path, Tensor]]) -> dict[Case, str | Differences]:
    """Return the differences of each case, or the error that mca raises. Runs on every rank."""
    from mca_models.megatron import AutoModel

    found: dict[Case, str | Differences] = {}
    for case, (model, path, logits) in work.items():
        try:
            models = AutoModel.from_pretrained(path, arguments(case.layout))
            found[case] = differences(models, model, logits)
        except McaError as error:
            found[case] = str(error)
    return found


def differences(models: Any, case: str, logits: Tensor) -> Differences:
    """Return the largest difference of each form of the call."""
    input_ids, _, images = rows_of(case)
    images = tuple(map(as_processed, images))
    wanted = expected(logits, input_ids)
    padded = torch.nn.functional.pad(input_ids, (SHIFT, 2), value=3)
    mask = torch.zeros_like(padded, dtype=torch.bool)
    mask[:, SHIFT : SHIFT + LENGTH] = True
    ends = torch.arange(0, len(input_ids) * LENGTH + 1, LENGTH)
    cut = slice(SHIFT, SHIFT + LENGTH)
    size = {"micro_batch_size": 2}
    found = {
        "logits": models.logits(input_ids, media=images) - logits,
        "rows": models.log_probs(padded, mask=mask, media=images, **size).log_probs[:, cut] - wanted,
        "packed": models.log_probs(input_ids, packed=True, media=images, **size).log_probs - wanted,
        "cu_seqlens": models.log_probs(
            input_ids.view(1, -1), cu_seqlens=ends, media=images, micro_batch_size=3
        ).log_probs.view_as(wanted)
        - wanted,
    }
    return {name: float(each.abs().max()) for name, each in found.items()}


Computed = dict[Case, list[str | Differences]]


@pytest.fixture(scope="module")
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    cases, folder = needed(request), tmp_path_factory.mktemp("log_probs")
    work = {model: reference(model, folder) for model in {case.model for case in cases}}
    found: Computed = {}
    for group in group_for_forks(cases):
        given = {case: work[case.model] for case in group}
        ranks = run_ranks(group[0].num_ranks, compute, given, timeout=600)
        found |= {case: [rank[case] for rank in ranks] for case in group}
    return found


def reference(case: str, folder: Path) -> tuple[str, Path, Tensor]:
    """Return the model of ``case``, saved, and transformers' logits of its rows."""
    model, (input_ids, _, images) = vision_model(case), rows_of(case)
    model.save_pretrained(folder / case)
    with torch.no_grad():
        return case, folder / case, logits_of(model, input_ids, images)


@pytest.mark.cases(
    0,
    always=["qwen2_5_vl-video-cp2", "gemma3-tp2sp", "qwen2_5_vl-pp2", "ovis2-tp1", "voxtral-tp1"],
)
@pytest.mark.parametrize("case", as_params(MEDIA_LOG_PROBS))
def test_log_probs_with_media_equal_transformers(
    case: Case, computed: Computed, request: pytest.FixtureRequest
) -> None:
    for found in computed[case]:
        if isinstance(found, str):
            skip_unsupported(request, found)
        assert max(found.values()) < ALLOWED, found


def _without(name: str) -> None:
    """Drop an argument of the chunks."""
    from mca_models.megatron.features.sequence_media import MediaJoiner

    join = MediaJoiner.join

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replace(join(self, *args, **kwargs), **{name: None})

    MediaJoiner.join = changed  # type: ignore[method-assign]


def _media_of_the_next_sequence() -> None:
    from mca_models.megatron.log_probs.forward import _Rows

    join = _Rows._joined_media

    def changed(self: Any, number: int, *, decodes: bool) -> Any:
        self._media = [media and self._media[2 - index] for index, media in enumerate(self._media)]
        return join(self, number, decodes=decodes)

    _Rows._joined_media = changed  # type: ignore[method-assign]


def _frames_in_another_order() -> None:
    from mca_models.megatron.features import processor_media

    items = processor_media._grid_videos

    def changed(pixels: Tensor, inputs: Any, config: Any) -> Any:
        return items(pixels.flip(0), inputs, config)

    processor_media._grid_videos = changed


FAULTS = {
    "one position for each token": (lambda: _without("sections"), "qwen2_5_vl"),
    "causal attention inside images": (lambda: _without("attention_ends"), "gemma3"),
    "images of another sequence": (_media_of_the_next_sequence, "llava"),
    "frames in another order": (_frames_in_another_order, "qwen3_vl-video"),
}


def compute_with(fault: str, work: dict[Case, tuple[str, Path, Tensor]]) -> list[str | Differences]:
    """Return the differences with a fault planted. Runs on one rank."""
    FAULTS[fault][0]()
    return [*compute(work).values()]


@pytest.mark.cases(0)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, tmp_path: Path) -> None:
    model = FAULTS[fault][1]
    work = {Case(model, "tp1"): reference(model, tmp_path)}
    (((found,)),) = run_ranks(1, compute_with, fault, work)
    assert isinstance(found, dict)
    assert found["rows"] > 100 * ALLOWED, found


def rejected(path: Path) -> list[str]:
    """Return the error of each wrong call. Runs on every rank."""
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(path)
    ids, _, images = rows_of("qwen2_5_vl-video")
    video, none = images[0], images[1]
    rank = torch.distributed.get_rank()
    found = []
    for media in (
        None,
        [video],
        [video, none, {}, none],
        [video, none, video, none] if rank else list(images),  # wrong on one rank alone
        [{**video, "audio_values": torch.ones(1)}, none, images[2], none],
        [{name: x for name, x in video.items() if name != "second_per_grid_ts"}, none, images[2], none],
    ):
        for call in (models.log_probs, models.logits):
            with pytest.raises(McaError) as error:
                call(ids, media=media)
            found.append(str(error.value))
    return found


def test_media_of_other_placeholders_are_one_error_on_all_ranks(tmp_path: Path) -> None:
    _, path, _ = reference("qwen2_5_vl-video", tmp_path)
    found, other = run_ranks(2, rejected, path)
    assert found == other
    assert found[::2] == found[1::2]
    missing = (
        "media, sequence 0: input_ids have placeholders: 4 of images, 8 of videos; the media of the sequence have 0 "
        "tokens: pass the processor's outputs (pixel_values, ...) of exactly these media for each sequence"
    )
    assert found[0] == missing
    assert found[2] == "media has 1 items; expected 4, one for each sequence or None"
    assert found[4] == missing.replace("sequence 0", "sequence 2").replace("8 of", "12 of")
    assert found[6] == (
        "media, sequence 2: input_ids have 12 placeholders of videos, but the processor's outputs are for 8; pass the "
        "input_ids that the processor returned with them"
    )
    assert found[8].startswith("media, sequence 0: audio_values: no output of the processor of qwen2_5_vl")
    assert found[10] == (
        "media, sequence 0: second_per_grid_ts or video_second_per_grid must have one number for each of 1 videos; "
        "pass the processor's"
    )


def computed_with_other_pixels(path: Path) -> list[str]:
    """Return the errors of calls with other pixels on one of two tensor ranks. Runs on every rank."""
    from mca_models.megatron import AutoModel

    models = AutoModel.from_pretrained(path, arguments("tp2"))
    ids, _, images = rows_of("qwen2_5_vl")
    other = {**images[0], "pixel_values": images[0]["pixel_values"].clone()}
    other["pixel_values"][-len(other["pixel_values"]) // 2 :] += torch.distributed.get_rank()
    found = []
    for call in (models.log_probs, models.logits):
        with pytest.raises(McaError) as error:
            call(ids, media=[other, *images[1:]])
        found.append(str(error.value))
    assert models.logits(ids, media=images) is not None
    return found


def test_ranks_of_a_replica_have_the_same_pixels(tmp_path: Path) -> None:
    """Other pixels would be mixed silently, because tensor ranks share the tower's work."""
    _, path, _ = reference("qwen2_5_vl", tmp_path)
    expected = "ranks 0 and 1, of one replica, have different routed_experts or media; broadcast them with the tokens"
    assert run_ranks(2, computed_with_other_pixels, path) == [[expected] * 2] * 2

"""Inputs of the planner from a run, independent of the layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mca_config.layout import ParallelLayout
from mca_config.model_config import training_dtype
from mca_models.megatron import platform
from mca_models.megatron.factory.transformer_config import transformer_config
from mca_models.megatron.features.media import image_problems
from mca_train.config.model import make_adapter
from mca_train.config.model_parts import adapted_parts, trained_parts
from mca_train.plan.audio_memory import PlannedMedia, plan_clips
from mca_train.plan.chunks import Implementation
from mca_train.plan.counts import ModelCounts
from mca_train.plan.hardware import Device
from mca_train.plan.memory import PlanInput
from mca_train.plan.options import PlanOptions
from mca_train.plan.vision_memory import plan_images, plan_videos
from mca_train.run.rules import Run

if TYPE_CHECKING:
    from mca_models.megatron.factory.transformer_config import Target


def planned_media(run: Run, options: PlanOptions | None = None) -> PlannedMedia | None:
    """Return the media per sequence in the plan of ``run``, as ``options`` request; None: there are none.

    Without requests there is one image and one audio clip, if the run can have them, and there are no videos.

    Raises:
        UsageError: The request is not possible.
    """
    options = options or PlanOptions()
    settings = run.settings
    trained = trained_parts(settings.training, run.model)
    if settings.lora.adapter_name_or_path is not None:
        trained = adapted_parts(settings.lora.adapter_name_or_path, run.model)
    length, takes = settings.data.seq_length, run.task.takes_images
    videos, frames = options.videos, options.video_frames
    videos_only = options.images is None and (videos or (videos is None and frames))  # videos without images
    images = None
    if not videos_only:
        folder = Path(settings.data.model_name_or_path)
        images = plan_images(
            run.model,
            trained,
            length,
            takes=takes,
            count=options.images,
            pixels=options.image_size,
            folder=folder,
        )
    room = length - (images.length if images else 0)
    video_plan = plan_videos(
        run.model,
        trained,
        room,
        takes=takes,
        count=videos,
        frames=frames,
        pixels=options.image_size,
        with_images=images is not None,
    )
    room -= video_plan.length if video_plan else 0
    clip_plan = plan_clips(
        run.model, trained, room, takes=takes, count=options.clips, seconds=options.clip_seconds
    )
    found = PlannedMedia(images=images, videos=video_plan, clips=clip_plan)
    return found if images or video_plan or clip_plan else None


def make_image_check(run: Run, target: "Target | None") -> Callable[[ParallelLayout], list[str]]:
    """Return a function that returns the problems of ``run`` with images, for a layout on ``target``."""
    args, model = run.settings.training, run.model
    megatron = transformer_config(model, args, run.layout, training_dtype(model, args), target)
    return lambda layout: image_problems(model, layout, megatron)


def make_plan_input(
    run: Run,
    implementation: Implementation,
    device: Device | None = None,
    *,
    media: PlannedMedia | None = None,
) -> PlanInput:
    """Return the input of the planner for ``run`` on ``device``; None: this machine."""
    settings, config = run.settings, replace(run.model, layout=run.layout)
    parts = trained_parts(settings.training, run.model)
    adapter = make_adapter(settings.lora, config, parts)
    reference = None
    if run.reference is not None:
        reference = ModelCounts.for_model(replace(run.reference, layout=run.layout))
    return PlanInput(
        config=run.model,
        seq_length=settings.data.seq_length,
        sequences=run.task.sequences_per_sample,
        model=ModelCounts.for_model(config),
        adapter=None if adapter is None else ModelCounts.for_adapter(config, adapter[1]),
        frozen=ModelCounts.for_frozen(config, parts),
        reference=reference,
        implementation=implementation,
        on_gpu=device is not None or platform.device_type() == "cuda",
        media=media,
        evaluated=bool(settings.data.eval_file),
        fp8_transposed=device is None or device.fp8_transposed,
        forwards=run.task.extra_forward_passes(settings),
        precomputed=getattr(settings.own, "precompute_ref_log_probs", False),
    )

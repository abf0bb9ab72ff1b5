"""Slices that the image processor of MiniCPM-V makes of an image, for a plan."""

from pathlib import Path

from mca_config.model_config import McaModelConfig


def slice_sizes(
    config: McaModelConfig, patch: int, pixels: int, folder: Path | None = None
) -> list[tuple[int, int]]:
    """Return the rows and columns of patches of the resized image and of each of its slices.

    Args:
        config: Model configuration.
        patch: Side of a patch in pixels.
        pixels: Side of the image.
        folder: Directory of the image processor; None, or without one: the processor's defaults.
    """
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

    names = ("preprocessor_config.json", "processor_config.json")
    if folder is not None and any((folder / name).is_file() for name in names):
        processor = MiniCPMV4_6ImageProcessorPil.from_pretrained(folder)
    else:
        processor = MiniCPMV4_6ImageProcessorPil()
    size, slices = (pixels, pixels), None
    options = {"scale_resolution": processor.scale_resolution, "patch_size": patch}
    options["downsample_mode"] = (config.vision_fields or {}).get("downsample_mode", "16x")
    if processor.slice_mode:
        slices = processor.get_sliced_grid(size, processor.max_slice_nums, processor.scale_resolution)
    high, wide = processor.find_best_resize(size, **options, allow_upscale=slices is None)
    sizes = [(high // patch, wide // patch)]
    if slices is not None:
        rows, columns = slices
        high, wide = processor.get_refine_size(size, slices, **options, allow_upscale=True)
        sizes += [(high // rows // patch, wide // columns // patch)] * (rows * columns)
    return sizes

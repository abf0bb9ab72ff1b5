"""Times a first stage with several images, dealt to its tensor ranks or computed by each of them, in turns.

    python benchmarks/shared_tower.py [--layout tp2sp] [--layers 6] [--width 192] [--rounds 6]

Eight images of 16 to 144 tokens, a heavy vision model, forward and backward, on gloo. Says of each pair of turns how
many seconds each took, and the median of how many times as fast dealt images are; exits 1 if they are slower.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "integration_tests" / "support"), str(ROOT / "packages" / "mca-models" / "tests")]

GRIDS = ((16, 16), (24, 16), (16, 8), (20, 20), (12, 12), (16, 24), (8, 8), (24, 24))
"""Patches of each image; four are a token."""


def make_model(folder: Path, layers: int, width: int) -> None:
    """Write a Qwen2.5-VL with random weights, and two layers of text."""
    import tiny_vision
    import torch
    import transformers

    config = tiny_vision.described("qwen2_5_vl", num_hidden_layers=2)
    heavy = {"depth": layers, "hidden_size": width, "intermediate_size": 3 * width, "num_heads": 4}
    config["vision_config"] |= heavy | {"fullatt_block_indexes": [layers - 1]}
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(**config))
    model.save_pretrained(folder)


def batch() -> dict[str, Any]:
    """One row that is nothing but images."""
    import torch

    grids = torch.tensor([(1, *size) for size in GRIDS])
    patches = int(grids.prod(1).sum())
    tokens = patches // 4
    ids = torch.full((1, tokens), 65)
    pixels = torch.randn(patches, 96, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.arange(tokens).expand(3, 1, tokens),
        "attention_mask": None,
        "images": {"pixel_values": pixels, "image_grid_thw": grids},
        "feature_rows": torch.arange(tokens)[None],
    }


def measure(folder: Path, layout: str, rounds: int) -> list[tuple[float, float]]:
    """Seconds of each pair of turns, computed by each rank and dealt. Runs on every rank."""
    import torch

    from layouts import arguments
    from mca_models.megatron import AutoModel
    from mca_models.megatron.features import media_features

    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(folder, arguments(layout))
    model.train_parts({"language", "vision", "projector"})
    deal = media_features._split_images

    def turn(*, dealt: bool) -> float:
        media_features._split_images = deal if dealt else lambda images, config: []
        torch.distributed.barrier()
        start = time.perf_counter()
        model.chunks[0](**batch()).sum().backward()
        torch.distributed.barrier()
        return time.perf_counter() - start

    turn(dealt=True), turn(dealt=False)
    return [(turn(dealt=False), turn(dealt=True)) for _ in range(rounds)]


def main() -> int:
    """Run and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="tp2sp")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    from harness import run_ranks
    from layouts import world_size

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.layers, args.width)
        pairs = run_ranks(world_size(args.layout), measure, Path(folder), args.layout, args.rounds)[0]
    for alone, dealt in pairs:
        print(f"computed by each rank {alone:.3f} s, dealt {dealt:.3f} s: {alone / dealt:.2f}")
    ratio = statistics.median(alone / dealt for alone, dealt in pairs)
    print(f"median {ratio:.2f} times as fast on {args.layout}")
    return ratio < 1


if __name__ == "__main__":
    sys.exit(main())

"""Bytes that each of four replicas stores, requests and reads of a checkpoint: ``python benchmarks/replicas.py``.

The model has 2.4 million parameters in fp32; its optimizer is distributed over the replicas, or not. Held and asked for
are the tensors that are handed to Megatron's writer and reader; read is what the kernel counted (``rchar`` of the
process) and what was mapped of files, the second time, when everything is imported. Prints the last table of
docs/validation/clusters.md.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "integration_tests" / "support"))

RANKS = 4
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
Found = dict[str, int]


def bytes_of(leaves: dict[str, Any]) -> int:
    """Return the bytes of the tensors of a sharded state."""
    return sum(leaf.data.nbytes for leaf in leaves.values())


def read_by(call: Callable[[], object]) -> int:
    """Bytes that this process reads or maps in the second of two calls."""
    plain, mapped = np.memmap, []

    def note(*args: Any, **options: Any) -> Any:
        made = plain(*args, **options)
        mapped.append(made.nbytes)
        return made

    call()
    before = _counted()
    with patch.object(np, "memmap", note):
        call()
    return _counted() - before + sum(mapped)


def _counted() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@contextmanager
def noted(module: Any, name: str, found: Found, key: str) -> Iterator[None]:
    """A block in which the bytes of what ``module.name`` is given are kept."""
    plain = getattr(module, name)

    def note(state: dict[str, Any], *args: Any, **options: Any) -> Any:
        found[key] = bytes_of(state)
        return plain(state, *args, **options)

    with patch.object(module, name, note):
        yield


def measure(checkpoint: Path, folder: Path, *, split: bool) -> Found:
    """Saves and loads the optimizer's state, and the weights in ``torch_dist``. Runs on a rank."""
    import torch

    from mca_models import AutoModel
    from mca_train.checkpoint import optimizer_state
    from mca_train.engine.engine import Engine
    from mca_train.losses.token_loss import token_loss
    from train_cases import arguments

    args = arguments(folder / "run", use_distributed_optimizer=split)
    model: Any = AutoModel.from_pretrained(checkpoint, args)
    engine = Engine(list(model.chunks), args, token_loss)
    engine.optimizer_step()  # which makes its state
    place, found = folder / "optimizer", Found()
    if torch.distributed.get_rank() == 0:
        place.mkdir(parents=True)
    torch.distributed.barrier()
    with noted(optimizer_state, "write_state", found, "held"):
        numbers, writing = optimizer_state.save(engine.optimizer, engine.chunks, place, background=False)
    writing.finish()

    def load() -> None:
        optimizer_state.load(
            engine.optimizer, engine.chunks, place, numbers, lambda param: param.detach().float()
        )

    with noted(optimizer_state, "read_state", found, "asked"):
        found["read"] = read_by(load)
    found["index"] = (place / ".metadata").stat().st_size
    model.save_pretrained(folder / "model", ckpt_format="torch_dist")
    found["weights"] = read_by(lambda: AutoModel.from_pretrained(folder / "model", args))
    found["of the model"] = sum(param.nbytes for param in model.parameters())
    return found


def span(found: list[Found], key: str) -> str:
    """Least and most of the ranks."""
    least, most = (f"{chosen(each[key] for each in found) / 1e6:.1f}" for chosen in (min, max))
    return f"{least} MB" if least == most else f"{least} to {most} MB"


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    from harness import run_ranks
    from train_cases import tiny_checkpoint

    rows = {
        "held when it saves": "held",
        "asked for when it resumes": "asked",
        "read for that, with the index": "read",
        "weights in `torch_dist`, with the index and small files, read": "weights",
    }
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_checkpoint(Path(folder) / "hf", **SIZES)
        split, whole = (
            run_ranks(RANKS, measure, checkpoint, Path(folder) / str(split), split=split, timeout=600)
            for split in (True, False)
        )
    size = split[0]["of the model"]
    print(
        f"{size / 4e6:.2f} million parameters, {3 * size / 1e6:.1f} MB of state, {size / 1e6:.1f} MB of weights; ",
        end="",
    )
    print(f"index {split[0]['index'] / 1e6:.2f} MB distributed, {whole[0]['index'] / 1e6:.2f} MB not\n")
    print("| for each rank | distributed optimizer | not distributed |\n|---|---|---|")
    for row, key in rows.items():
        print(f"| {row} | {span(split, key)} | {span(whole, key)} |")


if __name__ == "__main__":
    main()

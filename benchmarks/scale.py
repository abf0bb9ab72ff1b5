"""What a run's start and its checkpoints cost one rank as the world grows: ``python benchmarks/scale.py [ranks ...]``.

This process is a rank of so many; the others are not there, and what they would send is taken to be like its own. The
model is small, its layout that of a large one (tensor 8, pipeline 4, the rest data parallel, distributed optimizer).
Seconds are of this process; what the network and the others add is not in them, so bytes and connections are counted.
"""

import os
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("MCA_DEVICE", "cpu")
WORLDS = (64, 512, 4096, 16384)
_RANK = 1
_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@dataclass
class Costs:
    """Of one rank.

    Args:
        world: Ranks.
        groups: Process groups that are made by anybody, as every rank goes through all of them.
        listed: Their ranks, added up.
        connections: Of this rank to others over gloo, which connects each rank of a group with each.
        received: Bytes of objects that come to this rank while a checkpoint is written.
        coordinated: Bytes of plans that come to the first rank.
        tensors: That this rank writes a share of.
        seconds: By what was done.
        memory: MiB more than before, by what was done.
    """

    world: int
    groups: int = 0
    listed: int = 0
    connections: int = 0
    received: int = 0
    coordinated: int = 0
    tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """A block whose time and memory are taken."""
        start, before = time.perf_counter(), _resident()
        yield
        self.seconds[name] = time.perf_counter() - start
        self.memory[name] = _resident() - before


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(world: int) -> Costs:
    """Starts a rank of ``world``, makes its model and optimizer, and plans a checkpoint."""
    from mca_models.megatron import platform

    platform.prepare()
    from mca_train.dry_run.world import fake_world

    costs = Costs(world)
    with tempfile.TemporaryDirectory() as folder, fake_world(_RANK, world), _counted(costs):
        _run(costs, Path(folder))
    return costs


def _run(costs: Costs, folder: Path) -> None:
    from mca_config import TrainingArguments
    from mca_models import AutoModel
    from mca_models.megatron.distributed import parallel
    from mca_models.megatron.state.facts import facts_of
    from mca_models.templates import config_from_hf
    from mca_train.checkpoint import optimizer_state
    from mca_train.engine.engine import Engine
    from mca_train.losses.token_loss import token_loss
    from mca_train.trainer.stop_signal import StopSignal

    args = TrainingArguments(
        output_dir=str(folder / "run"),
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        use_distributed_optimizer=True,
        report_to="none",
        use_cpu=True,
    )
    config = config_from_hf(_MODEL)
    start = parallel.start

    def timed(*given: Any, **options: Any) -> Any:
        with costs.of("groups"):
            return start(*given, **options)

    with costs.of("model and optimizer"):
        with patch.object(parallel, "start", timed), StopSignal():
            model = AutoModel.unfilled(config, args)
        engine = Engine(list(model.chunks), args, token_loss)
        engine.optimizer_step()  # which makes its state
    with costs.of("checkpoint"):
        facts_of(model)
        (folder / "optimizer").mkdir()
        optimizer_state.save(engine.optimizer, engine.chunks, folder / "optimizer", background=False)
    costs.tensors = sum(1 for _ in model.held())


@contextmanager
def _counted(costs: Costs) -> Iterator[None]:
    """A block in which groups and exchanged objects are counted."""
    import torch.distributed as dist

    new_group, gather_all = dist.new_group, dist.all_gather_object

    def made(ranks: Any = None, *args: Any, **options: Any) -> Any:
        members = list(range(costs.world)) if ranks is None else list(ranks)
        costs.groups += 1
        costs.listed += len(members)
        if options.get("backend") == "gloo" and _RANK in members:
            costs.connections += len(members) - 1
        return new_group(ranks, *args, **options)

    def gathered(found: list[Any], value: object, *args: Any, **options: Any) -> None:
        costs.received += len(pickle.dumps(value)) * len(found)
        gather_all(found, value, *args, **options)

    def collected(obj: object, *_: Any, **__: Any) -> None:
        costs.coordinated += len(pickle.dumps(obj)) * costs.world

    with (
        patch.object(dist, "new_group", made),
        patch.object(dist, "all_gather_object", gathered),
        patch.object(dist, "gather_object", collected),
    ):
        yield


_COLUMNS: dict[str, Callable[[Costs], str]] = {
    "ranks": lambda costs: f"{costs.world:,}",
    "groups made": lambda costs: f"{costs.groups:,}",
    "gloo connections": lambda costs: f"{costs.connections:,}",
    "start s": lambda costs: f"{costs.seconds['groups']:.2f}",
    "start MiB": lambda costs: f"{costs.memory['groups']:.0f}",
    "model, optimizer s": lambda costs: f"{costs.seconds['model and optimizer']:.2f}",
    "checkpoint planned s": lambda costs: f"{costs.seconds['checkpoint']:.2f}",
    "objects to a rank MB": lambda costs: f"{costs.received / 1e6:.2f}",
    "plans to the first rank MB": lambda costs: f"{costs.coordinated / 1e6:.2f}",
}


def main() -> None:
    """Prints a table."""
    worlds = [int(word) for word in sys.argv[1:]] or list(WORLDS)
    print("| " + " | ".join(_COLUMNS) + " |\n|" + "---|" * len(_COLUMNS), flush=True)
    measure(worlds[0])  # imports
    for world in worlds:
        costs = measure(world)
        print("| " + " | ".join(told(costs) for told in _COLUMNS.values()) + " |", flush=True)


if __name__ == "__main__":
    main()

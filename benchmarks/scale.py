"""Cost of start and checkpoints for one rank as the world grows: ``python benchmarks/scale.py [ranks ...]``.

This process is a rank of so many; the others are not there, and what they would send is taken to be like its own. The
model is small, its layout that of a large one (tensor 8, pipeline 4, the rest data parallel, distributed optimizer).
Seconds are the processor's, of this process; what the network and the others add is not in them, so bytes and
connections are counted. Each world has a process of its own, whose memory grows from the same start.
A second table is of the files that such a world writes: their number and index as planned for the small model, and the
bytes that those of a model of 70 billion parameters have.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("MCA_DEVICE", "cpu")
WORLDS = (64, 512, 1024, 4096, 16384)
_RANK = 1
_TENSOR, _PIPELINE = 8, 4
_WRITERS = 2
"""Files of the optimizer's state that Megatron has a rank write, if it holds as many tensors."""
_LARGE = 70e9
"""Parameters of the model whose bytes are told: 2 of each in bf16, 12 of the optimizer."""
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
    """Costs of one rank.

    Args:
        world: Ranks.
        groups: Process groups that are made by anybody, as every rank goes through all of them.
        listed: Their ranks, added up.
        connections: Of this rank to others over gloo, which connects each rank of a group with each.
        received: Bytes of objects that come to this rank while a checkpoint is written.
        coordinated: Bytes of plans that come to the first rank.
        compared: Bytes that would come to this rank if Megatron compared what all ranks write.
        tensors: That this rank writes a share of.
        files: That this rank writes of the optimizer's state.
        index: Bytes of the index of the optimizer's state.
        asked: Bytes of the optimizer's state that this rank asks for when it resumes.
        state: Bytes of the whole of it.
        seconds: By what was done.
        memory: MiB more than before, by what was done.
    """

    world: int
    groups: int = 0
    listed: int = 0
    connections: int = 0
    received: int = 0
    coordinated: int = 0
    compared: int = 0
    tensors: int = 0
    files: int = 0
    index: int = 0
    asked: int = 0
    state: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """A block whose time and memory are taken."""
        start, before = time.process_time(), _resident()
        yield
        self.seconds[name] = time.process_time() - start
        self.memory[name] = _resident() - before


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(world: int) -> Costs:
    """Start a rank of ``world``, makes its model and optimizer, and plans a checkpoint."""
    from mca_models.megatron import platform

    platform.prepare()
    from mca_train.dry_run.fake_process_group import fake_process_group

    costs = Costs(world)
    with tempfile.TemporaryDirectory() as folder, fake_process_group(_RANK, world), _counted(costs):
        _run(costs, Path(folder))
    return costs


def _run(costs: Costs, folder: Path) -> None:
    from mca_config import TrainingArguments
    from mca_models import AutoModel
    from mca_models.megatron.distributed import parallel
    from mca_models.megatron.state.param_specs import gather_param_specs
    from mca_models.templates import config_from_hf
    from mca_train.checkpoint import optimizer_state
    from mca_train.engine.engine import Engine
    from mca_train.losses.token_loss import token_loss
    from mca_train.trainer.monitor import StopSignal

    args = TrainingArguments(
        output_dir=str(folder / "run"),
        tensor_model_parallel_size=_TENSOR,
        pipeline_model_parallel_size=_PIPELINE,
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
        gather_param_specs(model)
        (folder / "optimizer").mkdir()
        numbers, _ = optimizer_state.save(
            engine.optimizer, engine.chunks, folder / "optimizer", background=False
        )
    costs.tensors = sum(1 for _ in model.local_params())
    costs.files = len(list((folder / "optimizer").glob("*.distcp")))
    costs.compared = (
        2 * costs.world * _told(optimizer_state._sharded(engine.optimizer, engine.chunks, loading=False))
    )
    sent, costs.coordinated = costs.coordinated, 0
    _plan_load(costs, engine, numbers, folder / "resumed")
    costs.coordinated = max(sent, costs.coordinated)


def _told(state: Any) -> int:
    """Bytes of a rank's description of its tensors, which Megatron sends to all others, twice."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    apply_factories(state)
    return len(
        pickle.dumps(
            [each.without_data() for each in nested_values(state) if isinstance(each, ShardedTensor)]
        )
    )


def _plan_load(costs: Costs, engine: Any, numbers: Any, folder: Path) -> None:
    """Resumes from the index of a checkpoint of that world, whose files are not there and not read."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.futures import Future

    from mca_train.checkpoint import optimizer_state

    folder.mkdir()
    metadata = _index_of(engine.chunks, costs.world)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    costs.index = (folder / ".metadata").stat().st_size
    costs.state = sum(math.prod(entry.size) * 4 for entry in metadata.state_dict_metadata.values())

    def asked(_: object, plan: Any, planner: object) -> Any:
        costs.asked = sum(math.prod(item.lengths) * 4 for item in plan.items)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    with patch.object(FileSystemReader, "read_data", asked), costs.of("resumed"):
        optimizer_state.load(
            engine.optimizer, engine.chunks, folder, numbers, lambda param: param.detach().float()
        )


def _of_stage(key: str, stage: int) -> str:
    """Return the name in another stage of the first stage's tensor."""
    before = stage * _MODEL["num_hidden_layers"] // _PIPELINE
    return re.sub(r"(?<=layers\.)\d+", lambda found: str(int(found[0]) + before), key)


def _index_of(chunks: Any, world: int) -> Any:
    """Torch's index of the optimizer's state: every tensor of this stage, cut as it is, and as many of the others."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories
    from torch.distributed.checkpoint import metadata as form
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    from mca_train.checkpoint import optimizer_state

    state = chunks[0].sharded_state_dict(
        metadata={"non_homogeneous_layers": True, "singleton_local_shards": False}
    )
    apply_factories(state)
    entries, places = {}, {}
    tensors = [each for each in nested_values(state) if isinstance(each, ShardedTensor)]
    kinds = ("optimizer.state.exp_avg", "optimizer.state.exp_avg_sq", optimizer_state.PREFIX)
    for stage, tensor, kind in itertools.product(range(_PIPELINE), tensors, kinds):
        key = _of_stage(tensor.key, stage)
        if stage and key == tensor.key:
            key = f"{key}.{stage}"  # of embeddings, instead of the last stage's
        cuts = [range(count) for count in tensor.axis_fragmentations]
        size = torch.Size(tensor.local_shape)
        offsets = [
            torch.Size(n * length for n, length in zip(cut, size, strict=True))
            for cut in itertools.product(*cuts)
        ]
        name = f"{kind}.{key}"
        places_of = [form.ChunkStorageMetadata(offset, size) for offset in offsets]
        properties = form.TensorProperties(dtype=torch.float32)
        entries[name] = form.TensorStorageMetadata(properties, torch.Size(tensor.global_shape), places_of)
        for offset in offsets:
            file = f"__{len(places) % world}_0.distcp"
            places[form.MetadataIndex(name, offset)] = _StorageInfo(file, 0, size.numel() * 4)
    return form.Metadata(entries, None, places)


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

    def gathered(object_list: list[Any], obj: object, group: Any = None) -> None:
        costs.received += len(pickle.dumps(obj)) * len(object_list)
        gather_all(object_list, obj, group)

    sent: list[object] = []

    def collected(obj: object, *_: Any, **__: Any) -> None:
        sent[:] = [obj]
        costs.coordinated += len(pickle.dumps(obj)) * costs.world

    def returned(scatter_object_output_list: list[Any], **_: Any) -> None:
        scatter_object_output_list[0] = sent[0]  # the first rank changes nothing of a plan to load

    with (
        patch.object(dist, "new_group", made),
        patch.object(dist, "all_gather_object", gathered),
        patch.object(dist, "gather_object", collected),
        patch.object(dist, "scatter_object_list", returned),
    ):
        yield


_COLUMNS: dict[str, Callable[[Costs], str]] = {
    "ranks": lambda costs: f"{costs.world:,}",
    "groups made": lambda costs: f"{costs.groups:,}",
    "gloo connections": lambda costs: f"{costs.connections:,}",
    "start s": lambda costs: f"{costs.seconds['groups']:.2f}",
    "start MiB": lambda costs: f"{costs.memory['groups']:.0f}",
    "model, optimizer s": lambda costs: f"{costs.seconds['model and optimizer']:.2f}",
    "model, optimizer MiB": lambda costs: f"{costs.memory['model and optimizer']:.0f}",
    "save planned s": lambda costs: f"{costs.seconds['checkpoint']:.2f}",
    "save planned MiB": lambda costs: f"{costs.memory['checkpoint']:.0f}",
    "resume planned s": lambda costs: f"{costs.seconds['resumed']:.2f}",
    "resume planned MiB": lambda costs: f"{costs.memory['resumed']:.0f}",
    "objects to a rank MB": lambda costs: f"{costs.received / 1e6:.2f}",
    "plans to the first rank MB": lambda costs: f"{costs.coordinated / 1e6:.2f}",
}


def _manifest(world: int) -> str:
    """Return the manifest of ``world`` ranks, as `mca_train.checkpoint.integrity` writes it."""
    of_rank = [f"optimizer/__{{rank}}_{number}.distcp" for number in range(_WRITERS)] + [
        "rng_{rank}.safetensors"
    ]
    names = [f"training/{name.format(rank=rank)}" for rank in range(world) for name in of_rank]
    record = {"bytes": 10**9, "crc32": "0" * 8}
    return json.dumps({"version": 1, "files": dict.fromkeys(names, record)}, indent=1)


_FILES: dict[str, Callable[[Costs], str]] = {
    "ranks": lambda costs: f"{costs.world:,}",
    "files of weights": lambda costs: f"{_TENSOR * _PIPELINE:,}",
    "of the optimizer, at most": lambda costs: f"{_WRITERS * costs.world:,}",
    "of random states": lambda costs: f"{costs.world:,}",
    "manifest MB": lambda costs: f"{len(_manifest(costs.world)) / 1e6:.2f}",
    "index of the optimizer MB": lambda costs: f"{costs.index / 1e6:.2f}",
    "share of the state asked for": lambda costs: f"1/{costs.state / costs.asked:,.0f}",
    "if Megatron compared, to a rank MB": lambda costs: f"{costs.compared / 1e6:.1f}",
    "70B: a rank writes GB of weights": lambda costs: f"{2 * _LARGE / costs.world / 1e9:.2f}",
    "of the optimizer GB": lambda costs: f"{12 * _LARGE / costs.world / 1e9:.2f}",
    "reads GB of weights": lambda costs: f"{2 * _LARGE / (_TENSOR * _PIPELINE) / 1e9:.1f}",
    "gathered in Megatron's way GB": lambda costs: f"{12 * _LARGE / (_TENSOR * _PIPELINE) / 1e9:.0f}",
}


def _tell(columns: dict[str, Callable[[Costs], str]], found: list[Costs]) -> None:
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for costs in found:
        print("| " + " | ".join(told(costs) for told in columns.values()) + " |", flush=True)


def _apart(world: int) -> Costs:
    """`measure` in a process of its own, which may have children as Megatron's writer wants."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(measure, world).result()


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "ranks", type=int, nargs="*", default=list(WORLDS), help="of each world; default: %(default)s"
    )
    worlds = parser.parse_args().ranks
    measure(_TENSOR * _PIPELINE)  # imports
    found = [_apart(world) for world in worlds]
    _tell(_COLUMNS, found)
    print()
    _tell(_FILES, found)


if __name__ == "__main__":
    main()

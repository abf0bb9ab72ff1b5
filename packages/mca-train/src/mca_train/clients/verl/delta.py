"""Export of the weights for verl's sharded-delta checkpoint engine, which sends only the elements that changed.

A "shard" is a full Hugging Face tensor. Rank ``i`` modulo the world size owns tensor ``i`` of the export and keeps its
last version in host memory, in bf16. So names and positions are Hugging Face's on every layout, and a rank keeps
1 / world of the model. `WeightSender` leaves out the parameters of which no rank's shard changed.
"""

from collections.abc import Iterator

import torch
import torch.distributed
from torch import Tensor
from verl.workers.engine.spec import ShardSpec
from verl.workers.engine.utils import _hf_entry_identity, hf_delta_export, prime_delta_snapshots

from mca_models.megatron.state.sender import WeightSender
from mca_train.types import Upstream, VirtualModels

Shard = tuple[str, Tensor, ShardSpec]


class WeightDelta:
    """Exports shards, and the elements that changed since the last export; collective.

    Args:
        models: The model.
    """

    def __init__(self, models: VirtualModels) -> None:
        self._sender: WeightSender = models.weight_sender(dtype="bfloat16")  # as verl's other engines
        self._owners: dict[str, int] = {}
        self._last: dict[str, Tensor] = {}
        """The last version of each tensor of this rank, flat; empty for those of other ranks."""

    def prime(self, *, pin: bool) -> None:
        """Keep the current weights as the base of the next `changes`.

        Args:
            pin: Keep them in pinned memory.
        """
        prime_delta_snapshots(self.shards(full=True), self._last, pin)

    def shards(self, *, full: bool) -> Iterator[Shard]:
        """Yield name, flat tensor (empty on ranks that do not own it) and placement of each tensor.

        Args:
            full: All tensors, not only those with a change since the last complete call.
        """
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for bucket in self._sender.buckets(full=full):
            for entry in bucket.entries:
                name, tensor = entry.name, entry.view(bucket.buffer)
                owner = self._owners.setdefault(name, len(self._owners) % size)
                spec = ShardSpec(
                    full_shape=tuple(tensor.shape),
                    place=0,
                    gather_group=torch.distributed.group.WORLD,
                    contributes=owner == rank,
                )
                yield name, tensor.reshape(-1) if owner == rank else tensor.new_empty(0), spec

    def changes(self) -> Iterator[tuple[Upstream, ...]]:
        """Return verl's entries of the changed elements since `prime`, in the same order on every rank."""
        entries: Iterator[tuple[Upstream, ...]] = hf_delta_export(
            self.shards(full=False), self._last, _hf_entry_identity
        )
        return entries

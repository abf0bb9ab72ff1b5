"""A world in which only one rank exists."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from mca_config.errors import McaError
from mca_models.megatron import platform
from mca_models.megatron.distributed import parallel
from mca_models.megatron.platform import replaced
from mca_train.dry_run.fake_process_group import fake_process_group, receive_known_shapes


def test_it_needs_no_options_of_torchs_fake_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in FakeProcessGroup.__mro__:
        if "options" in vars(owner):
            monkeypatch.delattr(owner, "options")  # as with torch 2.8
    with fake_process_group(0, 2):
        assert parallel.timeout() >= timedelta(minutes=1)


def received_lengths(rank: int, layout: str | None, virtual: int | None = None) -> list[int]:
    """Return the lengths of a message and of a gradient of ``[8, 1, 4]`` on a rank of three; two layers of MTP."""
    platform.prepare()
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    config: Any = SimpleNamespace(
        variable_seq_lengths=layout is None,
        mtp_standalone=layout is not None,
        mtp_num_layers=2,
        pipeline_model_parallel_layout=layout and PipelineParallelLayerLayout(layout, 3),
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        use_ring_exchange_p2p=False,
        batch_p2p_comm=True,
        batch_p2p_sync=False,
    )
    with fake_process_group(rank, 3), receive_known_shapes():
        *received, _ = P2PCommunicator(dist.group.WORLD, config)._communicate(
            tensor_send_next=torch.zeros(8, 1, 4),
            tensor_send_prev=None,
            recv_prev=True,
            recv_next=True,
            tensor_shape=(8, 1, 4),
        )
    assert [tensor.shape[1:] for tensor in received] == [(1, 4)] * 2
    return [len(tensor) for tensor in received]


@pytest.mark.parametrize(
    ("rank", "layout", "lengths"),
    [
        (1, None, [8, 8]),
        (0, "Ett|ttmm|L", [8, 8]),
        (1, "Ett|ttmm|L", [8, 24]),
        (2, "Ett|ttmm|L", [24, 24]),
    ],
)
def test_a_stage_that_asks_for_shapes_receives_those_of_a_run(
    rank: int, layout: str | None, lengths: list[int]
) -> None:
    """After the MTP layers a message has the hidden states of the model and of both layers."""
    assert received_lengths(rank, layout) == lengths


def test_virtual_stages_with_mtp_layers_apart_are_rejected() -> None:
    with pytest.raises(
        McaError, match=r"pipeline_model_parallel_layout 'Et\|t\|t\|t\|mm\|L': with virtual stages"
    ):
        received_lengths(1, "Et|t|t|t|mm|L", 2)


class Parent:
    size = 1


class Child(Parent):
    depth = 2


@pytest.mark.parametrize("name", ["size", "depth"])
def test_a_replaced_attribute_is_back_after_the_block(name):
    before = dict(vars(Child))
    with pytest.raises(ZeroDivisionError), replaced(Child, name, 7):
        assert getattr(Child, name) == 7
        raise ZeroDivisionError
    assert dict(vars(Child)) == before and (Parent.size, Child.size, Child.depth) == (1, 1, 2)
    with pytest.raises(AttributeError), replaced(Child, "absent", 7):
        pass

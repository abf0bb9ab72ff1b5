"""What the process does that starts ranks, and how a rank ends."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mca_models.megatron import platform
from mca_train.run import train


class Seen(Exception):
    """Ends a call once it has been looked at."""


def test_the_process_that_starts_ranks_leaves_their_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(task: Any, values: dict[str, Any], where: str) -> None:
        raise Seen(values)

    monkeypatch.setattr(train, "settings_of", parse)
    task: Any = SimpleNamespace()
    for device, expected in (("cuda", {"seed": 1, "use_cpu": True}), ("cpu", {"seed": 1})):
        monkeypatch.setattr(platform, "device_type", lambda device=device: device)
        with pytest.raises(Seen) as seen:
            train._launch(task, {"seed": 1}, "run.yaml", [])
        assert seen.value.args == (expected,)


def test_a_rank_that_has_ended_has_no_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(train, "_train", lambda inputs, attempt: None)
    monkeypatch.setattr(train, "set_log_levels", lambda training: None)
    settings = SimpleNamespace(training=None)
    inputs: Any = SimpleNamespace(
        run=SimpleNamespace(settings=settings), lock=SimpleNamespace(kept=nullcontext)
    )
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        train._train_rank(inputs, None)
        assert not torch.distributed.is_initialized()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

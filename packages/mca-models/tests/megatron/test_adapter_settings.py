"""Base model in the configuration of a new adapter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_hf import SIZE

from mca_models.megatron.peft import models
from mca_models.megatron.peft.create import adapter_config
from mca_models.templates import config_from_hf

CONFIG = config_from_hf({**SIZE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(
    ("given", "source", "written"),
    [
        (None, "models/a", "models/a"),
        ("models/b", "models/a", "models/b"),
        (None, None, None),
        ("models/b", None, "models/b"),
    ],
)
def test_the_base_model_is_the_one_that_was_loaded_unless_it_is_given(
    given: str | None, source: str | None, written: str | None
) -> None:
    loaded: Any = SimpleNamespace(config=CONFIG, source=source)
    document = {"r": 2, "base_model_name_or_path": given}
    assert adapter_config(document, loaded).document["base_model_name_or_path"] == written


@pytest.mark.parametrize(
    ("targets", "everywhere", "receives"), [({0}, False, False), ({0, 2}, True, True), ({0, 1}, True, False)]
)
def test_an_adapter_is_gathered_on_one_rank_where_one_receives_it(
    targets: set[int], everywhere: bool, receives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rank 2."""
    gathered: list[bool] = []

    def whole_adapter(*_: object, everywhere: bool) -> str | None:
        gathered.append(everywhere)
        return "adapter" if everywhere else None

    monkeypatch.setattr(models, "whole_adapter", whole_adapter)
    monkeypatch.setattr(models, "peft_tensors", lambda *_, **__: ["tensor"])
    monkeypatch.setattr(models, "packed_buckets", lambda tensors, size: [(each, size) for each in tensors])
    adapted: Any = SimpleNamespace(
        **dict.fromkeys(("config", "adapter", "rules")), rank_context=SimpleNamespace(rank=2), _live=list
    )
    request: Any = SimpleNamespace(
        targets=lambda _: frozenset(targets), dtype=None, bucket_bytes=7, per_expert=False
    )
    sent = list(models.PeftModels._adapter_buckets(adapted, request))
    assert gathered == [everywhere]
    assert sent == ([("tensor", 7)] if receives else [])


@pytest.mark.parametrize(
    ("axis", "expert", "replica"),
    [(None, None, (0, 2, 4 * 3 + 1)), (0, None, (0, 0, 13)), (None, 5, (0, 6, 7)), (1, 5, (0, 0, 7))],
)
def test_each_copy_of_a_factor_has_a_number(axis: int | None, expert: int | None, replica: Any) -> None:
    """Use 3 context ranks and coordinates that all differ."""
    param: Any = SimpleNamespace(shard=SimpleNamespace(axis=axis), expert=expert)
    coordinates: Any = SimpleNamespace(tp=2, cp=1, dp=4, etp=6, edp=7)
    assert models._replica(param, coordinates, 3) == replica


@pytest.mark.parametrize(
    ("arguments", "keywords", "prefix"),
    [
        ((), {}, ""),
        (("model.",), {}, "model."),
        (("model.", "more"), {}, "model."),
        ((), {"prefix": "m."}, "m."),
    ],
)
def test_factors_replace_those_of_megatron_under_the_prefix_of_the_state(
    arguments: tuple[str, ...], keywords: dict[str, str], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chunk(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.frozen = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))

        def sharded_state_dict(self, prefix: str = "", offsets: object = None) -> dict[str, object]:
            assert offsets == (arguments[1] if len(arguments) > 1 else None)
            return {f"{prefix}frozen": "base", f"{prefix}x.{models.CHILD}.factor": "Megatron's"}

    monkeypatch.setattr(
        models, "_sharded", lambda param, tensor, context: (param, tensor is chunk.factor, context)
    )
    chunk: Any = Chunk()
    models.patch_sharded_state(chunk, {id(chunk.factor): "rule"}, "ranks")  # type: ignore[dict-item,arg-type]
    found = chunk.sharded_state_dict(*arguments, **keywords)
    assert found == {f"{prefix}frozen": "base", f"{prefix}factor": ("rule", True, "ranks")}
    models.restore_sharded_state(chunk)
    assert "sharded_state_dict" not in vars(chunk)

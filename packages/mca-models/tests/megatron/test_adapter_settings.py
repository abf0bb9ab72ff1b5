"""Configuration and first values of a new adapter, and the models that a finished one fits."""

import enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_hf import SIZE

from mca_config.errors import McaError
from mca_models.lora import AdapterConfig
from mca_models.megatron.peft import create, models
from mca_models.megatron.peft.create import adapter_config, require_new_params_saved, require_supported_init
from mca_models.megatron.peft.exchange import merged_piece
from mca_models.megatron.peft.models import is_trained, require_same
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


class Task(enum.Enum):
    CAUSAL = "CAUSAL_LM"


def test_a_new_configuration_has_the_defaults_of_peft_and_plain_values() -> None:
    loaded: Any = SimpleNamespace(config=CONFIG, source=None)
    found = adapter_config({"r": 2}, loaded).document
    assert found["target_modules"] == ["q_proj", "v_proj"] and found["peft_type"] == "LORA"
    assert found["inference_mode"] is True
    given = {"task_type": Task.CAUSAL, "target_modules": {"v_proj", "k_proj"}, "inference_mode": False}
    pattern = {"rank_pattern": {"k_proj": 3}, "exclude_modules": ("lm_head",)}
    found = adapter_config({**given, **pattern}, loaded).document
    assert (found["task_type"], found["target_modules"]) == ("CAUSAL_LM", ["k_proj", "v_proj"])
    assert (found["rank_pattern"], found["exclude_modules"]) == ({"k_proj": 3}, ["lm_head"])
    assert found["inference_mode"] is True
    weights = adapter_config({"target_parameters": ["o_proj.weight"]}, loaded).document
    assert weights.get("target_modules") is None
    ready = AdapterConfig({"r": 2})
    assert adapter_config(ready, loaded) is ready
    assert create._plain([Task.CAUSAL, (1, frozenset("ba"))]) == ["CAUSAL_LM", [1, ["a", "b"]]]
    with pytest.raises(McaError, match="PEFT has no default target_modules for other models; set it"):
        create._default_targets("other")


@pytest.mark.parametrize(
    ("start", "supported"),
    [(True, True), (False, True), ("gaussian", True), ("eva", False), ("orthogonal", False), (None, False)],
)
def test_some_ways_to_begin_are_supported(start: Any, supported: bool) -> None:
    require_supported_init(AdapterConfig({}))
    if supported:
        require_supported_init(AdapterConfig({"init_lora_weights": start}))
        return
    with pytest.raises(McaError, match=f"init_lora_weights {start!r} is not supported for a new adapter"):
        require_supported_init(AdapterConfig({"init_lora_weights": start}))


def rule(name: str, *, vocab: bool = False) -> Any:
    return SimpleNamespace(mca=name, mca_name=lambda: name, hf_names=lambda: (f"hf.{name}",), vocab=vocab)


@pytest.mark.parametrize(("start", "both"), [(None, True), (True, True), ("MiCA", False), ("mica", False)])
def test_what_was_only_saved_is_not_trained(start: Any, both: bool) -> None:
    adapter = AdapterConfig({} if start is None else {"init_lora_weights": start})
    kept, saved = rule("embedding"), rule("head")
    rules: Any = SimpleNamespace(kept=(kept,), saved=(saved,))
    params = [rule("x.lora_A.q.weight"), rule("x.lora_B.q.weight"), saved, kept]
    assert [is_trained(param, adapter, rules) for param in params] == [True, both, True, False]


def rules(*names: str, rank: int = 2, scale: float = 1.5) -> Any:
    pairs = [
        SimpleNamespace(target=SimpleNamespace(module=f"m.{name}"), a=rule(name), rank=rank, scale=scale)
        for name in names
    ]
    return SimpleNamespace(factors=pairs, params=[pair.a for pair in pairs])


def test_a_loaded_adapter_has_the_tensors_ranks_and_scales_of_the_live_one() -> None:
    require_same(rules("a", "b"), rules("b", "a"), "place")
    with pytest.raises(McaError, match=r"^place: its adapter has other tensors .*\(a, \.\.\.\); load it"):
        require_same(rules("a", "b", "c"), rules("b", "d"), "place")
    for other, shown in (
        (rules("a", rank=3), "rank 3 and scale 1.5"),
        (rules("a", scale=2.0), "rank 2 and scale 2"),
    ):
        with pytest.raises(McaError, match=f"on m.a has {shown}, this model's 2 and 1.5; set lora_rank"):
            require_same(other, rules("a"), "place")


def test_an_adapter_saves_what_the_files_of_its_base_model_lack() -> None:
    loaded: Any = SimpleNamespace(new_params=[rule("head"), rule("embedding", vocab=True)], source="place")
    adapted: Any = SimpleNamespace(full_params=[rule("embedding"), rule("head"), rule("more")])
    require_new_params_saved(loaded, adapted)
    adapted.full_params = [rule("embedding")]
    with pytest.raises(
        McaError, match=r"save hf\.head, the new head, which place does not have .*; make a new"
    ):
        require_new_params_saved(loaded, adapted)
    adapted.full_params = [rule("head")]
    with pytest.raises(
        McaError, match=r"save the new rows of hf\.embedding, which place .*; write a larger base"
    ):
        require_new_params_saved(loaded, adapted)


def test_only_adapted_weights_are_merged_on_demand() -> None:
    plain, adapted = torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)
    item: Any = SimpleNamespace(base=adapted, folded=lambda: adapted + 1)
    piece = merged_piece({"plain": plain, "adapted": adapted}, [item])
    found: Any = piece("adapted")
    assert piece("plain") is plain and found.tolist() == [2] and not found.requires_grad
    assert piece("elsewhere") is None

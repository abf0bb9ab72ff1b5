"""An adapted model on one rank, with stand-ins of its linears: merging, disabling, sending and receiving."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mca_config.errors import McaError
from mca_models.lora import AdapterConfig
from mca_models.megatron.peft import models
from mca_models.megatron.peft.models import PeftModels


def linear(value: float, change: float, *, merged: bool = False) -> Any:
    """Return an attached adapter that adds ``change`` to a base weight of ``value``."""
    base = torch.full((2,), value)

    def folded() -> torch.Tensor:
        if change == 0:
            raise McaError("not finite")
        return base + change

    return SimpleNamespace(base=base, folded=folded, switch=SimpleNamespace(merged=merged))


def model_of(*attached: Any, **more: Any) -> Any:
    model = PeftModels.__new__(PeftModels)
    torch.nn.Module.__init__(model)
    values = {"_attached": list(attached), "_originals": None, "adapter": AdapterConfig({}), **more}
    vars(model).update(values)
    return model


def values_of(model: Any) -> list[tuple[float, bool]]:
    return [(float(item.base[1]), item.switch.merged) for item in model._attached]


def test_weights_are_merged_and_restored() -> None:
    model = model_of(linear(1.0, 10.0), linear(2.0, 20.0))
    assert not model.merged
    model.merge_adapter()
    assert model.merged and values_of(model) == [(11, True), (22, True)]
    assert [float(each[0]) for each in model._originals] == [1, 2]
    with pytest.raises(McaError, match="merged already; call unmerge_adapter first"):
        model.merge_adapter()
    model.unmerge_adapter()
    assert not model.merged and values_of(model) == [(1, False), (2, False)]
    with pytest.raises(McaError, match="not merged; call merge_adapter first"):
        model.unmerge_adapter()


def test_nothing_is_merged_if_one_weight_cannot_be() -> None:
    model = model_of(linear(1.0, 10.0), linear(2.0, 0.0), linear(3.0, 30.0))
    with pytest.raises(McaError, match="not finite"):
        model.merge_adapter()
    assert not model.merged and values_of(model) == [(1, False), (2, False), (3, False)]


def test_an_adapter_is_disabled_in_a_block_that_may_be_nested() -> None:
    model = model_of(linear(1.0, 10.0), linear(2.0, 20.0))
    with model.disable_adapter():
        assert values_of(model) == [(1, True), (2, True)]
        with model.disable_adapter():
            pass
        assert values_of(model) == [(1, True), (2, True)], "the outer block goes on"
        with pytest.raises(McaError, match="the adapter is disabled"):
            model.merge_adapter()
    assert values_of(model) == [(1, False), (2, False)]
    with pytest.raises(KeyError), model.disable_adapter():
        raise KeyError
    assert values_of(model) == [(1, False), (2, False)]
    model.merge_adapter()
    with pytest.raises(McaError, match="the adapter is merged"), model.disable_adapter():
        pass
    saving = model_of(linear(1.0, 10.0), adapter=AdapterConfig({"modules_to_save": ["lm_head"]}))
    with pytest.raises(McaError, match="not supported with modules_to_save"), saving.disable_adapter():
        pass


@pytest.mark.parametrize(
    ("asked", "result"),
    [
        ({}, "adapter"),
        ({"per_expert": True}, "adapter"),
        ({"merged": True}, "merged"),
        ({"merged": True, "fp8": True, "split_experts": True}, "merged"),
        ({"merged": True, "per_expert": True}, "per_expert is a layout of the adapter"),
        ({"fp8": True}, "fp8 is not supported for an adapter"),
        ({"split_experts": True}, "split_experts is not supported for an adapter"),
    ],
)
def test_the_merged_model_or_the_adapter_is_sent(
    asked: dict[str, bool], result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request: Any = SimpleNamespace(
        **{**dict.fromkeys(("merged", "per_expert", "fp8", "split_experts"), False), **asked}
    )
    model = model_of(_merged_piece=lambda: "piece", _adapter_buckets=lambda asked: ("adapter", asked))
    monkeypatch.setattr(models, "export_buckets", lambda *given: ("merged", given))
    if len(result) > 7:
        with pytest.raises(McaError, match=result):
            model._requested_buckets(request)
        return
    given = (model, request, "piece") if result == "merged" else request
    assert model._requested_buckets(request) == (result, given)
    if result == "merged":
        assert model._sender_piece(request)() == "piece"
    else:
        with pytest.raises(McaError, match="weight_sender sends full models; set merged=True"):
            model._sender_piece(request)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["base_model.model.a", "base_model.model.b"], "those of an adapter"),
        (["model.a", "model.b"], "those of the base model"),
        ([], "none"),
    ],
)
def test_the_first_name_decides_what_is_received(
    names: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    taken: list[Any] = []
    monkeypatch.setattr(models, "load_on_all_ranks", lambda work: work())
    monkeypatch.setattr(
        models, "require_same_arguments", lambda call, **given: compared.append((call, given))
    )
    monkeypatch.setattr(
        models, "load_local_weights", lambda model, every: taken.append(("base", model, list(every)))
    )
    model = model_of()
    vars(model)["_take"] = lambda every: taken.append(("adapter", model, list(every)))
    model.load_weights((name, number) for number, name in enumerate(names))
    assert compared == [("load_weights", {"weights": kind})]
    place = "adapter" if kind == "those of an adapter" else "base"
    assert taken == [(place, model, [(name, number) for number, name in enumerate(names)])]
    vars(model)["_originals"] = []
    with pytest.raises(McaError, match="merged; call unmerge_adapter before load_weights"):
        model.load_weights(iter(()))
    with pytest.raises(McaError, match="merged; call unmerge_adapter before load_pretrained"):
        model.load_pretrained("anywhere")


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_all_tensors_of_an_adapter_are_filled_or_none(
    saved: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the second of two shards, in the dtype of the live tensor."""

    class Rule:
        vocab = False

        def __init__(self, number: int) -> None:
            self.number = number
            self.shard = SimpleNamespace(take=lambda whole, rank, size: np.split(whole, size)[rank])

        def mca_name(self) -> str:
            return f"factor {self.number}"

    tensors = [torch.zeros(3, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    rules = [(Rule(number), tensor) for number, tensor in enumerate(tensors)]
    model = model_of(
        _factors=rules[:1],
        _saved=rules[1:2],
        _copies=rules[2:],
        config=SimpleNamespace(layout="layout"),
        rank_context=SimpleNamespace(coordinates="coordinates"),
        rules=None,
    )
    monkeypatch.setattr(models, "full_shape", lambda param, tensor, config: (2 * len(tensor),))
    monkeypatch.setattr(models, "shard_rank_and_size", lambda param, layout, coordinates: (1, 2))

    def read(param: Any, shape: tuple[int, ...]) -> Any:
        if fails and param.number == (2 if saved else 0):
            raise McaError("cannot be read")
        return np.arange(6, dtype=np.float32) + 10 * param.number

    if fails:
        with pytest.raises(McaError, match="cannot be read"):
            model.fill(read, saved=saved)
    else:
        model.fill(read, saved=saved)
    right = [[3 + 10 * number + i for i in range(3)] for number in range(3)]
    filled = 0 if fails else 3 if saved else 1
    assert [tensor.tolist() for tensor in tensors] == [*right[:filled], *[[0.0] * 3] * (3 - filled)]
    assert [name for name, _ in model.adapter_parameters()] == ["factor 0", "factor 1"]
    assert [name for name, _ in model.trained_parameters()] == ["factor 0", "factor 1", "factor 2"]
    with pytest.raises(McaError, match=r"a piece of the adapter has shape \[3\], here \[2\]"):
        models._cast_like(torch.zeros(2), np.zeros(3, np.float32), "name")


@pytest.mark.parametrize(
    "settings", [{"ckpt_format": "torch_dist"}, {"async_save": True}, {"overwrite": True}, {}]
)
def test_an_adapter_is_written_in_one_format(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    written: list[Any] = []
    monkeypatch.setattr(
        models, "require_same_arguments", lambda call, **given: compared.append((call, given))
    )
    for name in ("write_mca_adapter", "write_peft"):
        monkeypatch.setattr(
            models, name, lambda *given, name=name, **options: written.append((name, *given, options))
        )
    model = model_of(config=SimpleNamespace(layout="layout"), _write=lambda write: write("adapter"))
    plain = {"directory": "place", "overwrite": False, "ckpt_format": "mca", "async_save": False}
    overwrite = {"overwrite": settings.get("overwrite", False)}
    if settings.keys() <= {"overwrite"}:
        model.save_pretrained("place", **settings)
        model.save_pretrained_as_hf("place", **settings)
        place = models.Path("place")
        assert written == [
            ("write_mca_adapter", "adapter", "layout", place, overwrite),
            ("write_peft", "adapter", place, overwrite),
        ]
        assert compared[1] == ("save_pretrained_as_hf", {"directory": "place", **overwrite})
    else:
        with pytest.raises(McaError, match="always written with ckpt_format mca and without async_save"):
            model.save_pretrained("place", **settings)
        assert not written
    assert compared[0] == ("save_pretrained", {**plain, **settings})


@pytest.mark.parametrize("merged", [False, True])
def test_a_merged_model_is_written_with_its_merged_weights(
    merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(models, "require_same_arguments", lambda call, **given: None)
    monkeypatch.setattr(models, "merged_piece", lambda live, attached: (live, attached))
    for name in ("save_hf", "save_mca"):
        monkeypatch.setattr(
            models, name, lambda model, folder, name=name, **options: written.append((name, folder, options))
        )
    item = linear(1.0, 10.0)
    model = model_of(item, _originals=[] if merged else None, canonical_parameters=lambda: iter([("a", 1)]))
    model.save_merged_as_hf("hf", overwrite=True, max_shard_bytes=7)
    model.save_merged("mca")
    (hf, hf_place, hf_options), (mca, mca_place, mca_options) = written
    assert (hf, hf_place, mca, mca_place) == ("save_hf", models.Path("hf"), "save_mca", models.Path("mca"))
    for options, overwrite in ((hf_options, True), (mca_options, False)):
        piece = options.pop("piece")
        assert piece("a") == 1 if merged else piece == ({"a": 1}, [item])
        assert options.pop("overwrite") is overwrite
    assert (hf_options, mca_options) == ({"max_shard_bytes": 7}, {})


def test_trained_parameters_are_counted() -> None:
    model = model_of(parameters=lambda: iter([torch.nn.Parameter(torch.zeros(1000)), torch.zeros(3000)]))
    assert model.print_trainable_parameters() == "1,000 of 4,000 parameters of this rank are trained (25.00%)"


@pytest.mark.parametrize("merged_before", [False, True])
def test_an_unloaded_model_is_as_it_was_before_with_merged_weights(merged_before: bool) -> None:
    class Chunk(torch.nn.Module):
        def sharded_state_dict(self) -> None: ...

    removed: list[str] = []
    chunk = Chunk()
    vars(chunk)["sharded_state_dict"] = "with factors"
    frozen, trained = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    frozen.requires_grad_(True)
    item = linear(1.0, 10.0)
    item.handles, item.owner = [SimpleNamespace(remove=lambda: removed.append("hook"))], torch.nn.Module()
    base = models.VirtualModels.__new__(models.VirtualModels)
    torch.nn.Module.__init__(base)
    base.chunks, base.megatron = (
        torch.nn.ModuleList([chunk]),
        SimpleNamespace(moe_router_bias_update_rate=0.0),
    )
    base._adapters, base.config = ["adapter"], "config"
    model = model_of(
        item,
        chunks=base.chunks,
        megatron=base.megatron,
        _adapters=base._adapters,
        _handles=[SimpleNamespace(remove=lambda: removed.append("embedding"))],
        _before=[(frozen, False), (trained, True)],
        _rate_before=0.25,
        rules="rules",
        _factors=[],
        _saved=[],
        _copies=[],
        config="a later config",
    )
    vars(model)["_base"] = base
    if merged_before:
        model.merge_adapter()
    assert model.merge_and_unload() is base and float(item.base[0]) == 11
    assert removed == ["hook", "embedding"] and base._adapters == []
    assert "sharded_state_dict" not in vars(chunk)
    assert (frozen.requires_grad, trained.requires_grad) == (False, True)
    assert base.megatron.moe_router_bias_update_rate == 0.25 and base.config == "a later config"
    kept = {"adapter", "rules", "_originals", "_attached", "_factors", "_saved", "_copies", "_handles"}
    assert not vars(base).keys() & (kept | {"_before", "_rate_before"})

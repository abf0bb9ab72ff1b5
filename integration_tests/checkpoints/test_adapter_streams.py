"""A live adapter as a stream: alone, merged on the way, and taken back, always as it is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from layouts import arguments
from lora_cases import LINEAR, STACKED
from mca_config.errors import McaError
from mca_models.lora import AdapterConfig
from reference import make_reference
from weight_streams import SMALL, facts_of, in_disorder, names_and_bytes, stored

pytestmark = pytest.mark.ranks


def adapters(base: Path, layout: str, settings: dict[str, Any], folder: Path) -> None:
    """An adapter arrives as it is saved, and a merged model as if it were merged. Runs on every rank."""
    from safetensors.torch import load_file

    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model

    config = {"r": 2, "lora_alpha": 6, **settings}
    models = get_peft_model(AutoModel.from_pretrained(base, arguments(layout)), config)
    generator = torch.Generator().manual_seed(1)
    for _, tensor in sorted(models.adapter_parameters(), key=lambda pair: pair[0]):
        tensor.data += torch.randn(
            tensor.shape, generator=generator
        )  # ranks with the same piece add the same
    models.save_pretrained_as_hf(folder / "peft")
    theirs = load_file(folder / "peft" / "adapter_model.safetensors")
    if settings["target_modules"] == "all-linear":
        assert (
            AdapterConfig.load(folder / "peft").document["target_modules"] == LINEAR[:4]
        )  # no router, no experts
    rank = torch.distributed.get_rank()
    for to in ("all", "first"):
        arrived = list(models.export_weights(to=to, bucket_bytes=SMALL))
        assert [name for name, _ in arrived] == (sorted(theirs) if to == "all" or rank == 0 else [])
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in arrived)
    if settings.get("target_parameters"):
        _require_per_expert(models, theirs)
    _load_again(models, theirs)
    before = {name: tensor.clone() for name, tensor in models.canonical_parameters()}
    models.save_merged_as_hf(folder / "merged")
    arrived = list(models.export_weights(merged=True, bucket_bytes=SMALL))
    for name, tensor in models.canonical_parameters():
        assert torch.equal(tensor, before[name]), "the weights are not touched"
    plain = list(models.export_weights(merged=True, to="first"))
    merged = list(models.merge_and_unload().export_weights(bucket_bytes=SMALL))
    assert list(map(names_and_bytes, arrived)) == list(map(names_and_bytes, merged))
    saved = stored(folder / "merged")
    assert all(saved[name] == facts for name, facts in (facts_of(*each) for each in merged))
    assert len(plain) == (len(merged) if rank == 0 else 0)


def _require_per_expert(models: Any, theirs: dict[str, torch.Tensor]) -> None:
    """The factors of each expert's linears multiply to PEFT's change of the stacked parameters."""
    arrived = dict(models.export_weights(per_expert=True, bucket_bytes=SMALL))
    assert all(torch.equal(arrived.pop(name), theirs[name]) for name in theirs if ".experts." not in name)
    experts = "base_model.model.model.layers.1.mlp.experts."
    for parts, wrapped in ((("gate_proj", "up_proj"), "base_layer."), (("down_proj",), "")):
        a, b = (theirs[f"{experts}{wrapped}lora_{which}.weight"].float() for which in "AB")
        count = models.config.num_experts
        changes = torch.einsum("oer,eri->eoi", *_stacks(a, b, count))
        for expert in range(count):
            names = [f"{experts}{expert}.{part}." for part in parts]
            own = [(arrived[f"{n}lora_B.weight"], arrived[f"{n}lora_A.weight"]) for n in names]
            change = torch.cat([(each_b.float() @ each_a.float()) for each_b, each_a in own])
            torch.testing.assert_close(
                change, changes[expert], rtol=0, atol=1e-6
            )  # sums of 2 products in fp32
    document = models.peft_config(per_expert=True)
    assert {"gate_proj", "up_proj", "down_proj"} <= set(document["target_modules"])
    assert document["target_parameters"] is None
    assert models.peft_config()["target_parameters"]


def _stacks(a: torch.Tensor, b: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PEFT's matrices as ``[out, experts, rank]`` and ``[experts, rank, in]``."""
    return b.view(len(b), -1, experts).transpose(1, 2), a.view(experts, -1, a.shape[1])


def _load_again(models: Any, theirs: dict[str, torch.Tensor]) -> None:
    """An adapter is taken under PEFT's names, and the base model under its own."""
    before = [tensor.clone() for _, tensor in models.adapter_parameters()]
    with torch.no_grad():
        for _, tensor in models.adapter_parameters():
            tensor.fill_(7.0)
    models.load_weights(in_disorder(theirs))
    for (name, tensor), wanted in zip(models.adapter_parameters(), before, strict=True):
        assert torch.equal(tensor, wanted), name
    last = torch.distributed.get_rank() == 3
    with pytest.raises(McaError) as error:
        models.load_weights([("model.norm.weight", torch.ones(1))] if last else theirs.items())
    assert str(error.value) == (
        "load_weights: weights differs between ranks: 'those of an adapter' on ranks 0, 1, 2, 'those of the base "
        "model' on rank 3; give all ranks the same value"
    )
    first, *rest = theirs.items()
    wrong = [*rest[1:], (rest[0][0], rest[0][1][:1]), ("model.norm.weight", first[1])]
    with pytest.raises(McaError) as error:
        models.load_weights(wrong)
    shape = list(rest[0][1].shape)
    assert str(error.value) == (
        "rank 0 could not load the weights: the weights: 3 problems"
        f"\n  {rest[0][0]} has shape {[1, *shape[1:]]}, expected {shape}"
        "\n  1 unexpected tensor (model.norm.weight)"
        f"\n  1 missing tensor ({first[0]})"
    )


@pytest.mark.parametrize(
    "case,layout,settings",
    [
        ("llama", "tp2pp2sp", {"target_modules": ["up_proj", "k_proj"], "modules_to_save": ["lm_head"]}),
        ("qwen3_moe", "ep2pp2", {"target_modules": "all-linear", "target_parameters": STACKED}),
    ],
)
def test_adapters_arrive_alone_or_merged(
    case: str, layout: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    path = make_reference(case, tmp_path / "hf", "bfloat16").path
    run_ranks(4, adapters, path, layout, settings, tmp_path)

"""Parameters that an adapter trains, and those that its directory stores so that PEFT loads the trained model."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_cases
from harness import run_ranks
from layouts import arguments, world_size
from lora_training import adapter_of, tokens, train_megatron
from mca_config.errors import McaError
from reference import make_reference

pytestmark = pytest.mark.ranks


def settings_in(adapter: Path, **changes: Any) -> Path:
    """A copy of ``adapter`` next to it with other settings in its configuration."""
    target = adapter.with_name("-".join([adapter.name, *changes]))
    target.mkdir()
    (target / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text()) | changes
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


def continued(base: Path, adapter: Path) -> dict[str, Any]:
    """Return the trained parameters of an adapter of `peft`, and the unchanged ones. Runs on one rank."""
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import load_adapter
    from mca_train import McaTrainer

    models = load_adapter(AutoModel.from_pretrained(base), adapter)
    live = dict(models.adapter_parameters())
    found: dict[str, Any] = {"trained": [name for name, x in models.named_parameters() if x.requires_grad]}
    with models.disable_adapter():
        found["base"] = models.logits(tokens())
    train_megatron(models)
    with models.disable_adapter():
        found["after"] = models.logits(tokens())
    found["head"] = live["output_layer.weight"].detach().clone()
    with pytest.raises(
        McaError, match=r"on model.layers.0.self_attn.q_proj has rank 4 and scale 4, .* 4 and 2;"
    ):
        models.load_pretrained(settings_in(adapter, lora_alpha=16))
    with models.disable_adapter(), pytest.raises(McaError, match="disabled; merge it after the block"):
        models.merge_adapter()
    models.merge_adapter()
    with pytest.raises(McaError, match="call unmerge_adapter before load_pretrained"):
        models.load_pretrained(adapter)
    models.unmerge_adapter()
    models.load_pretrained(adapter)
    models.merge_adapter()
    args = train_cases.arguments(adapter.with_name("run"))
    trainer = train_cases.quietly(
        lambda: McaTrainer(model=models, args=args, train_dataset=train_cases.samples(4))
    )
    with pytest.raises(McaError, match="the adapter is merged, so nothing would be trained"):
        trainer.train()
    mica = load_adapter(AutoModel.from_pretrained(base), settings_in(adapter, init_lora_weights="mica"))
    found["mica"] = [name for name, x in mica.named_parameters() if x.requires_grad]
    return found


def test_tensors_that_peft_saves_by_itself_are_kept(tmp_path: Path) -> None:
    base = make_reference("llama", tmp_path).path
    made = adapter_of(base, tmp_path, {"target_modules": ["q_proj", "lm_head"]}, train=False)["adapter"]
    file = made / "adapter_model.safetensors"
    tensors = load_file(file)
    head = tensors["base_model.model.lm_head.base_layer.weight"]
    head += 0.5 * torch.randn(head.shape, generator=torch.Generator().manual_seed(2))
    save_file(tensors, file)
    (found,) = run_ranks(1, continued, base, made)
    assert found["trained"] and all("lora_" in name for name in found["trained"])
    assert torch.equal(found["head"], head)
    assert torch.equal(found["base"], found["after"])  # what dpo compares with
    assert found["mica"] == [name for name in found["trained"] if "lora_A" in name]


def refused(base: Path, sft: Path, folder: Path) -> list[str]:
    """Return the errors of adapters with parameters that the base model lacks. Runs on one rank."""
    import peft

    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model, load_adapter
    from mca_models.templates.classification_head import Head

    head, reported = Head(kind="sequence_classification", labels=("reward",)), []
    plain = {"r": 2, "target_modules": ["q_proj"]}
    scores = peft.LoraConfig(task_type="SEQ_CLS", **plain)
    tables = {**plain, "modules_to_save": ["embed_tokens", "lm_head"]}

    def scoring() -> Any:
        return AutoModel.from_pretrained(base, head=head)

    def grown() -> Any:
        return AutoModel.from_pretrained(base, vocab_size=77)

    for make in (
        lambda: get_peft_model(scoring(), plain),
        lambda: load_adapter(scoring(), sft),
        lambda: get_peft_model(grown(), plain),
        lambda: get_peft_model(grown(), {**tables, "modules_to_save": ["lm_head"]}),
    ):
        with pytest.raises(McaError) as error:
            make()
        reported.append(str(error.value))
    reward = get_peft_model(scoring(), scores)
    assert [param.mca_name() for param in reward.rules.saved] == ["output_layer.weight"]
    reward.save_pretrained(folder / "reward")
    again = load_adapter(scoring(), folder / "reward")
    assert torch.equal(again.logits(tokens()), reward.logits(tokens()))
    trained = get_peft_model(grown(), tables)
    for _, tensor in trained.adapter_parameters():
        tensor.detach().add_(1)
    trained.save_pretrained_as_hf(folder / "grown")
    require_unchanged_by_failure(grown(), folder / "grown")
    return reported


def require_unchanged_by_failure(model: Any, adapter: Path) -> None:
    """Asserts that ``adapter``, of which the last tensor cannot be read, leaves nothing on ``model``."""
    from mca_models.lora import Adapter
    from mca_models.megatron.peft import load_adapter

    piece, plain = Adapter.piece, model.logits(tokens())
    next(model.parameters()).requires_grad_(False)
    model.megatron.moe_router_bias_update_rate = 0.5

    def failing(self: Any, param: Any, rank: int, size: int) -> Any:
        return 1 / 0 if param.mca_name() == "output_layer.weight" else piece(self, param, rank, size)

    with patch.object(Adapter, "piece", failing), pytest.raises(ZeroDivisionError):
        load_adapter(model, adapter)
    assert torch.equal(model.logits(tokens()), plain)
    assert [parameter.requires_grad for parameter in model.parameters()].count(False) == 1
    peft = load_adapter(model, adapter)
    assert not torch.equal(peft.logits(tokens()), plain)
    assert model.megatron.moe_router_bias_update_rate == 0
    unloaded = [parameter.requires_grad for parameter in peft.merge_and_unload().parameters()]
    assert (unloaded[0], unloaded.count(False)) == (False, 1)
    assert model.megatron.moe_router_bias_update_rate == 0.5


def test_an_adapter_holds_what_its_base_model_lacks(tmp_path: Path) -> None:
    base = make_reference("llama", tmp_path).path
    sft = adapter_of(base, tmp_path, {"target_modules": ["q_proj"]}, train=False)["adapter"]
    (reported,) = run_ranks(1, refused, base, sft, tmp_path)
    for message in reported[:2]:
        assert message.startswith("the adapter does not save score.weight, the new head, which ")
    assert reported[2].startswith(
        "the adapter does not save the new rows of model.embed_tokens.weight, which "
    )
    assert "new rows of model.embed_tokens.weight" in reported[3]
    tables = load_file(tmp_path / "grown" / "adapter_model.safetensors")
    assert tables["base_model.model.model.embed_tokens.weight"].shape[0] == 77


def with_tables(
    hf: dict[str, Any], layout: str, saved: Path
) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """This rank's copies of a trained embedding after some steps, and after it was loaded into another model.

    And whether what optimizers hold is read from the checkpoint where a run goes on in another precision.
    """
    from mca_models.megatron import AutoModel
    from mca_models.megatron.peft import get_peft_model, load_adapter
    from mca_models.templates import config_from_hf
    from mca_train.checkpoint.model import saved_weights

    config = config_from_hf(hf)
    settings = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": ["o_proj"]}
    settings |= {"modules_to_save": ["embed_tokens", "lm_head"]}
    models = get_peft_model(AutoModel.from_config(config, arguments(layout)), settings)
    train_megatron(models)
    models.save_pretrained(saved / layout)
    read = saved_weights(models, saved / layout)
    held = [x for chunk in models.chunks for x in chunk.parameters() if x.requires_grad]
    again = load_adapter(AutoModel.from_config(config, arguments(layout)), saved / layout)
    name = "embedding.word_embeddings.weight"
    trained, loaded = (
        [x.detach().clone() for item, x in some.local_params() if item.param.mca_name() == name]
        for some in (models, again)
    )
    return trained, loaded, all(torch.equal(read(param), param) for param in held)


def test_every_copy_of_a_trained_embedding_is_trained_and_loaded(tmp_path: Path) -> None:
    path = make_reference("deepseek_v3", tmp_path).path
    hf = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    ((alone,), *_) = run_ranks(1, with_tables, hf, "tp1", tmp_path)[0]
    found = run_ranks(world_size("pp2"), with_tables, hf, "pp2", tmp_path, timeout=60)
    for (trained,), (loaded,), is_read in found:
        assert is_read
        assert torch.equal(trained, found[0][0][0])  # one on each stage
        assert torch.equal(loaded, trained)
        torch.testing.assert_close(
            trained, alone, atol=1e-4, rtol=0
        )  # fp32 sums in another order, of 3 steps

"""ROLL's own files on mca: its weight update sends the exported tensors, its Megatron strategy trains.

    uv venv -p 3.11 .venv-roll
    uv pip install -p .venv-roll megatron-core==0.16.1 -e packages/mca-config -e packages/mca-models \
        -e packages/mca-train pytest pytest-timeout pytest-xdist hypothesis ray==2.48.0 TransferQueue==0.1.6 \
        tensordict codetiming more_itertools dacite omegaconf hydra-core jsonlines einops pillow pybase64 modelscope \
        opentelemetry-sdk opentelemetry-exporter-otlp
    uv pip install -p .venv-roll -U "numpy>=2"
    MCA_ROLL=CHECKOUT .venv-roll/bin/python -m pytest -n 0 -m qualify --cases all integration_tests/cli/test_roll.py

ROLL is not on the package index: MCA_ROLL names a checkout. Without it only the facade is tested.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_hf
import torch
import transformers

from harness import run_ranks
from mca_config.errors import McaError
from roll_runs import (
    CHECKOUT,
    STEPS,
    batch_of,
    facade,
    reference_losses,
    train_steps,
    train_strategy,
    worker_of_roll,
)
from vision_reference import vision_model

needs_roll = pytest.mark.skipif(CHECKOUT is None, reason="needs MCA_ROLL, a checkout of ROLL")
pytestmark = pytest.mark.ranks

TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
CP, VPP = "context_parallel_size", "virtual_pipeline_model_parallel_size"


def arguments(names: SimpleNamespace, out: Path, **options: Any) -> Any:
    return names.TrainingArguments(
        output_dir=str(out), report_to="none", use_cpu=True, gradient_accumulation_steps=2, **options
    )


def gathered(names: SimpleNamespace, models: Any) -> dict[str, torch.Tensor]:
    """Return this rank's tensors as ROLL sends them: shards of all tp ranks, converted one by one."""
    from megatron.core import parallel_state

    converter = names.ModelConverter(models.config, to_hf=True, efficient_mode=True)
    found = {}
    for stage, chunk in enumerate(models.get_models()):
        for live, weight in sorted(chunk.state_dict_for_save_checkpoint().items()):
            if live.endswith("_extra_state"):
                continue
            name = converter.dist_converter.preprocess_layer_index(live, vp_stage=stage)
            expert = converter.dist_converter.is_expert_parallel_weight(name)
            group = (
                parallel_state.get_expert_tensor_parallel_group()
                if expert
                else parallel_state.get_tensor_model_parallel_group()
            )
            shards = [torch.empty_like(weight) for _ in range(group.size())]
            torch.distributed.all_gather(shards, weight, group=group)
            found |= converter.convert_to_hf({name: shards}, layer_index_preprocessed=True)
    return found


def check_facade(path: Path, out: Path, options: dict[str, Any]) -> list[str]:
    """Return the faults of the facade on this rank."""
    names = facade()
    models = names.AutoModel.from_pretrained(path, arguments(names, out, **options))
    exported = dict(models.model.export_weights())
    mine = gathered(names, models)
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    sent = {name: tensor for part in every for name, tensor in part.items()}
    faults = sorted(sent.keys() ^ exported.keys())
    faults += [name for name in sent.keys() & exported.keys() if not torch.equal(sent[name], exported[name])]
    tokens = torch.arange(2 * 16).reshape(2, 16)
    shard = models[0].get_batch_on_this_cp_rank({"x": tokens}, dim3_keys=[])["x"].double().requires_grad_()
    whole = names.context_parallel_gather(shard, parallel_dim=1)
    weights = torch.arange(16.0, dtype=torch.float64)
    (whole * weights).sum().backward()
    own = models[0].get_batch_on_this_cp_rank({"x": weights.expand(2, 16)}, dim3_keys=[])["x"]
    faults += (
        [] if torch.equal(whole.detach(), tokens.double()) and torch.equal(shard.grad, own) else ["gather"]
    )
    models.save_pretrained_as_hf(str(out))
    models[0].save_pretrained(str(out), ckpt_format="mca")
    with torch.no_grad():
        for parameter in models.parameters():
            parameter.zero_()
    models.load_state_dict(names.load_state_dict_from_checkpoint(str(out)))
    again = dict(models.model.export_weights())
    return faults + [name for name in exported if not torch.equal(again[name], exported[name])]


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param("qwen2", {TP: 2, "ckpt_format": "legacy"}, id="tp2"),
        pytest.param("llama", {PP: 2, VPP: 2}, id="pp2_vpp2"),
        pytest.param("qwen3_moe", {EP: 2}, id="ep2"),
        pytest.param("gemma2", {CP: 2}, id="tied_cp2"),
    ],
)
def test_weights_tokens_and_checkpoints_pass_through_the_facade(case, options, tmp_path):
    size = {"num_hidden_layers": 4} if VPP in options else {"vocab_size": 65}  # padded to 66 rows at tp 2
    path = tiny_hf.save(case, tmp_path / "model", **size)
    assert run_ranks(2, check_facade, path, tmp_path / "out", options) == [[], []]
    assert (tmp_path / "out/config.json").is_file()
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def log_probs_of_shards() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities and gradients of logits that two ranks share, and those of torch."""
    from mca_config.layout import ParallelLayout
    from mca_models.megatron.distributed import parallel

    parallel.start(ParallelLayout(tensor_model_parallel_size=2))
    whole = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.tensor([[0, 3, 4, 7, 2], [1, 6, 5, 0, 7]])
    wanted = whole.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    wanted.sum().backward()
    half = whole.detach().chunk(2, -1)[torch.distributed.get_rank()].clone().requires_grad_()
    found = facade().vocab_parallel_logprobs(half, target)
    found.sum().backward()
    assert torch.equal(half, whole.detach().chunk(2, -1)[torch.distributed.get_rank()])
    return found.detach(), wanted.detach(), half.grad, whole.grad.chunk(2, -1)[torch.distributed.get_rank()]


def test_log_probs_of_a_sharded_vocabulary_equal_torch():
    for found, wanted, gradient, wanted_gradient in run_ranks(2, log_probs_of_shards):
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(gradient, wanted_gradient)


def replay_for_other_tokens(replay: Any) -> None:
    """Replay experts of 8 tokens in a pass of 6."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    replay.set_target_indices(torch.ones(8, 2, dtype=torch.long))
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    replay.experts(6)


def rejections(path: Path, fused: Path, sparse: Path, routed: Path, seeing: Path, out: Path) -> list[str]:
    """Return the error of each use that the facade does not support."""
    names = facade()
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from peft import LoraConfig

    from mca_train.clients.chunk_lora import attach

    args = arguments(names, out)
    names.AutoModel.from_pretrained(routed, arguments(names, out, moe_enable_routing_replay=True))
    models, stacked, media = (
        names.AutoModel.from_pretrained(folder, args) for folder in (path, fused, sparse)
    )
    found = []
    for work in (
        lambda: names.find_all_embedding_modules(models[0]),
        lambda: models[0].attach_lora(LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])),
        lambda: attach(SimpleNamespace(chunks=[None, None]), LoraConfig(target_modules=["q_proj"]), 0),
        lambda: names.AutoModel.from_pretrained(path, arguments(names, out, moe_enable_routing_replay=True)),
        lambda: RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD),
        lambda: replay_for_other_tokens(RouterReplay.global_router_replay_instances[0]),
        lambda: names.AutoModel.from_pretrained(seeing, args),
        lambda: names.ModelConverter(models.config),
        lambda: names.ModelConverter(stacked.config, to_hf=True),
        lambda: names.ModelConverter(media.config, to_hf=True),
        lambda: names.ModelConverter(models.config, to_hf=True).dist_converter.preprocess_layer_index("x", 0),
        lambda: names.get_ltor_masks_and_position_ids(torch.ones(1, 4)),
        lambda: names.get_megatron_lr_scheduler(args, 1, None),
    ):
        try:
            work()
            found.append("accepted")
        except McaError as error:
            found.append(str(error))
    return found


def test_what_does_not_map_is_an_error(tmp_path):
    path, fused = tiny_hf.save("llama", tmp_path / "a"), tiny_hf.save("gpt_oss", tmp_path / "b")
    vision_model("llava").save_pretrained(tmp_path / "d")
    routed = tiny_hf.save("qwen3_moe", tmp_path / "c")
    vision_model("qwen3_vl_moe").save_pretrained(tmp_path / "e")
    paths = (path, fused, tmp_path / "e", routed, tmp_path / "d")
    (messages,) = run_ranks(1, rejections, *paths, tmp_path / "out")
    expected = (
        "lora_target: all-embedding",
        "additional_target: lm_head",
        "lora_target is not supported with virtual_pipeline_model_parallel_size",
        "router_replay.mode: R3 needs a model with experts",
        "router_replay.mode: R2",
        "routed_experts has 8 rows on this rank, whose routers have 6 tokens; set use_dynamic_batching_in_train",
        "images of llava are not supported with ROLL",
        "to_hf=False",
        "gpt_oss: its Hugging Face tensors hold all experts",
        "qwen3_vl_moe: its Hugging Face tensors hold all experts",
        "x: chunk 0",
        "compile_warmup",
        "set use_distributed_optimizer or save_only_model",
    )
    for message, words in zip(messages, expected, strict=True):
        assert words in message


def stream_of_roll(path: Path, out: Path, options: dict[str, Any]) -> list[str]:
    """Return the differences between ROLL's unmodified weight stream and ``export_weights``."""
    names = facade()
    from roll.third_party.megatron import model_update

    models = names.AutoModel.from_pretrained(path, arguments(names, out, **options))
    exported = dict(models.model.export_weights())
    meta = model_update.gather_weights_meta_cross_pp(models.get_models())
    sent: dict[str, torch.Tensor] = {}
    for pairs in model_update.gather_all_hf_weights(models.get_models(), 20_000, meta):
        sent |= dict(pairs)
    return sorted(sent.keys() ^ exported.keys()) + [
        name for name in sent.keys() & exported.keys() if not torch.equal(sent[name], exported[name])
    ]


STREAMS = {
    "tp2": ("qwen2", {TP: 2}),
    "tied_pp2": ("gemma2", {PP: 2}),
    "pp2_vpp2": ("llama", {PP: 2, VPP: 2}),
    "ep2": ("qwen3_moe", {EP: 2}),
    "tp2_pp2": ("llama", {TP: 2, PP: 2}),
    "tp2_ep2_pp2": ("qwen3_moe", {TP: 2, EP: 2, PP: 2, "expert_tensor_parallel_size": 1}),
}


@needs_roll
@pytest.mark.qualify
@pytest.mark.parametrize("layout", STREAMS)
def test_rolls_weight_stream_sends_the_exported_tensors(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # ROLL writes its logs there
    case, options = STREAMS[layout]
    size = {"num_hidden_layers": 4} if VPP in options else {}
    path = tiny_hf.save(case, tmp_path / "model", **size)
    ranks = options.get(TP, 1) * options.get(PP, 1) * (1 if TP in options else options.get(EP, 1))
    assert run_ranks(ranks, stream_of_roll, path, tmp_path / "out", options) == [[]] * ranks


def train_with_roll(path: Path, out: Path, options: dict[str, Any]) -> list[float] | None:
    """Return the loss of each step of ROLL's strategy; None where the last stage is elsewhere."""
    sft = options.pop("sft", False)
    strategy = train_strategy(path, out, options)
    losses = train_steps(strategy, range(STEPS), sft=sft)
    saved = dict(strategy.model.model.export_weights())
    assert all(tensor.isfinite().all() for tensor in saved.values())
    return losses if strategy.worker.rank_info.is_pipeline_last_stage else None


def train_and_save(path: Path, out: Path, options: dict[str, Any]) -> tuple[list[float], Any]:
    """Train, saving after the first step; return the losses of the rest and the final weights."""
    strategy = train_strategy(path, out, options)
    train_steps(strategy, range(1))
    strategy.save_checkpoint(str(out / "saved"), global_step=1, ckpt_id="1")
    losses = train_steps(strategy, range(1, STEPS))
    return losses, dict(strategy.model.model.export_weights())


def load_and_train(path: Path, out: Path, options: dict[str, Any]) -> tuple[list[float], Any]:
    """Load the checkpoint of `train_and_save` in a new strategy; return the losses of the rest and the weights."""
    strategy = train_strategy(path, out, options)
    strategy.load_checkpoint(str(out / "saved"))
    losses = train_steps(strategy, range(1, STEPS))
    return losses, dict(strategy.model.model.export_weights())


LAYOUTS = {
    "tp2": {TP: 2},
    "cp2": {CP: 2},
    "packed": {"packing": True},
    "tp2_pp2": {TP: 2, PP: 2},
}
TRAINED = LAYOUTS | {
    "sft_cp2": {CP: 2, "sft": True},
    "sft_tp2_pp2": {TP: 2, PP: 2, "sft": True},
    "frozen_embedding": {TP: 2, "frozen": True},
}


@needs_roll
@pytest.mark.qualify
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", TRAINED)
def test_rolls_strategy_has_the_losses_of_transformers(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from tokenizers_for_tests import byte_tokenizer

    path = tiny_hf.save("llama", tmp_path / "model")
    byte_tokenizer().save_pretrained(path)
    options = dict(TRAINED[layout])
    ranks = options.get(TP, 1) * options.get(CP, 1) * options.get(PP, 1)
    found = run_ranks(ranks, train_with_roll, path, tmp_path / "out", options, timeout=900)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    model.get_input_embeddings().requires_grad_(layout != "frozen_embedding")
    wanted = reference_losses(model)
    for losses in found:
        # 1e-5: the tolerance of losses between layouts; Adam with steps of 1e-2 amplifies rounding
        assert losses is None or losses == pytest.approx(wanted, rel=1e-5)
    assert any(found)


def infer_with_roll(path: Path, out: Path, options: dict[str, Any]) -> Any:
    """Return the log-probabilities of ROLL's inference strategy; None where it returns none."""
    facade()
    from roll.distributed.scheduler.protocol import DataProto
    from roll.distributed.strategy.megatron_strategy import MegatronInferStrategy
    from roll.models.model_providers import default_actor_model_provider

    strategy = MegatronInferStrategy(worker_of_roll(path, out, options))
    strategy.initialize(default_actor_model_provider)

    def log_probs(data: Any, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ids, mask = data.batch["input_ids"], data.batch["attention_mask"]
        found = strategy.op_compute_log_probs(logits, ids, mask)
        return found.sum(), {"log_probs": found.clone().detach()}

    info = {"micro_batch_size": 2, "loss_mask_keys": []}
    found = strategy.forward_step(DataProto.from_dict(batch_of(0), meta_info=info), log_probs)
    return None if found is None else found["log_probs"]


@needs_roll
@pytest.mark.qualify
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rolls_inference_strategy_has_the_log_probs_of_transformers(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from tokenizers_for_tests import byte_tokenizer

    path = tiny_hf.save("llama", tmp_path / "model")
    byte_tokenizer().save_pretrained(path)
    options = dict(LAYOUTS[layout])
    ranks = options.get(TP, 1) * options.get(CP, 1) * options.get(PP, 1)
    found = [
        x
        for x in run_ranks(ranks, infer_with_roll, path, tmp_path / "out", options, timeout=900)
        if x is not None
    ]
    batch = batch_of(0)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(path)(
            input_ids=ids, attention_mask=mask
        ).logits
    wanted = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]
    assert len(found) == 1
    # 1e-4: fp32 logits of two implementations
    torch.testing.assert_close(torch.as_tensor(found[0]), wanted, rtol=0, atol=1e-4)


SAVED = {
    "dp2": ("llama", {}),
    "tp2": ("llama", {TP: 2}),
    "pp2_vpp2": ("llama", {PP: 2, VPP: 2}),
    "ep2": ("qwen3_moe", {EP: 2}),
}


@needs_roll
@pytest.mark.qualify
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # Megatron's own checkpoints
@pytest.mark.parametrize("layout", SAVED)
def test_a_loaded_checkpoint_of_roll_continues_with_the_same_bits(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from tokenizers_for_tests import byte_tokenizer

    case, options = SAVED[layout]
    path = tiny_hf.save(case, tmp_path / "model", **({"num_hidden_layers": 4} if VPP in options else {}))
    byte_tokenizer().save_pretrained(path)
    decay = {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 1}}
    options = options | decay | {"save_hf_model": True}
    first = run_ranks(2, train_and_save, path, tmp_path / "out", options, timeout=500)
    again = run_ranks(2, load_and_train, path, tmp_path / "out", options, timeout=500)
    for (losses, weights), (losses_again, weights_again) in zip(first, again, strict=True):
        assert losses == losses_again
        assert weights.keys() == weights_again.keys()
        assert all(weights[name].equal(weights_again[name]) for name in weights)
    before = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/saved").state_dict()
    assert before.keys() == after.keys()
    assert not all(before[name].equal(after[name]) for name in before)


@needs_roll
@pytest.mark.qualify
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_a_checkpoint_of_roll_continues_on_another_layout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from tokenizers_for_tests import byte_tokenizer

    path = tiny_hf.save("llama", tmp_path / "model")
    byte_tokenizer().save_pretrained(path)
    first = run_ranks(2, train_and_save, path, tmp_path / "out", {TP: 2}, timeout=500)
    again = run_ranks(2, load_and_train, path, tmp_path / "out", {PP: 2}, timeout=500)
    losses, weights = first[0]
    assert again[-1][0] == pytest.approx(losses, rel=1e-5)  # losses between layouts
    for name, weight in again[-1][1].items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-5)  # Adam's steps are 1e-2

"""Bridge of ms-swift's backend ``mca`` on real ranks, with stand-ins of ms-swift's arguments only."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_hf
import torch
import transformers
from safetensors.torch import load_file

from harness import run_ranks
from mca_config.errors import McaError

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "decoder_first_pipeline_num_layers": None},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
}
MODELS = {"tp2": "qwen2", "pp2_vpp2": "llama", "ep2": "qwen3_moe"}


def swift_args(folder: Path, **options: Any) -> SimpleNamespace:
    """Return arguments with what ms-swift 4.6.0 sets by default for ``megatron sft`` of a text model."""
    defaults = {
        "model_dir": str(folder),
        "torch_dtype": torch.float32,
        "seed": 42,
        "tuner_type": "full",
        "task_type": "causal_lm",
        "rlhf_type": None,
        "is_multimodal": False,
        "mtp_num_layers": None,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": False,
        "calculate_per_token_loss": True,
        "attention_backend": SimpleNamespace(name="local"),
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
        "overlap_p2p_comm": True,
        "megatron_extra_kwargs": None,
    }
    return SimpleNamespace(**defaults | options)


def built(folder: Path, options: dict[str, Any]) -> list[Any]:
    """Return the chunks that ms-swift gets for the checkpoint in ``folder``."""
    from mca_train.clients.ms_swift import get_mcore_model

    config = transformers.AutoConfig.from_pretrained(folder)
    return get_mcore_model(swift_args(folder, **options), config)


def load_export_save(policy: Path, reference: Path, out: Path, options: dict[str, Any]) -> list[str]:
    """Fill two models through one bridge; return the names that the policy exports differently from its files."""
    chunks, others = built(policy, options), built(reference, options)
    bridge = chunks[0].config.bridge
    wrapped = [SimpleNamespace(config=chunk.config, module=chunk) for chunk in chunks]
    bridge.load_weights(wrapped, str(policy))
    bridge.load_weights(others, str(reference))
    faults = []
    for which, folder in ((chunks, policy), (others, reference)):
        stored = load_file(folder / "model.safetensors")
        sent = dict(bridge.export_weights(which, target_device="cpu"))
        faults += sorted(stored.keys() ^ sent.keys())
        faults += [name for name in stored if not torch.equal(stored[name], sent[name])]
    halved = dict(bridge.export_weights(chunks, only_master_rank=True, converter=only_norms))
    first = torch.distributed.get_rank() == 0
    faults += [] if bool(halved) == first and all("norm" in name for name in halved) else ["converter"]
    if first:
        out.mkdir()
        (out / "args.json").write_text("{}")
    torch.distributed.barrier()
    bridge.save_weights(chunks, str(out), args=swift_args(policy), processor=None)
    return faults


def only_norms(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
    return (name, tensor) if "norm" in name else None


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_pass_through_the_bridge_bit_exact(layout, tmp_path):
    size = {"num_hidden_layers": 4} if layout == "pp2_vpp2" else {}
    policy = tiny_hf.save(MODELS[layout], tmp_path / "policy", **size)
    reference = tiny_hf.save(MODELS[layout], tmp_path / "reference", seed=1, **size)
    (policy / "tokenizer.json").write_text("{}")
    out = tmp_path / "checkpoint-1"
    faults = run_ranks(2, load_export_save, policy, reference, out, LAYOUTS[layout])
    assert faults == [[], []]
    assert {path.name for path in out.iterdir()} >= {"args.json", "config.json", "tokenizer.json"}
    again = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    first = transformers.AutoModelForCausalLM.from_pretrained(policy).state_dict()
    assert all(torch.equal(again[name], first[name]) for name in first)


def rejected(work: Callable[[], object]) -> str:
    try:
        work()
    except McaError as error:
        return str(error)
    return "accepted"


def refuse(folder: Path, other: Path) -> list[str]:
    """Return the error of each call that the bridge cannot serve."""
    chunks = built(folder, {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    bridge = chunks[0].config.bridge
    return [
        rejected(lambda: bridge.load_weights(chunks, str(folder), peft_format=True)),
        rejected(lambda: bridge.load_weights(chunks[:1], str(folder))),
        rejected(lambda: list(bridge.export_weights([SimpleNamespace(config=None)]))),
        rejected(lambda: bridge.load_weights(chunks, str(other))),
        rejected(lambda: bridge.save_weights(chunks, str(folder), save_missing_weights=True)),
    ]


@pytest.mark.ranks
def test_calls_that_cannot_be_served_are_errors(tmp_path):
    folder = tiny_hf.save("llama", tmp_path / "model", num_hidden_layers=4)
    other = tiny_hf.save("llama", tmp_path / "other", num_hidden_layers=8)
    for messages in run_ranks(2, refuse, folder, other):
        for message, expected in zip(
            messages,
            ("tuner_type", "1 of 2 chunks", "get_mcore_model", "another model", "save_missing"),
            strict=True,
        ):
            assert expected in message


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tuner_type", "lora"),
        ("rlhf_type", "dpo"),
        ("task_type", "seq_cls"),
        ("is_multimodal", True),
        ("calculate_per_token_loss", False),
        ("mtp_num_layers", 1),
    ],
)
def test_an_unsupported_option_of_ms_swift_is_an_error(option, value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(McaError, match=f"{option} {value} is not supported; set "):
        built(tmp_path, {option: value})

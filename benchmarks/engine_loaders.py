"""Load what `export_weights` sends with vLLM's own loaders, on the CPU, in an environment without mca.

    python benchmarks/engine_loaders.py send FOLDER              # mca's environment: tiny models on four ranks
    VENV/bin/python benchmarks/engine_loaders.py load FOLDER     # an environment with vLLM; needs no GPU

``send`` writes the tensors and the configuration of adapters for each model. ``load`` fills vLLM's parameters with NaN,
loads the stream, and names parameters that still have NaN, and tensors that the loader ignored. Then it loads each
adapter and compares the shapes of its factors with those of the weights that they change.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "integration_tests" / "support"))

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADDRESS = "tcp://127.0.0.1:29781"


def configs() -> dict[str, tuple[str, Any]]:
    """Return the layout and the configuration of each model."""
    import transformers

    latent = {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32}
    routed = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    tower = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
    tokens = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252}
    return {
        "llama": ("tp2-pp2", transformers.LlamaConfig(**SIZES)),
        "qwen3": ("tp2-pp2", transformers.Qwen3Config(**SIZES, head_dim=32)),
        "qwen3_moe": ("ep2-pp2", transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32)),
        "deepseek_v3": (
            "ep2-pp2",
            transformers.DeepseekV3Config(
                **SIZES | latent | routed | {"num_key_value_heads": 4, "moe_intermediate_size": 64},
                num_experts_per_tok=2,
                first_k_dense_replace=1,
                v_head_dim=32,
                topk_method="noaux_tc",
            ),
        ),
        "qwen2_5_vl": (
            "tp2-pp2",
            transformers.Qwen2_5_VLConfig(
                text_config=SIZES | {"rope_parameters": rope},
                vision_config=tower | {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 112},
                vision_end_token_id=253,
                tie_word_embeddings=False,
                **tokens,
            ),
        ),
    }


def send(path: Path, out: Path, layout: str) -> None:
    """Write the stream and the adapters of a model, on every rank of ``layout``."""
    import torch
    from safetensors.torch import save_file

    from layouts import arguments
    from mca_models import AutoModel, get_peft_model

    def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None) -> None:
        if torch.distributed.get_rank() == 0:
            folder.mkdir(exist_ok=True)
            contiguous = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
            save_file(
                contiguous, folder / ("stream.safetensors" if config is None else "adapter_model.safetensors")
            )
            if config is not None:
                (folder / "adapter_config.json").write_text(json.dumps(config, default=list))

    models = AutoModel.from_pretrained(path, arguments(layout))
    write(out, dict(models.export_weights(bucket_bytes=1 << 16)), None)
    adapters: dict[str, dict[str, Any]] = {"linears": {"target_modules": "all-linear"}}
    if "ep" in layout:
        adapters["experts"] = {"target_modules": ["o_proj"], "target_parameters": STACKED}
    for name, settings in adapters.items():
        base = AutoModel.from_pretrained(path, arguments(layout))
        adapted = get_peft_model(base, {"r": 4, "lora_alpha": 8, **settings}, seed=1)
        per_expert = name == "experts"
        tensors = dict(adapted.export_weights(per_expert=per_expert))
        write(out / name, tensors, adapted.peft_config(per_expert=per_expert))


def send_all(folder: Path) -> None:
    """Save each model with random weights and write what its ranks send."""
    import transformers

    from harness import run_ranks

    for name, (layout, config) in configs().items():
        out = folder / name
        out.mkdir(parents=True, exist_ok=True)
        kind = getattr(transformers, type(config).__name__.removesuffix("Config") + _head(name))
        kind(config).save_pretrained(out / "hf")
        if name == "deepseek_v3":  # a key of the published config.json that transformers does not write
            document = json.loads((out / "hf/config.json").read_text())
            (out / "hf/config.json").write_text(json.dumps(document | {"topk_method": "noaux_tc"}))
        run_ranks(4, send, out / "hf", out, layout, timeout=900)
        print(f"{name}: sent on {layout}")


def _head(name: str) -> str:
    return "ForConditionalGeneration" if name.endswith("_vl") else "ForCausalLM"


def load(folder: Path) -> Iterator[str]:
    """Yield what vLLM's loaders did with the stream and the adapters in ``folder``."""
    import torch
    from safetensors.torch import load_file
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        LoRAConfig,
        ModelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model

    model_config = ModelConfig(
        model=str(folder / "hf"),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
    )
    config = VllmConfig(
        model_config=model_config,
        device_config=DeviceConfig(device="cpu"),
        cache_config=CacheConfig(block_size=32),
        lora_config=LoRAConfig(max_lora_rank=8, max_loras=1),
    )
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, ADDRESS, 0, "gloo")
        initialize_model_parallel(1, 1)
        model = initialize_model(config)
        stream = load_file(folder / "stream.safetensors")
        parameters = {name: x for name, x in model.named_parameters() if x.is_floating_point()}
        for parameter in parameters.values():
            parameter.data.fill_(float("nan"))
        model.load_weights(iter(stream.items()))
        unfilled = [name for name, x in parameters.items() if bool(torch.isnan(x).any())]
        ignored = [pair[0] for pair in stream.items() if not model.load_weights(iter([pair]))]
        yield f"{len(stream)} tensors fill {len(parameters)} parameters; unfilled {unfilled}, ignored {ignored}"
        for adapter in sorted(path.parent for path in folder.glob("*/adapter_config.json")):
            yield f"{adapter.name}: {_load_adapter(model, config, adapter, stream)}"


def _load_adapter(model: Any, config: Any, folder: Path, stream: dict[str, Any]) -> str:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import get_supported_lora_modules, process_packed_modules_mapping

    packed = process_packed_modules_mapping(model)
    expected = {part for name in get_supported_lora_modules(model) for part in (name, *packed.get(name, ()))}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    helper = PEFTHelper.from_local_dir(str(folder), 64)
    helper.validate_legal(config.lora_config)
    adapter = LoRAModel.from_local_checkpoint(
        str(folder),
        expected,
        peft_helper=helper,
        lora_model_id=1,
        device="cpu",
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    shapes = {tuple(weight.shape) for weight in stream.values()}
    wrong = [
        name
        for name, pair in adapter.loras.items()
        if pair.lora_a is None
        or pair.lora_b is None
        or (pair.lora_b.shape[0], pair.lora_a.shape[1]) not in shapes
    ]
    return f"{len(adapter.loras)} pairs of factors, wrong {wrong}"


def load_all(folder: Path) -> None:
    """Run `load` for each model in a process: vLLM's groups depend on the model."""
    for path in sorted(folder.glob("*/stream.safetensors")):
        if (child := os.fork()) == 0:
            for line in load(path.parent):
                print(f"{path.parent.name}: {line}", flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{path.parent.name}: failed")


def use_cpu() -> None:
    """Make a vLLM that was built for GPUs choose its CPU platform, and inspect models in this process."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()  # before modules that ask for it at their import
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["send", "load"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.step == "send":
        send_all(options.folder)
    else:
        use_cpu()
        load_all(options.folder)

"""Quantises tiny checkpoints, and says with torch what they stand for."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = (12, 20)  # divides nothing here


def fp8_copy(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """Writes ``source`` with its linears in fp8; returns the weights in fp32 as they are to be read."""
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or not name.endswith("_proj.weight"):
            stored[name] = plain[name] = tensor
            continue
        grid = [-(-n // b) for n, b in zip(tensor.shape, BLOCK, strict=True)]
        scale = torch.rand(grid) * 1e-2 + 1e-3
        spread = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        spread = spread[: tensor.shape[0], : tensor.shape[1]]
        stored[name] = (tensor.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        plain[name] = stored[name].float() * spread
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    _write(source, target, stored, quantisation)
    return plain


def mxfp4_copy(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """Writes ``source``, a gpt-oss, with random experts in mxfp4; returns the weights to be read."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = plain[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    _write(source, target, stored, {"quant_method": "mxfp4"})
    return plain


def _write(source: Path, target: Path, stored: dict[str, torch.Tensor], quantisation: dict) -> None:
    target.mkdir()
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))

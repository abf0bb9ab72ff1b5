"""MTP layers in plain PyTorch around transformers' layers, and checkpoints with them as they are published."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from reference import hf_model

NUMBERED = {
    "enorm": "model.layers.{layer}.enorm",
    "hnorm": "model.layers.{layer}.hnorm",
    "eh_proj": "model.layers.{layer}.eh_proj",
    "head_norm": "model.layers.{layer}.shared_head.norm",
    "inside": "model.layers.{layer}.",
}
"""DeepSeek's and GLM's names: numbered after the decoder's layers."""
APART = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "head_norm": "mtp.norm",
    "inside": "mtp.layers.{layer}.",
}
"""Qwen's names."""
MIMO = {
    "enorm": "model.mtp_layers.{layer}.token_layernorm",
    "hnorm": "model.mtp_layers.{layer}.hidden_layernorm",
    "eh_proj": "model.mtp_layers.{layer}.input_proj",
    "head_norm": "model.mtp_layers.{layer}.final_layernorm",
    "inside": "model.mtp_layers.{layer}.",
}
"""MiMo's names; its layer takes hidden states before the final norm, and these before the embedding."""


SCALE = 0.3
"""Weight of the MTP layers' loss where a test takes it into account."""


class PredictionLayer(torch.nn.Module):
    """One layer that sees the last hidden states and the embedding of the token after."""

    def __init__(self, main: Any, generator: torch.Generator, *, hidden_first: bool = False) -> None:
        super().__init__()
        self.hidden_first = hidden_first
        config = main.config
        norm = type(main.model.norm)
        self.enorm, self.hnorm, self.head_norm = (
            norm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = copy.deepcopy(_like(main.model.layers))
        with torch.no_grad():
            for tensor in self.own().values():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise * 0.15 + (1 if tensor.dim() < 2 else 0))

    def own(self) -> dict[str, torch.Tensor]:
        """The tensors around the decoder layer."""
        return {name: getattr(self, name).weight for name in ("enorm", "hnorm", "eh_proj", "head_norm")}

    def forward(self, hidden: torch.Tensor, following: torch.Tensor, rotary: Any) -> torch.Tensor:
        """The next hidden states ``[b, s, hidden]`` from the last ones and the embeddings of the tokens after."""
        both = [self.enorm(following), self.hnorm(hidden)]
        mixed = self.eh_proj(torch.cat(both[::-1] if self.hidden_first else both, -1))
        length = hidden.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        out = self.layer(mixed, attention_mask=mask, position_embeddings=rotary)
        normed: torch.Tensor = self.head_norm(out[0] if isinstance(out, tuple) else out)
        return normed


def _like(layers: Any) -> Any:
    """The last layer with attention, and experts if any has them: what MTP layers hold."""
    attention = [layer for layer in layers if hasattr(layer, "self_attn")]
    sparse = [layer for layer in attention if any("experts" in name for name, _ in layer.named_modules())]
    return (sparse or attention)[-1]


class WithPrediction(torch.nn.Module):
    """A transformers model and ``count`` MTP layers.

    Args:
        main: The model; its last layer is what MTP layers are made like.
        count: MTP layers.
        names: Of the tensors around their decoder layer in checkpoints.
    """

    def __init__(self, main: Any, count: int = 1, names: Mapping[str, str] = NUMBERED) -> None:
        super().__init__()
        self.main, self.names = main, names
        generator = torch.Generator().manual_seed(3)
        self.layers = torch.nn.ModuleList(
            PredictionLayer(main, generator, hidden_first=names is MIMO) for _ in range(count)
        )

    def logits(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits of the next token, of the one after it, and so on: ``[b, s, vocab]`` each."""
        inner = self.main.model
        before: list[torch.Tensor] = []
        hook = inner.norm.register_forward_pre_hook(lambda norm, args: before.extend(args))
        hidden = inner(input_ids, use_cache=False).last_hidden_state
        hook.remove()
        found = [self.main.lm_head(hidden)]
        positions = torch.arange(input_ids.shape[1])[None]
        if hasattr(inner.rotary_emb, "mrope_section"):
            positions = positions.expand(3, 1, -1)  # which older transformers do not do by themselves
        rotary = inner.rotary_emb(hidden, positions)
        hidden = before[0] if self.names is MIMO else hidden
        for depth, layer in enumerate(self.layers, 1):
            hidden = layer(hidden, inner.embed_tokens(input_ids.roll(-depth, 1)), rotary)
            found.append(self.main.lm_head(hidden))
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the MTP layers by their names in checkpoints."""
        found = {}
        for number, each in enumerate(self.layers):
            for name, tensor in each.own().items():
                found[f"{self.names[name]}.weight".format(layer=self._number(number))] = tensor
            prefix = self.names["inside"].format(layer=self._number(number))
            found |= {prefix + name: tensor for name, tensor in each.layer.state_dict(keep_vars=True).items()}
        return found

    def _number(self, number: int) -> int:
        """HF's number of an MTP layer."""
        return number + (self.main.config.num_hidden_layers if self.names is NUMBERED else 0)

    def save(self, path: Path) -> Path:
        """A checkpoint as such models are published."""
        self.main.save_pretrained(path)
        tensors = load_file(path / "model.safetensors")
        for layer in self.layers:
            tensors |= self._saved(layer, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        changed = config | {"num_nextn_predict_layers": len(self.layers)}
        (path / "config.json").write_text(json.dumps(changed))
        return path

    def _saved(self, layer: Any, path: Path) -> dict[str, torch.Tensor]:
        """Return the tensors of ``layer`` as transformers saves the decoder's last layer, with separate experts."""
        last = self.main.config.num_hidden_layers - 1
        number = self._number([*self.layers].index(layer))
        alone = copy.deepcopy(self.main)
        alone.model.layers[last] = layer.layer
        alone.save_pretrained(path / "layer")
        saved = load_file(path / "layer" / "model.safetensors")
        old, new = f"model.layers.{last}.", self.names["inside"].format(layer=number)
        moved = {name.replace(old, new): x for name, x in saved.items() if name.startswith(old)}
        own = {f"{self.names[name]}.weight": x.detach() for name, x in layer.own().items()}
        return moved | {name.format(layer=number): x for name, x in own.items()}


def deepseek_with_prediction(**sizes: int) -> WithPrediction:
    """DeepSeek V3 with ``sizes`` and one MTP layer, fresh ones each time."""
    return WithPrediction(copy.deepcopy(hf_model("deepseek_v3", **sizes)))

"""A case on one process: transformers, autograd and torch's optimizers, one sample at a time, nothing padded."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

import reference
from mca_models.templates import config_from_hf
from net.balance import BIASES, DEFAULT_BIAS_RATE, Routers, biases
from net.case import STEPS, Case
from net.data import held_out, micro_batches
from net.models import PREDICTING
from prediction import WithPrediction

MTP_SCALE = 0.1


@dataclass
class Truth:
    """Result of a case, and the directory of its model.

    Args:
        path: The model's directory.
        adapter: That of its adapter.
        gradients: Of the first step, before they are clipped, by name.
        before: Parameters by name, before training.
        after: After it.
    """

    path: Path
    adapter: Path | None
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    eval_loss: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)


def register(case: Case) -> None:
    """Makes the case's model known by the case's name."""
    kind, given = reference.CASES[case.base]
    reference.CASES[case.name] = (kind, copy.deepcopy({**given, **case.changes}))


def model_config(case: Case) -> Any:
    """The architecture, as the product reads it."""
    register(case)
    kind, given = reference.CASES[case.name]
    hf = transformers.AutoConfig.for_model(kind, **{**reference.SIZE, **given}).to_dict()
    return config_from_hf(hf).replace_fields(mtp_num_layers=case.prediction)


def make(case: Case, folder: Path) -> Truth:
    """Saves the model under ``folder`` and trains it."""
    register(case)
    torch.manual_seed(case.number)
    model, adapter = _saved_model(case, folder)
    run = _Run(case, model)
    truth = Truth(folder / "model", adapter, before=run.tensors())
    first = case.options.get("eval_on_start")
    every = case.options.get("eval_strategy") == "steps"
    truth.eval_loss += [run.evaluate()] if first else []
    for step, micro in enumerate(micro_batches(case)):
        loss, gradients, norm = run.step(step, micro)
        truth.loss.append(loss)
        truth.grad_norm.append(norm)
        truth.gradients = truth.gradients or gradients
        truth.eval_loss += [run.evaluate()] if every else []
    truth.eval_loss.append(run.evaluate())
    truth.after = run.tensors()
    return truth


def _saved_model(case: Case, folder: Path) -> tuple[Any, Path | None]:
    model = reference.hf_model(case.name)
    if case.prediction:
        model = WithPrediction(model, case.prediction, PREDICTING[case.base])
        model.save(folder / "model")
        return model.eval(), None
    model.save_pretrained(folder / "model")
    if case.lora is None:
        return model.eval(), None
    import peft

    model = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **case.lora))
    model.save_pretrained(folder / "adapter")
    return model.eval(), folder / "adapter"


class _Run:
    """A model in training."""

    def __init__(self, case: Case, model: Any) -> None:
        self.case, self.model, self.options = case, model, case.options
        main = model.main if case.prediction else model
        self.routers = Routers(model, main.config, model.layers if case.prediction else ())
        self.trained = [(name, p) for name, p in self._named() if p.requires_grad]
        self.base = float(self.options.get("learning_rate", 1e-3))
        self.optimizer, self.shares = self._optimizer(), self._shares()

    def _named(self) -> list[tuple[str, Tensor]]:
        if self.case.prediction:
            return [*self.model.main.named_parameters(), *self.model.tensors().items()]
        return [(_adapter_name(name), p) for name, p in self.model.named_parameters()]

    def tensors(self) -> dict[str, Tensor]:
        """Return the trained tensors, and buffers that change, by name in files."""
        found = {name: p.detach().clone() for name, p in self.trained}
        if self.case.lora is None:
            moved = biases(self.model.main if self.case.prediction else self.model)
            moved |= self.model.tensors() if self.case.prediction else {}
            found |= {n: b.clone() for n, b in moved.items() if n.endswith(BIASES)}
        return self._in_files(found)

    def _in_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors as transformers writes them: renamed, experts one by one, transposed."""
        if self.case.lora is not None:
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        return dict(
            revert_weight_conversion(self.model.main if self.case.prediction else self.model, tensors)
        )

    def _optimizer(self) -> Any:
        decay = float(self.options.get("weight_decay", 0.1))
        apart = self.options.get("decoupled_lr")
        main = self.model.main if self.case.prediction else self.model
        ends = (main.get_input_embeddings(), main.get_output_embeddings())
        of_words = [parameter for module in ends for parameter in module.parameters()]
        groups = []
        for name, p in self.trained:
            is_vector = name.endswith("bias") or "norm" in name or (name.endswith("A_log") and p.dim() == 4)
            matrix = p.dim() > 1 and not is_vector  # 4: Kimi's rates of heads, a vector in Megatron
            outer = apart is not None and any(p is each for each in of_words)
            highest = float(apart) if outer and apart is not None else self.base
            rates = {"highest": highest, "least": self._least(outer=outer)}
            groups.append({"params": [p], "weight_decay": decay if matrix else 0.0, **rates})
        if "sgd" in (self.options.get("optimizer"), self.options.get("optim")):
            return torch.optim.SGD(
                groups, lr=self.base, momentum=float(self.options.get("sgd_momentum", 0.0))
            )
        return torch.optim.AdamW(groups, lr=self.base, eps=float(self.options["adam_epsilon"]))

    def _shares(self) -> list[float]:
        """Return the fraction of the highest rate in each step, before ``min_lr`` raises it."""
        from transformers import get_scheduler

        carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        kind, warmup = self.options["lr_scheduler_type"], int(self.options.get("warmup_steps", 0))
        scheduler: Any = get_scheduler(kind, carrier, warmup, STEPS)
        found = []
        for _ in range(STEPS):
            found.append(float(carrier.param_groups[0]["lr"]))
            carrier.step()
            scheduler.step()
        return found

    def _least(self, *, outer: bool) -> float:
        apart = self.options.get("decoupled_min_lr") if outer else None
        return float(self.options.get("min_lr") or 0.0) if apart is None else float(apart)

    def _rate(self, group: dict[str, Any], step: int) -> float:
        warming = step < int(self.options.get("warmup_steps", 0))
        least = 0.0 if warming else float(group["least"])
        return least + (float(group["highest"]) - least) * self.shares[step]

    def step(self, number: int, micro: list[list[Any]]) -> tuple[float, dict[str, Tensor], float]:
        """One optimizer step: the loss, the gradients of the first step and their norm."""
        sums, targets, routed = [torch.zeros(())] * (1 + self.case.prediction), [], []
        for samples in micro:
            with self.routers.watched() as seen:
                for sample in samples:
                    sums = [a + b for a, b in zip(sums, self._sums(sample), strict=True)]
            routed.append(seen)
        for ahead in range(1, 2 + self.case.prediction):
            targets.append(sum(_targets(sample, ahead) for samples in micro for sample in samples))
        main, *further = (x / max(count, 1) for x, count in zip(sums, targets, strict=True))
        scale = float(self.options.get("mtp_loss_scaling_factor", MTP_SCALE)) / max(self.case.prediction, 1)
        (main + scale * sum(further, torch.zeros(())) + self._balance(routed)).backward()
        gradients = {} if number else self._gradients()
        return float(main.detach()), gradients, self._move(number, routed)

    def _gradients(self) -> dict[str, Tensor]:
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in self.trained}
        return self._in_files(found)

    def _move(self, number: int, routed: list[Any]) -> float:
        """Clips and steps; the norm before."""
        limit = float(self.options.get("max_grad_norm", 1.0))
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self.trained], limit or 1e30)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(group, number)
        if self.case.lora is None:
            self.routers.move_biases(
                self.options.get("moe_router_bias_update_rate", DEFAULT_BIAS_RATE), routed
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _sums(self, sample: Any) -> list[Tensor]:
        """The cross entropies over a sample's targets, of the model and of each MTP layer."""
        smoothing = float(self.options.get("label_smoothing_factor", 0.0))
        found = []
        for ahead, logits in enumerate(self._logits(sample["input_ids"][None]), 1):
            labels = sample["labels"][ahead:]
            each = logits[0, : len(labels)]
            found.append(cross_entropy(each, labels, reduction="sum", label_smoothing=smoothing))
        return found

    def _logits(self, ids: Tensor) -> list[Tensor]:
        if self.case.prediction:
            found: list[Tensor] = self.model.logits(ids)
            return found
        return [self.model(ids, use_cache=False).logits]

    def _balance(self, routed: list[Any]) -> Tensor:
        kind = self.options.get("moe_router_load_balancing_type", "none")
        loss = torch.zeros(())
        if kind != "none" and self.routers.blocks:
            loss = loss + float(self.options.get("moe_aux_loss_coeff", 0.0)) * self.routers.loss(kind, routed)
        if self.routers.blocks:
            loss = loss + float(self.options.get("moe_z_loss_coeff", 0.0)) * self.routers.z_loss(routed)
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean over the targets of the samples held out."""
        data = held_out(self.case)
        samples = [data[index] for index in range(len(data))]
        return sum(float(self._sums(sample)[0]) for sample in samples) / sum(map(_targets, samples))


def _targets(sample: Any, ahead: int = 1) -> int:
    return int((sample["labels"][ahead:] != -100).sum())


def _adapter_name(name: str) -> str:
    return name.replace(".default", "").replace(".modules_to_save", "")

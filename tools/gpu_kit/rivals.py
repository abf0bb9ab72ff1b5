"""References that McaTrainer is timed against: Megatron's own loop written by hand, and Hugging Face's Trainer."""

import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tools.gpu_kit.kit import Kit


class BareLoop:
    """Megatron's model, data parallelism, optimizer and schedule, and nothing around them.

    Args:
        kit: The step's.
        document: The ``config.json`` of a Qwen3.
        rows: Samples, all of one length.
        accumulation: Of them in a step.
    """

    def __init__(self, kit: Kit, document: dict[str, Any], rows: list[Tensor], accumulation: int) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self._kit, self._rows, self._accumulation = kit, rows, accumulation
        engine = kit.device == "cuda" and find_spec("transformer_engine") is not None
        config = _config_of(document, engine=engine)
        model = _model_of(config, document, len(rows[0]), engine=engine).to(kit.device)
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        self._chunk = DistributedDataParallel(config, settings, model)
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0),
            [self._chunk],
        )
        config.grad_scale_func = self._optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        self._steps = self._endless()
        self._loss = torch.zeros(())

    @property
    def loss(self) -> float:
        """Return the loss of the last step."""
        return float(self._loss)

    def take(self, steps: int) -> list[float]:
        """Seconds of so many steps."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            next(self._steps)
            self._kit.synchronise()
            seconds.append(time.perf_counter() - start)
        return seconds

    def end(self) -> None:
        """Nothing is left behind."""

    def _endless(self) -> Iterator[None]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        count, length = self._accumulation, len(self._rows[0])
        place = 0
        while True:
            rows = [self._rows[(place + number) % len(self._rows)] for number in range(count)]
            place += count
            self._chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            kept = get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=iter(rows),
                model=self._chunk,
                num_microbatches=count,
                seq_length=length,
                micro_batch_size=1,
                forward_only=False,
            )
            self._optimizer.step()
            self._loss = torch.stack([each["loss"] for each in kept]).mean()
            yield

    def _forward(self, rows: Iterator[Tensor], model: Any) -> Any:
        row = next(rows)
        row = (row.pin_memory() if self._kit.device == "cuda" else row)[None].to(
            self._kit.device, non_blocking=True
        )
        positions = torch.arange(row.shape[1], device=row.device)[None]
        losses = model(input_ids=row, position_ids=positions, attention_mask=None, labels=row.roll(-1, 1))

        def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = losses[:, :-1].float().mean()
            return loss, {"loss": loss.detach().clone()}  # Megatron divides the loss in place

        return losses, mean


def _config_of(document: dict[str, Any], *, engine: bool) -> Any:
    """Megatron's configuration with the switches that mca has by default."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=document["num_hidden_layers"],
        hidden_size=document["hidden_size"],
        ffn_hidden_size=document["intermediate_size"],
        num_attention_heads=document["num_attention_heads"],
        num_query_groups=document["num_key_value_heads"],
        kv_channels=document["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=document["rms_norm_eps"],
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bias_activation_fusion=engine,
        bias_dropout_fusion=engine,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


def _model_of(config: Any, document: dict[str, Any], length: int, *, engine: bool) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = (
        get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
        if engine
        else get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    )
    model: torch.nn.Module = GPTModel(
        config,
        spec,
        vocab_size=document["vocab_size"],
        max_sequence_length=length,
        position_embedding_type="rope",
        rotary_base=document["rope_parameters"]["rope_theta"],
        share_embeddings_and_output_weights=document["tie_word_embeddings"],
    )
    return model


class HuggingFace:
    """Hugging Face's Trainer in a thread that runs only in its turn: fp32 weights, products in bf16, fused AdamW.

    Args:
        kit: The step's.
        document: The ``config.json``.
        rows: Samples, all of one length.
        accumulation: Of them in a step.
    """

    def __init__(self, kit: Kit, document: dict[str, Any], rows: list[Tensor], accumulation: int) -> None:
        self._kit = kit
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._left, self._over = 0, False
        self._seconds: list[float] = []
        self._failed: BaseException | None = None
        self._trainer = self._make(document, rows, accumulation)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def loss(self) -> float:
        """Return the mean of its steps so far."""
        total: float = float(self._trainer._tr_loss)
        return total / int(max(self._trainer.state.global_step, 1))

    def take(self, steps: int) -> list[float]:
        """Seconds of so many steps."""
        self._left, self._seconds = steps, []
        self._theirs.release()
        self._mine.acquire()
        if self._failed is not None:
            raise RuntimeError("Hugging Face's Trainer failed") from self._failed
        return self._seconds

    def end(self) -> None:
        """Lets the thread come to its end."""
        self._over = True
        self._theirs.release()
        self._thread.join(60)

    def _run(self) -> None:
        self._theirs.acquire()
        try:
            if not self._over:
                self._trainer.train()
        except BaseException as error:
            self._failed = error
        self._mine.release()

    def _make(self, document: dict[str, Any], rows: list[Tensor], accumulation: int) -> Any:
        import transformers

        config = transformers.AutoConfig.for_model(**document)
        with torch.device(self._kit.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        on_gpu = self._kit.device == "cuda"
        args = transformers.TrainingArguments(
            output_dir=str(self._kit.scratch / "hf"),
            max_steps=100_000,
            learning_rate=1e-4,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=accumulation,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            optim="adamw_torch_fused" if on_gpu else "adamw_torch",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        made = transformers.Trainer(model=model, args=args, train_dataset=data)
        made.add_callback(self._callback())
        return made

    def _callback(self) -> Any:
        from transformers import TrainerCallback

        rival = self

        class Baton(TrainerCallback):  # type: ignore[misc]
            """Waits between turns."""

            since = 0.0

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.since = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                rival._kit.synchronise()
                rival._seconds.append(time.perf_counter() - self.since)
                rival._left -= 1
                if rival._left == 0:
                    rival._mine.release()
                    rival._theirs.acquire()
                    control.should_training_stop = rival._over
                self.since = time.perf_counter()

        return Baton()

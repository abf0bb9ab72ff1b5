"""A rank's step for CUDA where there is no GPU: the run's own engine on tensors that have a device but no memory.

    LD_PRELOAD=<no_driver.c, built> MCA_DEVICE=cuda python fake_cuda.py <folder of models> <CASES of test_cuda_paths>

Prints what the step of each case did that a GPU would be waited for, as JSON. torch itself refuses operations on
tensors of two devices; fake_cuda refuses collectives on the host's. Layers are Megatron's own: nothing is compiled.
"""

import ctypes
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

HERE = Path(__file__).parent
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_OVER_GLOO = ("groups.py:sum_over_samples_on_host",)
"""Sums of the host's tensors, over groups that are made for them."""

waits: Counter[str] = Counter()


class WithoutDevice(FakeTensorMode):
    """Takes what torch is reported of a GPU for what it is."""

    avoid_device_init = True  # type: ignore[assignment]


def where() -> str:
    """The function of Megatron, or of mca, that called torch, as ``file:function``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        ours = "mca_models" in path.parts or "mca_train" in path.parts or path.name == "cuda_waits.py"
        if ("megatron" in path.parts or ours) and path.parent.name not in ("dry_run", "platform"):
            return f"{path.name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def wait(kind: str) -> Callable[..., None]:
    """A stand-in for a call that waits for the GPU."""
    return lambda *args, **kwargs: waits.update([f"{kind} in {where()}"])


def pin(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    """Stands in for page-locking."""
    waits["pinned"] += 1
    return tensor


def plain_attention(*args: Any, **options: Any) -> Any:
    """Attention by the kernel for which the driver is not asked."""
    return torch.ops.aten._scaled_dot_product_attention_math(*args, **options)[0]


def pretend() -> ExitStack:
    """Has torch answer as if there were a GPU."""
    from mca_models.megatron.platform.cuda import IdleEvent, IdleStream

    Stream = type("Stream", (IdleStream,), {"synchronize": wait("stream.synchronize")})
    Event = type("Event", (IdleEvent,), {"synchronize": wait("event.synchronize")})

    @contextmanager
    def streaming(_: object) -> Iterator[None]:
        yield

    def nothing(*args: object, **kwargs: object) -> None:
        return None

    answers: dict[str, Any] = {
        "_lazy_init": nothing,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *a, **k: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": nothing,
        "synchronize": wait("torch.cuda.synchronize"),
        "empty_cache": nothing,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *a, **k: Stream(),
        "default_stream": lambda *a, **k: Stream(),
        "stream": streaming,
        "set_stream": nothing,
        "get_device_name": lambda *a: "NVIDIA H100 80GB HBM3",
        "get_device_capability": lambda *a: (9, 0),
        "get_device_properties": lambda *a: SimpleNamespace(major=9, minor=0, multi_processor_count=132),
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": nothing,
        "is_current_stream_capturing": lambda: False,
        "default_generators": (torch.default_generator,),
    }
    torch._C._ensureCUDADeviceGuardSet()
    ctypes.CDLL(os.environ["LD_PRELOAD"]).pretend_device()
    stack = ExitStack()
    stack.enter_context(patch.multiple(torch.cuda, **answers))
    stack.enter_context(patch.multiple(torch.cuda.nvtx, range_push=nothing, range_pop=nothing))
    for name in ("get_rng_state", "set_rng_state"):
        stack.enter_context(patch.object(torch.cuda.random, name, answers[name]))
    cudnn = {
        "_select_conv_backend": lambda *a, **k: torch._C._ConvBackend.Cudnn,
        "_conv_determine_backend_memory_format": lambda *a: torch.contiguous_format,
    }
    stack.enter_context(patch.multiple(torch._C, **cudnn))  # which ask the driver
    stack.enter_context(
        patch("torch._subclasses.fake_tensor.init_gpu_context", nothing)
    )  # torch 2.11 makes a true one
    stack.enter_context(patch.object(torch.Tensor, "record_stream", nothing))
    stack.enter_context(patch.object(torch.Tensor, "pin_memory", pin))
    return stack


def wait_of(func: Any, args: Sequence[Any], options: Mapping[str, Any], out: Any) -> str | None:
    """Return the reason why ``func`` would wait for a GPU; None if it would not."""
    tensors = [leaf for leaf in _pytree.tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
    if func.namespace == "c10d":
        if any(tensor.device.type != "cuda" for tensor in tensors) and where() not in _OVER_GLOO:
            raise AssertionError(f"{func}: a collective on the host's tensors in {where()}")
        return None
    if not any(tensor.is_cuda for tensor in [*tensors, *_pytree.tree_leaves(out)] if _is_tensor(tensor)):
        return None
    name = func._schema.name
    if name in _INDEXING:
        masks = (torch.bool, torch.uint8)
        indices = [index for index in args[1] if index is not None]
        if _fills(args, options) and len(indices) == 1 and indices[0].dtype in masks and indices[0].is_cuda:
            return None
        return "mask" if any(i.dtype in masks or i.device.type == "cpu" for i in indices) else None
    if torch.Tag.data_dependent_output in func.tags:
        return "value"
    if torch.Tag.dynamic_output_shape in func.tags and options.get("output_size") is None:
        return "size"
    if name in ("aten::_to_copy", "aten::copy_"):
        target, source = (out, args[0]) if name == "aten::_to_copy" else args[:2]
        if target.is_cuda and source.is_cuda:
            return None
        waits = not options.get("non_blocking") and not (len(args) > 2 and args[2])
        return ("copy to the host" if source.is_cuda else "copy to the GPU") if waits else None
    return None


def _fills(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return True if a host number is written, which torch 2.11 calls an index when it fills by one mask."""
    accumulates = options.get("accumulate", len(args) > 3 and args[3])
    return len(args) > 2 and args[2].numel() == 1 and not args[2].is_cuda and not accumulates


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def images_in(run: Any, images: dict[str, int] | None) -> Any:
    """Return the images of each sequence; a model with one image size gets only that size."""
    from mca_train.plan.options import PlanOptions
    from mca_train.plan.vision_memory import VisionTower
    from mca_train.run.plan_input import planned_media

    if images is None:
        return None
    tower = VisionTower.from_config(run.model)
    assert tower is not None, "the sizes of its vision tower are not known"
    return planned_media(run, PlanOptions(images=images["count"], image_size=tower.side or images["pixels"]))


def step_of(
    folder: Path, kind: str, changes: dict[str, Any], planted: str = "", images: dict[str, int] | None = None
) -> dict[str, int]:
    """Return the waits of one step of a run."""
    from cuda_waits import plant
    from dry_run_cases import prepared
    from mca_models import AutoModel
    from mca_train.dry_run import step
    from mca_train.dry_run.fake_process_group import fake_process_group, replace_moved_parameters
    from mca_train.dry_run.fake_values import FakeValues
    from mca_train.dry_run.samples import convert_known_values, route_evenly
    from mca_train.dry_run.tracker import ModuleNames, Tracker
    from mca_train.trainer.loaders import iterate_steps

    class Watch(Tracker):
        """Notes what waits, once `restart` was called."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if (kind := wait_of(func, args, kwargs or {}, out)) is not None:
                waits.update([f"{kind} in {where()}"])
            return out

        def restart(self) -> None:
            super().restart()
            waits.clear()

    size = changes.get("tensor_model_parallel_size", 1) * changes.get("pipeline_model_parallel_size", 1)
    size = max(size * changes.get("context_parallel_size", 1), 2)
    run = prepared(folder, kind, changes | {"gradient_accumulation_steps": 1}, size)
    with ExitStack() as stack:
        for context in (
            fake_process_group(0, size),
            replace_moved_parameters(),
            step._skip_optimizer_value_checks(),
        ):
            stack.enter_context(context)
        fake = WithoutDevice(allow_non_fake_inputs=True)
        answers = FakeValues(fake)
        modes = step.Modes(Watch(ModuleNames()), fake, answers)
        stack.enter_context(convert_known_values(answers))
        trainer, engine = step.build(
            run.task, run.settings, run.model, modes, AutoModel.unfilled, images_in(run, images)
        )
        for chunk in engine.models:
            for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
                assert tensor.is_cuda, f"{name} is on {tensor.device}"
        stack.enter_context(plant(planted))
        route_evenly(engine.models, answers)
        loader = trainer.get_train_dataloader()
        waits.clear()
        batch = next(iterate_steps(loader))
        assert waits["pinned"] >= 6 * len(batch.micro_batches), "batches are not pinned"
        step.measure(trainer, engine, modes, batch)
        return dict(waits)


def main() -> None:
    """Runs the cases one after the other."""
    for name in ("peft", "transformers", "torch._dynamo"):
        importlib.import_module(name)  # which would take the stand-ins for torch's own
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", plain_attention):
        found = run()  # imports what takes torch's attention for its own
    sys.stdout.write(json.dumps(found) + "\n")


def run() -> dict[str, Any]:
    """Return the waits of each case, or its error."""
    from mca_models.megatron import platform
    from mca_models.megatron.platform.cuda import without_compile

    found: dict[str, Any] = {}
    with pretend(), without_compile():
        platform.prepare()
        for name, case in json.loads(sys.argv[2]).items():
            try:
                beside = case.get("planted", ""), case.get("images")
                found[name] = step_of(Path(sys.argv[1]) / case["model"], *case["run"], *beside)
            except Exception as error:
                if os.environ.get("MCA_SHOW"):
                    raise
                found[name] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()

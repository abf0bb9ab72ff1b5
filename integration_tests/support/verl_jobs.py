"""Program that imports verl once and forks the ranks of each job of a JSON file: verl's trainers and engines on CPUs.

    python verl_jobs.py JOBS.json

Without ``VERL_USE_EXTERNAL_PLUGINS=none`` the jobs may use the engine mca.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

WITH_MCA = os.environ.get("VERL_USE_EXTERNAL_PLUGINS") != "none"


def start() -> None:
    """Import verl for CPUs, with the engine mca or, for a reference, untouched by mca."""
    torch.set_num_threads(1)
    if WITH_MCA:
        os.environ["VERL_USE_EXTERNAL_MODULES"] = "mca_train.clients.verl.cpu"
    else:
        os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # verl's engines are not registered for a CPU
    importlib.import_module("verl.trainer.sft_trainer")

    if not WITH_MCA:
        from mca_train.clients.verl.cpu_platform import use_cpu

        use_cpu()


def sft(job: dict[str, Any]) -> None:
    """Run verl's SFT trainer."""
    from verl.trainer.sft_trainer import run_sft

    os.environ["VERL_FILE_LOGGER_PATH"] = job["log"]
    run_sft(_sft_config(job))


def _sft_config(job: dict[str, Any]) -> Any:
    """Return the configuration of verl's SFT trainer with the overrides of ``job``."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("sft_trainer_engine", overrides=job["overrides"])


def _engine_config(*overrides: str, **values: Any) -> Any:
    """Return the configuration of the engine mca as verl makes it from mca's file."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    with initialize_config_module("mca_train.clients.verl.config", version_base=None):
        composed = compose("engine/mca", overrides=list(overrides))
    return replace(omega_conf_to_dataclass(composed.engine), **values)


def _replaying_engine(job: dict[str, Any]) -> Any:
    """Return an engine for log-probabilities with the experts of the rollout."""
    from types import SimpleNamespace

    from mca_train.clients.verl.engine import McaEngine

    off: dict[str, Any] = dict.fromkeys(("lora_rank", "lora_adapter_path", "use_fused_kernels", "use_liger"))
    off |= dict.fromkeys(
        ("enable_gradient_checkpointing", "enable_activation_offload", "tokenizer", "target_parameters")
    )
    off |= {
        "path": job["model"],
        "hf_config_path": None,
        "hf_config": SimpleNamespace(),
        "lora": {},
        "mtp": SimpleNamespace(enable=False),
        "tiled_mlp": {},
        "override_config": {},
    }
    own: dict[str, Any] = {"forward_only": True, "dtype": "float32", "use_remove_padding": job["packed"]}
    config = _engine_config("engine.router_replay.mode=R3", **own, **job["sizes"])
    engine = McaEngine(SimpleNamespace(local_path=job["model"], **off), config, None, None)
    engine.initialize()
    return engine


def replay(job: dict[str, Any]) -> None:
    """Compare the engine's log-probabilities with those of mca's model that is given the experts of the rollout."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    from mca_config.errors import McaError

    engine = _replaying_engine(job)
    lengths = (24, 9, 17, 12)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (length,), generator=generator) for length in lengths]
    draws = [torch.rand(length, 4, 4, generator=generator).argsort(-1)[..., :2] for length in lengths]
    experts = [each.to(torch.int16) for each in draws]  # 4 layers, 2 of 4 experts
    for each in experts:
        each[-1] = 0
    experts[1][5:] = 0  # no choice
    jagged = {"layout": torch.jagged}
    data = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(rows, **jagged),
            "loss_mask": torch.nested.as_nested_tensor([torch.ones(length) for length in lengths], **jagged),
            "routed_experts": torch.nested.as_nested_tensor(experts, **jagged),
        },
        batch_size=len(lengths),
    )
    tensordict_utils.assign_non_tensor(
        data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, temperature=1.0
    )
    found = engine.forward_backward_batch(data, None, forward_only=True)
    for row, (ids, each) in enumerate(zip(rows, experts, strict=True)):
        given = each.clone()
        given[-1] = -1
        given[5 if row == 1 else len(ids) :] = -1
        expected = engine.models.log_probs(ids[None], routed_experts=given[None]).log_probs[0, 1:]
        if found:
            ours = found["model_output"]["log_probs"].unbind()[row][:-1]
            assert torch.allclose(ours, expected, atol=1e-5, rtol=0), (ours - expected).abs().max()
        live = engine.models.log_probs(ids[None]).log_probs[0, 1:]
        assert (live - expected).abs().max() > 1e-3, "other experts give other values"
    try:
        engine.forward_backward_batch(data.exclude("routed_experts"), None, forward_only=True)
    except McaError as error:
        assert "rollout.enable_rollout_routing_replay" in str(error), error
    else:
        raise AssertionError("a batch without experts was accepted")


def grpo(job: dict[str, Any]) -> None:
    """Run GRPO iterations of verl's actor."""
    import verl_rl

    verl_rl.grpo(job, _sft_config(job))


def critic(job: dict[str, Any]) -> None:
    """Run iterations of verl's critic."""
    import verl_critic

    verl_critic.critic(job, _sft_config(job))


def ppo_config(job: dict[str, Any]) -> None:
    """Compose the configuration of verl's PPO trainer and write that of actor, reference model and critic."""
    from hydra import compose, initialize_config_module
    from omegaconf import open_dict
    from verl.utils.config import omega_conf_to_dataclass

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=job["overrides"])
    found = {}
    nodes = {"actor": config.actor_rollout_ref.actor, "ref": config.actor_rollout_ref.ref}
    for role, node in (nodes | {"critic": config.critic}).items():
        with open_dict(node):
            for name in [name for name in node if name.startswith("log_prob_")]:
                used = name.removeprefix("log_prob_")  # as verl's worker does
                node[used if used == "use_dynamic_bsz" else f"ppo_{used}"] = node.pop(name)
        engine = omega_conf_to_dataclass(node).engine
        found[role] = [type(engine).__name__, engine.tensor_model_parallel_size, engine.forward_only]
    Path(job["log"]).write_text(json.dumps(found))


def errors(job: dict[str, Any]) -> None:
    """Write the error of each of ``job["cases"]``, lists of overrides that the engine does not support."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    from mca_train.clients.verl.arguments import training_arguments

    found = []
    for case in job["cases"]:
        try:
            with initialize_config_module("verl.trainer.config", version_base=None):
                config = compose("sft_trainer_engine", overrides=[*job["overrides"], *case])
            parts = [omega_conf_to_dataclass(config[name]) for name in ("model", "engine", "optim")]
            training_arguments(*parts)
            found.append("no error")
        except Exception as error:
            found.append(str(error))
    Path(job["log"]).write_text(json.dumps(found))


def batch_errors(job: dict[str, Any]) -> None:
    """Write the error of batches that the engine does not support."""
    import verl_rl

    Path(job["log"]).write_text(json.dumps(verl_rl.batch_errors(Path(job["vision"]))))


KINDS = {
    "sft": sft,
    "grpo": grpo,
    "critic": critic,
    "replay": replay,
    "ppo_config": ppo_config,
    "errors": errors,
    "batch_errors": batch_errors,
}


def rank_environment(rank: int, ranks: int, store: Path) -> dict[str, str]:
    """Return the variables that a launcher sets; ranks meet in the file ``store``, so that no port can be taken."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place = {"DIST_INIT_METHOD": f"file://{store}?rank={rank}&world_size={ranks}", "GLOO_SOCKET_IFNAME": "lo"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # verl reads them and does not use them
    return {name: str(value) for name, value in (numbers | place).items()}


def run(job: dict[str, Any]) -> int:
    """Fork the ranks of ``job`` and return the number of those that failed."""
    store = Path(tempfile.mkdtemp()) / "store"
    children: list[int] = []
    for rank in range(job["ranks"]):
        sys.stdout.flush()
        if child := os.fork():
            children.append(child)
            continue
        os.environ |= rank_environment(rank, job["ranks"], store)
        code = 1
        try:
            KINDS[job["kind"]](job)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    if lines := job.get("kill_after_lines"):
        kill_after(Path(job["log"]), lines, children)
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return 0 if lines else failed


def kill_after(log: Path, lines: int, children: list[int]) -> None:
    """Send SIGKILL to all ranks once ``log`` has ``lines`` lines."""
    while not log.exists() or len(log.read_text().splitlines()) < lines:
        if os.waitpid(children[0], os.WNOHANG)[0]:
            sys.exit("the first rank ended before it was killed")
        time.sleep(0.02)
    for child in children:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    start()
    failed = [job["name"] for job in json.loads(Path(sys.argv[1]).read_text()) if run(job)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)

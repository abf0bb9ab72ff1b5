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


def replay(job: dict[str, Any]) -> None:
    """Compare the engine with router replay with mca's model that is given the same experts."""
    import verl_replay

    verl_replay.replay(job)


def grpo(job: dict[str, Any]) -> None:
    """Run GRPO iterations of verl's actor."""
    import verl_rl

    verl_rl.grpo(job, _sft_config(job))


def critic(job: dict[str, Any]) -> None:
    """Run iterations of verl's critic."""
    import verl_critic

    verl_critic.critic(job, _sft_config(job))


def tinker(job: dict[str, Any]) -> None:
    """Run steps of verl's Tinker worker."""
    import verl_tinker

    verl_tinker.tinker(job, _sft_config(job))


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


def role_errors(job: dict[str, Any]) -> None:
    """Write the error of each of ``job["cases"]``, lists of overrides of verl's PPO trainer."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    found = []
    for case in job["cases"]:
        try:
            with initialize_config_module("verl.trainer.config", version_base=None):
                config = compose("ppo_trainer", overrides=[*job["overrides"], *case])
            for node in (config.actor_rollout_ref.actor, config.critic):
                omega_conf_to_dataclass(node)
            found.append("no error")
        except Exception as error:
            found.append(str(error))
    Path(job["log"]).write_text(json.dumps(found))


def errors(job: dict[str, Any]) -> None:
    """Write the error of each of ``job["cases"]``, lists of overrides that the engine does not support."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    from mca_train.clients.verl.arguments import training_arguments
    from mca_train.clients.verl.checkpoints import require_supported_checkpoints

    found = []
    for case in job["cases"]:
        try:
            with initialize_config_module("verl.trainer.config", version_base=None):
                config = compose("sft_trainer_engine", overrides=[*job["overrides"], *case])
            names = ("model", "engine", "optim", "checkpoint")
            *parts, checkpoint = (omega_conf_to_dataclass(config[name]) for name in names)
            training_arguments(*parts)
            require_supported_checkpoints(checkpoint)
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
    "tinker": tinker,
    "replay": replay,
    "ppo_config": ppo_config,
    "role_errors": role_errors,
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

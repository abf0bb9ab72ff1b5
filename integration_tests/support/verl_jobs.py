"""Program that imports verl once and forks the ranks of each job of a JSON file: verl's trainers and engines on CPUs.

    python verl_jobs.py JOBS.json

Without ``VERL_USE_EXTERNAL_PLUGINS=none`` the jobs may use the engine mca.
"""

import importlib
import json
import os
import socket
import sys
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
    from hydra import compose, initialize_config_module
    from verl.trainer.sft_trainer import run_sft

    os.environ["VERL_FILE_LOGGER_PATH"] = job["log"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("sft_trainer_engine", overrides=job["overrides"])
    run_sft(config)


KINDS = {"sft": sft}


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that a launcher sets."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in (numbers | place).items()}


def run(job: dict[str, Any]) -> int:
    """Fork the ranks of ``job`` and return the number of those that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(job["ranks"]):
        sys.stdout.flush()
        if child := os.fork():
            children.append(child)
            continue
        os.environ |= rank_environment(rank, job["ranks"], port)
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
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    start()
    for job in json.loads(Path(sys.argv[1]).read_text()):
        if run(job):
            sys.exit(f"{job['kind']} {job['name']} failed")

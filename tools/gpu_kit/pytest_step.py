"""The tests that are marked ``gpu``, in a process of their own; in a rehearsal, those of two models on the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tools.gpu_kit.kit import Kit

ROOT = Path(__file__).resolve().parent.parent.parent


def gpu_tests(kit: Kit) -> None:
    """Counts what passed; any failure fails the step."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    command += ["integration_tests/test_gpu.py", "--timeout", "120", "--tb", "short", "--maxfail", "8"]
    if kit.tiny:
        command += ["-k", "local and (qwen2-tied or bfloat16)"]
    rehearsal = {"MCA_GPU_REHEARSAL": "1"} if kit.device == "cpu" else {}
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | rehearsal)
    sys.stderr.write(ran.stdout[-6000:] + ran.stderr[-2000:])
    found = {
        kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|error|skipped)", ran.stdout)
    }
    for kind, number in found.items():
        kit.figure(kind, number)
    kit.check("exit code", ran.returncode, 0)
    kit.holds("tests passed", found.get("passed", 0) > 0)

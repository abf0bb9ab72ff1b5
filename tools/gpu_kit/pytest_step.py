"""The tests that are marked ``gpu``, in a process of their own; in a rehearsal, those of two models on the CPU."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tools.gpu_kit.kit import Kit

ROOT = Path(__file__).resolve().parent.parent.parent


def gpu_tests(kit: Kit) -> None:
    """Counts what passed, test by test, so that a step that is stopped keeps them; any failure fails the step."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-v", "-p", "no:cacheprovider", "-m", "gpu"]
    command += ["-p", "tools.gpu_kit.at_once", "--no-header", "--tb", "short"]
    command += ["integration_tests/system/test_gpu.py", "--timeout", "120"]
    if kit.tiny:
        command += ["-k", "local and (qwen2-tied or bfloat16)"]
    rehearsal = {"MCA_GPU_REHEARSAL": "1"} if kit.device == "cpu" else {}
    found: Counter[str] = Counter()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | rehearsal,
    ) as ran:
        for line in ran.stdout or ():
            sys.stderr.write(line)
            if outcome := re.search(r"::.* (PASSED|FAILED|ERROR|SKIPPED)\b", line):
                found[outcome[1].lower()] += 1
                kit.figure(outcome[1].lower(), found[outcome[1].lower()])
    kit.check("exit code", ran.returncode, 0)
    kit.holds("tests passed", found["passed"] > 0)

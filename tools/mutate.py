#!/usr/bin/env python3
"""Plant small faults in the packages, one at a time, and list those that no test catches.

    uv run tools/mutate.py map                            # record which test modules reach which functions
    uv run tools/mutate.py run --count 300 --seed 7       # plant 300 faults drawn with seed 7
    uv run tools/mutate.py run --changed main             # plant the faults in lines that differ from branch main
    uv run tools/mutate.py run --path 'packages/*/src/*/losses/*' --count 40
    uv run tools/mutate.py list --count 300 --seed 7      # print what would be planted

A fault is planted in a copy of the working tree. The test modules that reach its function run there, the cheapest
first, until one fails. A failing test must pass without the fault, or the verdict is an error. Verdicts are appended
to ``--out``; faults that it lists already are not planted again, so an interrupted run goes on.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.mutation.operators import Mutation, compiles, mutations  # noqa: E402  (after the path, for `uv run tools/mutate.py`)

MAP = ROOT / ".pytest_cache" / "test_map"
SUBJECTS = {
    "weights": "mca_models/weights/* mca_models/storage/copy_plan.py mca_models/storage/byte_ranges.py",
    "templates": "mca_models/templates/*",
    "layout": "mca_config/layout.py mca_config/pipeline.py mca_config/model_config.py",
    "losses": "mca_train/losses/*",
    "batching": "mca_train/batching/*",
    "engine": "mca_train/engine/*",
    "layers": "mca_models/megatron/layers/* mca_models/megatron/features/*",
    "checkpoint": "mca_train/checkpoint/*",
    "streams": "mca_models/megatron/state/*",
    "log_probs": "mca_models/megatron/log_probs/*",
    "lora": "mca_models/lora/* mca_models/megatron/peft/*",
    "planner": "mca_train/plan/*",
    "data": "mca_train/data/*",
    "converter": "mca_convert/* mca_models/quantization/* mca_models/storage/*",
    "trainer": "mca_train/trainer/* mca_train/metrics/*",
}
"""Subject -> patterns of files, relative to a package's ``src``; faults are drawn from each subject in turn."""
FREQUENT = (
    "branch always",
    "branch never",
    "condition",
    "dropped call",
    "exchanged arguments",
    "dropped sign or not",
)
"""Operators with so many places that each place is drawn at a third of the probability of the others."""


@dataclass(frozen=True)
class Verdict:
    """Verdict of the tests on one fault: ``caught``, ``survived``, ``unreached`` or ``error``."""

    identity: str
    verdict: str
    subject: str
    path: str
    line: int
    operator: str
    shown: str
    test: str
    modules: int
    seconds: float


def subject_of(path: str) -> str:
    """Return the first subject whose patterns match ``path``, or an empty string."""
    inside = path.split("/src/", 1)[-1]
    for subject, patterns in SUBJECTS.items():
        if any(fnmatch.fnmatch(inside, pattern) for pattern in patterns.split()):
            return subject
    return ""


def candidates(patterns: Iterable[str]) -> list[Mutation]:
    """Return all faults of the source files that match one of ``patterns`` (all files if there is none)."""
    paths = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/src/**/*.py"))
    chosen = [path for path in paths if not patterns or any(fnmatch.fnmatch(path, each) for each in patterns)]
    return [mutation for path in chosen for mutation in mutations(ROOT, path)]


def drawn(found: Iterable[Mutation], count: int, seed: int) -> list[Mutation]:
    """Return ``count`` faults, from each subject in turn; the same for the same seed wherever lines have moved."""

    def turn(mutation: Mutation) -> float:
        digest = hashlib.sha256(f"{seed}|{mutation.identity}".encode()).digest()
        uniform = int.from_bytes(digest[:8], "big") / 2**64
        return float(uniform ** (1 / 3 if mutation.operator in FREQUENT else 1))

    piles: dict[str, list[Mutation]] = {}
    for mutation in sorted(found, key=turn):
        if subject := subject_of(mutation.path):
            piles.setdefault(subject, []).append(mutation)
    order = [pile for subject in SUBJECTS if (pile := piles.get(subject))]
    result: list[Mutation] = []
    depth = 0
    while len(result) < count and any(depth < len(pile) for pile in order):
        result += [pile[depth] for pile in order if depth < len(pile)]
        depth += 1
    return result[:count]


def changed(base: str, found: Iterable[Mutation]) -> list[Mutation]:
    """Return the faults in lines that the working tree adds to the commit ``base``."""
    diff = subprocess.run(
        ["git", "diff", "-U0", base, "--", "packages"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    lines: set[tuple[str, int]] = set()
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            path = line[6:]
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, length = int(match[1]), int(match[2] or 1)
            lines |= {(path, number) for number in range(first, first + length)}
    return [mutation for mutation in found if (mutation.path, mutation.line) in lines]


class TestMap:
    """Test modules that reach a function, and the CPU seconds of each module."""

    def __init__(self, folder: Path) -> None:
        self.seconds: Counter[str] = Counter()
        self.modules: dict[str, set[str]] = {}
        for path in folder.glob("*.json"):
            record = json.loads(path.read_text())
            self.seconds[record["module"]] += record["seconds"]
            for function in record["functions"]:
                self.modules.setdefault(function, set()).add(record["module"])

    def reaching(self, mutation: Mutation, limit: float) -> list[str]:
        """Return the modules that reach ``mutation``, cheapest first, up to ``limit`` CPU seconds in all."""
        found = self.modules.get(f"{mutation.path}:{mutation.function_line}", set())
        chosen: list[str] = []
        total = 0.0
        for module in sorted(found, key=lambda each: (self.seconds[each], each)):
            total += self.seconds[module]
            if chosen and total > limit:
                break
            chosen.append(module)
        return chosen


class Bench:
    """Copies of the working tree in which faults are planted, one for each worker."""

    def __init__(self, trees: Iterable[Path], marks: str) -> None:
        self.marks = marks
        self.trees: SimpleQueue[Path] = SimpleQueue()
        self.passing: dict[str, bool] = {}
        self.lock = Lock()
        for tree in trees:
            self.trees.put(tree)

    def judge(self, mutation: Mutation, modules: list[str], seconds: float) -> Verdict:
        """Plant ``mutation``, run ``modules`` until a test fails, and take the fault out again."""
        started = time.monotonic()
        test = ""
        verdict = "survived" if modules else "unreached"
        if modules:
            tree = self.trees.get()
            try:
                file = tree / mutation.path
                source = file.read_bytes()
                file.write_bytes(mutation.apply(source))
                try:
                    test = self._first_failure(tree, modules, 60 + 6 * seconds)
                finally:
                    file.write_bytes(source)
                if test:
                    verdict = "caught" if self._passes(tree, test) else "error"
            finally:
                self.trees.put(tree)
        return Verdict(
            mutation.identity,
            verdict,
            subject_of(mutation.path),
            mutation.path,
            mutation.line,
            mutation.operator,
            mutation.shown,
            test,
            len(modules),
            round(time.monotonic() - started, 1),
        )

    def _passes(self, tree: Path, test: str) -> bool:
        """Return whether ``test`` passes without a fault; a time-out of the fault is taken as caught."""
        if test.startswith("("):
            return True
        with self.lock:
            known = self.passing.get(test)
        if known is None:
            known = not self._first_failure(tree, [test], 600)
            with self.lock:
                self.passing[test] = known
        return known

    def _first_failure(self, tree: Path, tests: list[str], limit: float) -> str:
        """Run ``tests`` and return the first that fails, ``(time-out)``, or an empty string."""
        words = "-n 0 -x -q --tb=no --no-header -p no:cacheprovider -o".split()
        addopts = "addopts=--import-mode=importlib --strict-markers -rfE"
        command = [sys.executable, "-m", "pytest", *words, addopts, *tests]
        if "::" not in tests[0]:
            command += ["-m", self.marks]
        environment = os.environ | {"PYTHONPATH": _import_path(tree)}
        try:
            done = subprocess.run(
                command, cwd=tree, capture_output=True, text=True, timeout=limit, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            return "(time-out)"
        if done.returncode in (0, 5):
            return ""
        match = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\](?= - |$))?)", done.stdout, re.MULTILINE)
        return match[1] if match else f"(exit code {done.returncode})"


def _import_path(tree: Path) -> str:
    """Return a ``PYTHONPATH`` with the packages of ``tree``, which may be another copy than the one installed."""
    return os.pathsep.join([str(tree), *(str(path) for path in sorted(tree.glob("packages/*/src")))])


def _copy(tree: Path) -> Path:
    """Copy the tracked and the new files of the working tree; its neighbour ``shared`` is linked."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
    shared = tree.parent / "shared"
    if not shared.exists() and (ROOT.parent / "shared").exists():
        shared.symlink_to((ROOT.parent / "shared").resolve())
    return tree


def record_map(words: list[str]) -> int:
    """Run the default tests once, with the recorder of `tools.mutation.test_map`."""
    shutil.rmtree(MAP, ignore_errors=True)
    MAP.mkdir(parents=True)
    environment = os.environ | {"MCA_TEST_MAP": str(MAP), "PYTHONPATH": _import_path(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "tools.mutation.test_map", "-q", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def run(planted: list[Mutation], options: argparse.Namespace) -> Iterator[Verdict]:
    """Judge each fault that ``options.out`` does not list yet."""
    out: Path = options.out
    known = {json.loads(line)["identity"] for line in out.read_text().splitlines()} if out.exists() else set()
    waiting = [mutation for mutation in planted if mutation.identity not in known]
    waiting = [each for each in waiting if compiles(each.apply((ROOT / each.path).read_bytes()))]
    reached = TestMap(options.map)
    with (
        tempfile.TemporaryDirectory(prefix="mca-mutate-") as folder,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        trees = [_copy(Path(folder) / f"tree{number}") for number in range(options.jobs)]
        bench = Bench(trees, options.marks)

        def judge(mutation: Mutation) -> Verdict:
            modules = reached.reaching(mutation, options.seconds)
            return bench.judge(mutation, modules, sum(reached.seconds[each] for each in modules))

        for verdict in pool.map(judge, waiting):
            with out.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
            yield verdict


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    mapping = commands.add_parser("map", help="record which test modules reach which functions")
    mapping.add_argument("words", nargs="*", help="arguments for pytest, after --")
    for name, text in {"run": "plant faults and judge them", "list": "print what run would plant"}.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--count", type=int, default=300, help="number of faults (default: 300)")
        command.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
        command.add_argument(
            "--path", action="append", default=[], help="pattern of source files; repeatable"
        )
        command.add_argument("--changed", metavar="BASE", help="only lines that differ from it")
        command.add_argument("--identity", action="append", default=[], help="only this fault; repeatable")
        command.add_argument("--jobs", type=int, default=2, help="faults judged at a time (default: 2)")
        command.add_argument(
            "--seconds", type=float, default=90, help="CPU seconds of tests per fault (default: 90)"
        )
        command.add_argument(
            "--marks", default="not qualify", help="marker expression (default: 'not qualify')"
        )
        command.add_argument("--map", type=Path, default=MAP, help="folder that the command map has written")
        command.add_argument(
            "--out",
            type=Path,
            default=ROOT / "mutations.log",
            help="file of verdicts (default: mutations.log)",
        )
    return parser


def main(words: list[str]) -> int:
    """Run the command; return 1 if a fault survived."""
    options = arguments().parse_args(words)
    if options.command == "map":
        return record_map(options.words)
    found = candidates(options.path)
    if options.changed:
        found = changed(options.changed, found)
    if options.identity:
        found = [mutation for mutation in found if mutation.identity in options.identity]
    planted = found if options.identity else drawn(found, options.count, options.seed)
    if options.command == "list":
        for mutation in planted:
            print(
                f"{mutation.identity} {mutation.path}:{mutation.line} {mutation.operator}: {mutation.shown}"
            )
        return 0
    if not any(options.map.glob("*.json")):
        print(f"{options.map} holds no map; run `tools/mutate.py map` first", file=sys.stderr)
        return 2
    totals: Counter[str] = Counter()
    for verdict in run(planted, options):
        totals[verdict.verdict] += 1
        if verdict.verdict != "caught":
            print(
                f"{verdict.verdict}: {verdict.path}:{verdict.line} {verdict.operator}: {verdict.shown}",
                flush=True,
            )
    print(", ".join(f"{count} {name}" for name, count in sorted(totals.items())) or "nothing to plant")
    return int(any(totals[name] for name in ("survived", "unreached", "error")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""Plant small faults in the packages, one at a time, and list those that no test catches.

    uv run tools/mutate.py map                            # record which tests reach which functions
    uv run tools/mutate.py run --count 300 --seed 7       # plant 300 faults drawn with seed 7
    uv run tools/mutate.py run --changed main             # plant the faults in lines that differ from branch main
    uv run tools/mutate.py run --path 'packages/*/src/*/losses/*' --count 40
    uv run tools/mutate.py list --count 300 --seed 7      # print what would be planted

A fault is planted in a copy of the working tree, and in a fork of a process that has imported it. The tests that
reach its function run there, the cheapest first, until one fails. A failing test must pass without the fault, or the
verdict is an error. Verdicts are appended to ``--out``; faults that it lists already are not planted again, so an
interrupted run goes on.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# after the path, for `uv run tools/mutate.py`
from tools.mutation.operators import Mutation, compiles, mutations  # noqa: E402
from tools.mutation.reached_tests import TestMap  # noqa: E402

MAP = ROOT / ".pytest_cache" / "test_map"
EQUIVALENT = Path(__file__).parent / "mutation" / "equivalent.json"
"""Identities of faults that no test can catch, with the line and the reason."""
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
    detail: str
    tests: int
    seconds: float


def subject_of(path: str) -> str:
    """Return the first subject whose patterns match ``path``, or an empty string."""
    inside = path.split("/src/", 1)[-1]
    for subject, patterns in SUBJECTS.items():
        if any(fnmatch.fnmatch(inside, pattern) for pattern in patterns.split()):
            return subject
    return ""


def candidates(patterns: Iterable[str]) -> list[Mutation]:
    """Return all faults of the source files that match one of ``patterns`` (all files if there is none).

    Faults that `EQUIVALENT` lists are left out: they change no result.
    """
    equivalent = json.loads(EQUIVALENT.read_text())
    paths = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/src/**/*.py"))
    chosen = [path for path in paths if not patterns or any(fnmatch.fnmatch(path, each) for each in patterns)]
    found = (mutation for path in chosen for mutation in mutations(ROOT, path))
    return [mutation for mutation in found if mutation.identity not in equivalent]


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


class Bench:
    """One copy of the working tree in which faults are planted, and the process that runs tests there."""

    def __init__(self, tree: Path, marks: str, limit: Callable[[str], float]) -> None:
        self.tree = tree
        self.marks = marks
        self.limit = limit
        self.passing: dict[str, bool] = {}
        requests, write = os.pipe()
        read, answers = os.pipe()
        self.server = subprocess.Popen(
            [*self._pytest("tools.mutation.server"), "-m", marks],
            cwd=tree,
            env=self._environment() | {"MCA_MUTATE_PIPES": f"{requests},{answers}"},
            pass_fds=(requests, answers),
            stdout=(log := (tree.parent / f"{tree.name}.log").open("w")),
            stderr=subprocess.STDOUT,
        )
        log.close()
        os.close(requests)
        os.close(answers)
        self.requests, self.answers = os.fdopen(write, "w"), os.fdopen(read)
        self.entered, self.tests = (set(names) for names in self._receive().values())

    def close(self) -> None:
        """End the process."""
        self.requests.close()
        self.server.wait()

    def judge(self, mutation: Mutation, tests: list[str]) -> Verdict:
        """Plant ``mutation``, run ``tests`` until one fails, and take the fault out again."""
        started = time.monotonic()
        file = self.tree / mutation.path
        source, times = file.read_bytes(), file.stat()
        verdict, failed = "unreached", {"test": "", "detail": ""}
        remaining = tests
        while remaining:
            file.write_bytes(mutation.apply(source))
            try:
                failed = self._first_failure(mutation, remaining)
            finally:
                file.write_bytes(source)
                os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            verdict = "caught" if failed["test"] else "survived"
            if not failed["test"] or self._passes(failed["test"]):
                break
            verdict = "error"  # unless another test fails because of the fault
            remaining = [test for test in remaining if self.passing.get(test, True)]
        return Verdict(
            mutation.identity,
            verdict,
            subject_of(mutation.path),
            mutation.path,
            mutation.line,
            mutation.operator,
            mutation.shown,
            failed["test"],
            failed["detail"][:200],
            len(tests),
            round(time.monotonic() - started, 1),
        )

    def _first_failure(self, mutation: Mutation, tests: list[str]) -> dict[str, str]:
        """Run ``tests`` in a fork, or in a new process where a fork would not see the fault."""
        with tempfile.NamedTemporaryFile(suffix=".py") as faulty:
            Path(faulty.name).write_bytes((self.tree / mutation.path).read_bytes())
            answer = self._ask(mutation.path, faulty.name, tests)
        early = f"{mutation.path}:{mutation.function}" in self.entered
        if "unplanted" in answer or (early and not answer["test"]):
            return self._in_new_process(tests)
        return answer

    def _passes(self, test: str) -> bool:
        """Return whether ``test`` passes without a fault."""
        if test not in self.passing:
            self.passing[test] = not self._ask("", "", [test])["test"]
        return self.passing[test]

    def _ask(self, path: str, file: str, tests: list[str]) -> dict[str, str]:
        limits = [self.limit(test) for test in tests]
        request = {"path": path, "file": file, "tests": tests, "limits": limits}
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        answer: dict[str, str] = self._receive()
        return answer

    def _receive(self) -> Any:
        if line := self.answers.readline():
            return json.loads(line)
        log = (self.tree.parent / f"{self.tree.name}.log").read_text()
        raise RuntimeError(f"pytest ended in {self.tree}:\n{log[-2000:]}")

    def _in_new_process(self, tests: list[str]) -> dict[str, str]:
        """Run ``tests`` and return the first that fails."""
        limit = 60 + sum(self.limit(test) - 30 for test in tests)
        command = [*self._pytest("no:cacheprovider"), "-x", "-m", self.marks, *tests]
        try:
            done = subprocess.run(
                command,
                cwd=self.tree,
                capture_output=True,
                text=True,
                timeout=limit,
                env=self._environment(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"test": tests[0], "detail": "(time-out)"}
        if done.returncode in (0, 5):
            return {"test": "", "detail": ""}
        match = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - (.*))?$", done.stdout, re.MULTILINE)
        name, detail = (match[1], match[2] or "") if match else ("", "")
        return {
            "test": name if name in tests else tests[0],
            "detail": detail or f"exit code {done.returncode}",
        }

    def _pytest(self, plugin: str) -> list[str]:
        words = "-n 0 -q --tb=line --no-header -o".split()
        addopts = "addopts=--import-mode=importlib --strict-markers -rfE"
        return [sys.executable, "-m", "pytest", "-p", plugin, *words, addopts]

    def _environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": _import_path(self.tree)}


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


def record_map(folder: Path, words: list[str]) -> int:
    """Run the default tests that ``folder`` has no records of, with the recorder of `tools.mutation.recorder`."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"MCA_TEST_MAP": str(folder.resolve()), "PYTHONPATH": _import_path(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q"]
    listed = subprocess.run(
        [*command, "-n", "0", "--collect-only"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    known = TestMap(folder, ROOT).module
    new = [line for line in listed if "::" in line and line not in known]
    print(f"{len(known)} tests are recorded, {len(new)} are new")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
        names.write("\n".join(new))
        names.flush()
        command += ["-p", "tools.mutation.recorder", *words, f"@{names.name}"]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode if new else 0


def run(planted: list[Mutation], options: argparse.Namespace) -> Iterator[Verdict]:
    """Judge each fault that ``options.out`` does not list yet."""
    out: Path = options.out
    known = {json.loads(line)["identity"] for line in out.read_text().splitlines()} if out.exists() else set()
    waiting = [mutation for mutation in planted if mutation.identity not in known]
    waiting = [each for each in waiting if compiles(each.apply((ROOT / each.path).read_bytes()))]
    reached = TestMap(options.map, ROOT)
    with (
        tempfile.TemporaryDirectory(prefix="mca-mutate-") as folder,
        ThreadPoolExecutor(options.jobs) as pool,
        ExitStack() as stack,
    ):
        trees = [_copy(Path(folder) / f"tree{number}") for number in range(options.jobs)]
        benches: SimpleQueue[Bench] = SimpleQueue()
        for bench in pool.map(lambda tree: Bench(tree, options.marks, reached.limit), trees):
            stack.callback(bench.close)
            benches.put(bench)
        if gone := reached.keep(bench.tests):
            print(f"{len(gone)} tests of the map no longer exist, {gone[0]} among them", file=sys.stderr)

        def judge(mutation: Mutation) -> Verdict:
            bench = benches.get()
            try:
                return bench.judge(mutation, reached.reaching(mutation, options.seconds))
            finally:
                benches.put(bench)

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
    mapping = commands.add_parser("map", help="record which functions the tests reach that the map lacks")
    mapping.add_argument("words", nargs="*", help="arguments for pytest, after --")
    mapping.add_argument(
        "--map", type=Path, default=MAP, help="folder with the records; remove it to start again"
    )
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
        return record_map(options.map, options.words)
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

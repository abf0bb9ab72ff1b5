"""The recorded map of which tests reach which functions, and the choice of tests for one fault.

`tools/mutation/recorder.py` writes the records. The map serves while the source changes: a function is known by its
name, what was recorded for a test that no longer exists is dropped, and a function without records is reached by the
tests of its file, or else of the files that import it.
"""

import json
import re
from collections import Counter
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

from tools.mutation.operators import Mutation

START = 0.2
"""CPU seconds that starting a test costs in addition to its own, so that many tiny tests are not free."""

FEW = 5
"""Fewer recorded tests say that the function is newer than most records, so the tests of its file run too."""


class TestMap:
    """Tests that reach a function, and their CPU seconds."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.root = root
        self.seconds: Counter[str] = Counter()
        self.module: dict[str, str] = {}
        self.keys: dict[str, set[str]] = {}
        self.uses: dict[str, list[str]] = {}
        self.users: dict[str, set[str]] = {}
        for path in folder.glob("*.json"):
            for record in json.loads(path.read_text()):
                self._add(record)
        self.breadth = self._breadth()

    def _add(self, record: dict[str, Any]) -> None:
        key = record["key"].removesuffix(f"@{Path(record['module']).stem}")  # the group of pytest-xdist
        self.seconds[key] += record["seconds"]
        if "::" in key:
            self.module[key] = record["module"]
            self.uses.setdefault(key, []).extend(record["uses"])
            for fixture in record["uses"]:
                self.users.setdefault(fixture, set()).add(key)
        for function in record["functions"]:
            self.keys.setdefault(function, set()).add(key)

    def _breadth(self) -> Counter[str]:
        """Return how many functions each test reaches."""
        found: Counter[str] = Counter()
        for keys in self.keys.values():
            found.update(self._tests(keys))
        return found

    def _tests(self, keys: Collection[str]) -> set[str]:
        """Return the tests of ``keys``: those that use it, where a key is a fixture."""
        return {each for key in keys for each in (self.users.get(key, ()) if "|" in key else (key,))}

    @cached_property
    def files(self) -> dict[str, set[str]]:
        """Source file -> the tests that reach one of its functions."""
        found: dict[str, set[str]] = {}
        for function, keys in self.keys.items():
            found.setdefault(function.partition(":")[0], set()).update(self._tests(keys))
        return found

    def keep(self, existing: Collection[str]) -> list[str]:
        """Forget the tests that are not in ``existing``, and return them."""
        gone = sorted(set(self.module) - set(existing))
        for test in gone:
            del self.module[test]
        for name in (self.keys, self.users):
            for tests in name.values():
                tests.difference_update(gone)
        self.__dict__.pop("files", None)
        return gone

    def reaching(self, mutation: Mutation, limit: float) -> list[str]:
        """Return the tests that reach ``mutation``, up to ``limit`` CPU seconds, one module after another.

        A test that is cheap and reaches few functions comes first: it is the most likely to look at this one. A test
        costs its own seconds and those of the shared fixtures that no test chosen before has used. Recorded tests run
        before those of the file.
        """
        recorded = self._tests(self.keys.get(f"{mutation.path}:{mutation.function}", set()))
        found = recorded if len(recorded) >= FEW else recorded | self._neighbours(mutation.path)
        paid: set[str] = set()
        chosen: dict[str, list[str]] = {}
        total = 0.0
        for test in sorted(
            found,
            key=lambda each: (
                each not in recorded,
                (self._cost(each, set()) + START) * self.breadth[each],
                each,
            ),
        ):
            cost = self._cost(test, paid)
            if chosen and total + cost > limit:
                continue
            total += cost
            paid.update(self.uses[test])
            chosen.setdefault(self.module[test], []).append(test)
        return [test for tests in chosen.values() for test in tests]

    def _neighbours(self, path: str) -> set[str]:
        """Return the tests for a function without records: what only an import calls, as tables do, or new code."""
        named = {test for test in self.module if Path(path).stem in test}
        if found := named | self.files.get(path, set()):
            return found
        dotted = path.partition("/src/")[2].removesuffix(".py").replace("/", ".")
        package, _, name = dotted.rpartition(".")
        imports = re.compile(rf"(from|import) {dotted}\b|from {package} import \(?[\w\s,]*\b{name}\b")
        for each in self.root.glob("packages/*/src/**/*.py"):
            if imports.search(each.read_text()):
                found = found | self.files.get(str(each.relative_to(self.root)), set())
        return found

    def _cost(self, test: str, paid: set[str]) -> float:
        return self.seconds[test] + sum(self.seconds[each] for each in set(self.uses[test]) - paid)

    def limit(self, test: str) -> float:
        """Return how many seconds ``test`` may take on a busy machine before it counts as failed."""
        return 30 + 12 * self._cost(test, set())

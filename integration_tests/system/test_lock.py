"""`tools/lock.py`: strips every address from the lock, and its check can fail."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOST = "https://mirror.example"
LOCK = f"""\
version = 1

[[package]]
name = "alpha"
version = "1.2"
source = {{ registry = "{HOST}/simple" }}
dependencies = [{{ name = "beta", version = "3", source = {{ registry = "{HOST}/simple" }} }}]
sdist = {{ url = "{HOST}/packages/a1/alpha-1.2.tar.gz", hash = "sha256:00" }}
wheels = [
    {{ url = "{HOST}/packages/b2/alpha-1.2-py3-none-any.whl", hash = "sha256:01" }},
]

[[package]]
name = "mine"
version = "0.1.0"
source = {{ editable = "packages/mine" }}
"""


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mca_tools_lock", ROOT / "tools" / "lock.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


lock = _load()


def test_strip_removes_every_address_and_keeps_versions_and_hashes():
    stripped = lock.strip(LOCK)
    assert lock.addresses(LOCK) and not lock.addresses(stripped)
    assert lock.versions(stripped) == lock.versions(LOCK) == {("alpha", "1.2"), ("mine", "0.1.0")}
    assert '{ filename = "alpha-1.2.tar.gz", hash = "sha256:00" }' in stripped
    assert stripped.count('registry = "default"') == 2
    assert 'editable = "packages/mine"' in stripped


def test_strip_is_idempotent_and_ignores_which_mirror_it_was():
    stripped = lock.strip(LOCK)
    assert lock.strip(stripped) == stripped
    assert lock.strip(LOCK.replace(HOST, "file:///srv/mirror")) == stripped
    assert lock.strip(LOCK.replace('hash = "sha256:01"', 'hash = "sha256:01", size = 17')) == stripped


def test_the_stripped_lock_can_be_installed_from_without_a_change(tmp_path):
    """The commands of CONTRIBUTING.md: uv exports every version and hash of a lock that has no address."""
    for source in [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]:
        target = tmp_path / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    before = lock.strip((ROOT / "uv.lock").read_text())
    (tmp_path / "uv.lock").write_text(before)
    command = ["uv", "export", "--frozen", "--quiet", "--offline", "--output-file", "locked.txt"]
    subprocess.run(command, cwd=tmp_path, check=True, stdin=subprocess.DEVNULL)
    assert (tmp_path / "uv.lock").read_text() == before
    exported = set(
        re.findall(r"^([a-z0-9._-]+)==([^ ;]+)", (tmp_path / "locked.txt").read_text(), re.MULTILINE)
    )
    assert len(exported) > 100
    assert exported <= lock.versions(before)


def test_a_changed_version_is_reported():
    changed = LOCK.replace('version = "1.2"', 'version = "1.3"')
    assert list(lock._changes(LOCK, changed)) == [
        "uv.lock: re-locking drops alpha 1.2",
        "uv.lock: re-locking adds alpha 1.3",
    ]
    assert len(list(lock._changes(LOCK, LOCK.replace("sha256:00", "sha256:ff")))) == 1
    assert not list(lock._changes(LOCK, LOCK))


def test_an_unstripped_lock_is_refused_before_any_network():
    (problem,) = lock._problems_of_lock(LOCK)
    assert "4 addresses" in problem and "lock.py strip" in problem


@pytest.mark.parametrize(
    "line",
    [
        "see https://py" + "pi.org/simple",
        "https://files.python" + "hosted.org/packages/x",
        "registry.npm" + "js.org",
        "deb http://deb.deb" + "ian.org/deb" + "ian",
        "/ro" + "ot/models",
        "open('/ho" + "me/ada/x')",
        "/wo" + "rk/main/x",
    ],
)
def test_registry_hosts_and_machine_paths_are_found(line):
    assert [number for number, _ in lock.forbidden(f"fine\n{line}\n")] == [2]


@pytest.mark.parametrize(
    "line", ["packages/work/x", "the root of the tree", "/tmp/x", "$HOME/x", "a/home/ada/b"]
)
def test_ordinary_paths_pass(line):
    assert not list(lock.forbidden(line))


def test_the_lock_in_this_tree_strips_clean():
    stripped = lock.strip((ROOT / "uv.lock").read_text())
    assert len(lock.versions(stripped)) > 100
    assert not lock.addresses(stripped)

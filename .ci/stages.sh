# Sourced by .ci/run and .ci/qualify: the environment, and a function for each stage.
# Works from a fresh clone with nothing but Python >= 3.11 (and uv, which it fetches if it is missing).
# Every stage runs, so that one run shows everything that is wrong; the exit code says whether anything is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

started=$SECONDS
passed=() failed=()
say() { printf '\n=== [%4ds] %s\n' "$((SECONDS - started))" "$*"; }

# stage TITLE COMMAND...: the command runs in a subshell with `set -e`; ONLY=words skips stages without these words in their title
record() { :; } # TITLE RESULT SECONDS, called after each stage
stage() {
    local title=$1 code=0 began=$SECONDS
    shift
    [[ $title == *"${ONLY:-}"* ]] || return 0
    say "$title"
    set +e
    (set -e; "$@")
    code=$?
    set -e
    if ((code)); then failed+=("$title"); say "FAILED ($code): $title"; else passed+=("$title"); fi
    record "$title" "$( ((code)) && echo failed || echo passed)" "$((SECONDS - began))"
}

work=$(mktemp -d "${TMPDIR:-/tmp}/mca-ci.XXXXXX")
trap 'rm -rf "$work"' EXIT
export UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1
unset VIRTUAL_ENV
unset PYTHONDONTWRITEBYTECODE # set, it makes every process compile what it imports: 20 s of a core

if ! command -v uv >/dev/null 2>&1; then
    say "uv is missing: installing it beside the run"
    python3 -m venv "$work/uv"
    "$work/uv/bin/python" -m pip install --quiet uv
    export PATH="$work/uv/bin:$PATH"
fi

say "environment (uv sync)"
uv sync --quiet
python=$(uv run python -c 'import sys; print(sys._base_executable)')
uv run python -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__)'

lint() {
    uv run ruff check
    uv run ruff format --check
}

converter_alone() {
    uv build --quiet --all-packages --wheel --out-dir "$work/wheels"
    uv venv --quiet --no-project --python "$python" "$work/convert"
    # by path, so that nothing of the same name on an index can stand in for ours
    for wheel in "$work"/wheels/*.whl; do
        name=$(basename "$wheel")
        echo "${name%%-*} @ file://$wheel"
    done >"$work/ours.txt"
    uv pip install --quiet --python "$work/convert/bin/python" --constraint "$work/ours.txt" \
        "$work"/wheels/mca_convert-*.whl
    "$work/convert/bin/python" tools/converter_only_check.py
}

# Every page and anchor that is linked is there, and no page fetches anything from elsewhere.
site() {
    NO_MKDOCS_2_WARNING=1 uv run --quiet --isolated --only-group docs \
        mkdocs build --quiet --strict --site-dir "$work/site"
    ! grep -rlE 'src="https?://' --include='*.html' "$work/site"
}

# A Python 3.12 for the second fork: one that uv sees, else one that pyenv keeps inactive.
find_312() {
    if ! uv python find --no-project 3.12 2>/dev/null && command -v pyenv >/dev/null 2>&1; then
        compgen -G "$(pyenv root)/versions/3.12*/bin/python3.12" | sort -V | tail -n 1
    fi
}

second_fork() {
    export UV_PROJECT_ENVIRONMENT="$PWD/.venv-3.12"
    uv sync --quiet --python "$python312"
    uv run --python "$python312" python -c 'import megatron.core; print("megatron-core", megatron.core.__version__)'
    uv run --python "$python312" pytest "$@" -m "$marks" # what depends on the version of Megatron (conftest.py)
}

# The real clients of S3, Google's storage, wandb and mlflow, in an environment of their own: some need older versions
# of packages that the others share. Speaks to loopback alone.
clients() {
    export UV_PROJECT_ENVIRONMENT="$PWD/.venv-clients"
    uv run --quiet --no-default-groups --group clients pytest -n 0 integration_tests/cli/test_clients.py
}

# client_environment FOLDER PYTHON LIST: a separate environment with the packages of LIST and ours.
client_environment() {
    uv venv --quiet --no-project --allow-existing --python "$2" "$1"
    uv pip install --quiet --python "$1/bin/python" --requirement "$3" \
        --editable packages/mca-config --editable 'packages/mca-models[megatron]' --editable packages/mca-train \
        --editable packages/mca-convert
}

# verl FOLDER PYTHON ...: its trainer on its own engine and on mca's, in a separate environment with an older transformers.
verl() {
    local folder=$1
    client_environment "$folder" "$2" .ci/verl.txt
    "$folder/bin/python" -m pytest -n 0 "${@:3}" integration_tests/cli/test_verl{,_plugin}.py
}

# llamafactory FOLDER PYTHON ...: its own programs on mca, in a separate environment with the older packages that it needs.
llamafactory() {
    local folder=$1
    client_environment "$folder" "$2" .ci/llamafactory.txt
    "$folder/bin/python" -m pytest -n 0 "${@:3}" integration_tests/cli/test_llamafactory{,_keys}.py
}

# ROLL's own files, of the checkout MCA_ROLL, in a separate environment.
roll() {
    client_environment .venv-roll "$python" .ci/roll.txt
    uv pip install --quiet --python .venv-roll/bin/python --no-deps TransferQueue==0.1.6
    .venv-roll/bin/python -m pytest -n 0 "$@" integration_tests/cli/test_roll{,_features}.py
}

# ms-swift's own command with the patch of the documents, in an environment of its own, on Transformer Engine's emulated kernels.
swift() {
    client_environment .venv-swift "$python" .ci/swift.txt
    local folder
    folder=$(uv run tools/build_transformer_engine.py)
    PYTHONPATH="$folder" uv run pytest -n 0 "$@" integration_tests/cli/test_ms_swift.py
}

# Minutes of building the first time; kept in the user's cache by versions.
transformer_engine() {
    local folder
    folder=$(uv run tools/build_transformer_engine.py)
    PYTHONPATH="$folder" uv run pytest "$@" integration_tests/*/test_te_*.py
}

slurm_is_there() {
    local each
    for each in slurmctld slurmd sbatch munged; do command -v "$each" >/dev/null || return 1; done
}

# Whether a SLURM can be started here; Debian's packages are installed if that takes less than a minute.
has_slurm() {
    [[ $(id -u) == 0 ]] || return 1
    slurm_is_there && return
    command -v apt-get >/dev/null || return 1
    DEBIAN_FRONTEND=noninteractive timeout 60 bash -c '
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge' >/dev/null 2>&1 || return 1
    slurm_is_there
}

slurm() {
    MCA_SLURM=1 timeout --signal=INT --kill-after=30 600 uv run pytest -n 0 -m slurm integration_tests/cli/test_slurm.py
}

finish() {
    say "${#passed[@]} stages passed, ${#failed[@]} failed"
    ((${#failed[@]} == 0)) || { printf 'FAILED: %s\n' "${failed[@]}"; exit 1; }
}

is_python_311() { [[ $("$python" -c 'import sys; print(*sys.version_info[:2])') == "3 11" ]]; }

# LLaMA-Factory on the environment's Python, which decides the version of Megatron; arguments go to pytest.
llamafactory_where_it_can_be() {
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))'; then
        stage "LLaMA-Factory on mca" llamafactory .venv-lf "$python" "$@"
    else
        say "SKIPPED: .ci/llamafactory.txt is for Python 3.11 and 3.12, so LLaMA-Factory was NOT tested"
    fi
}

# Set MCA_ROLL to a checkout of the commit that the tests were written for; ROLL is on no package index.
has_roll() {
    [[ -n ${MCA_ROLL:-} ]] && return
    local commit=8eb27cc2dc34c4d1310b169d9b86d339004d811a
    git init --quiet "$work/ROLL"
    timeout 120 git -C "$work/ROLL" fetch --quiet --depth 1 https://github.com/alibaba/ROLL "$commit" 2>/dev/null || return 1
    git -C "$work/ROLL" checkout --quiet FETCH_HEAD
    export MCA_ROLL="$work/ROLL"
}

roll_where_it_can_be() {
    if is_python_311 && has_roll; then
        stage "ROLL on mca" roll "$@"
    else
        say "SKIPPED: ROLL needs Python 3.11, and MCA_ROLL or a connection to its repository, so ROLL was NOT tested"
    fi
}

# verl on the environment's Python, which decides the version of Megatron; arguments go to pytest.
verl_where_it_can_be() {
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))'; then
        stage "verl on mca" verl .venv-verl "$python" "$@"
    else
        say "SKIPPED: .ci/verl.txt is for Python 3.11 and 3.12, so verl was NOT tested"
    fi
}

swift_where_it_can_be() {
    if is_python_311 && command -v c++ >/dev/null 2>&1; then
        stage "ms-swift on mca" swift "$@"
    else
        say "SKIPPED: .ci/swift.txt is for Python 3.11, and Transformer Engine needs c++, so ms-swift was NOT tested"
    fi
}

# Transformer Engine and SLURM, where this machine can have them; arguments go to pytest.
where_they_can_be() {
    if command -v c++ >/dev/null 2>&1; then
        stage "Transformer Engine's layers, emulated" transformer_engine "$@"
    else
        say "SKIPPED: no C++ compiler (c++) found, so Transformer Engine was not built and its layers were NOT tested"
    fi
    if has_slurm; then
        stage "train.slurm under a SLURM of two nodes" slurm
    else
        say "SKIPPED: no SLURM can be installed here within a minute as root, so train.slurm was NOT tested"
    fi
}

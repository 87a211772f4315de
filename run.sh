#!/usr/bin/env bash
# Sets memfit up in .venv and runs its main job, its tests or its checks. See ./run.sh help.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"

readonly CPU_INDEX=https://download.pytorch.org/whl/cpu
readonly CANNOT_RUN_HERE=6

usage() {
    cat <<'TEXT'
./run.sh          set up, then plan GPT-2 124M (batch 8, sequence 1024) for an RTX 3060 12 GB
./run.sh test     set up, then lint, types, all tests, and the portable engine with a CPU build of torch
./run.sh slow     the tests that take long: whole plans, compiled models, jobs that lose a rank
./run.sh check    format, lint, types and the tests of this environment
./run.sh docs     build the documentation into site/
./run.sh setup    set up only

PYTHON=python3.12 ./run.sh chooses another Python (3.11 or later).
TEXT
}

say() { printf 'memfit: %s\n' "$*"; }

give_up() {
    printf 'memfit: %s\n' "$*" >&2
    exit "$CANNOT_RUN_HERE"
}

# Debian packages can be installed only by root; elsewhere the user is told which.
apt_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    say "installing $* with apt-get"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "$@"; } >/dev/null 2>&1
}

find_python() {
    local name
    for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$name"
            return
        fi
    done
    give_up "Python 3.11 or later is needed; on Debian 12: apt-get install python3 python3-venv"
}

need_venv() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null && return
    apt_install python3-venv || true
    "$1" -c 'import ensurepip, venv' 2>/dev/null && return
    give_up "$1 lacks its venv module; on Debian: apt-get install python3-venv"
}

# The dashboard's tests drive a real browser; without one they are skipped, and say so.
want_browser() {
    command -v chromium >/dev/null && return
    apt_install chromium && return
    say "no chromium: the tests of the dashboard will be skipped; on Debian: apt-get install chromium"
}

# Without a compiler memfit still works, with its portable engine: said, not fatal.
want_compiler() {
    command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null && return
    apt_install gcc libc6-dev && return
    say "no C compiler: the dry run will not work, the portable engine will; on Debian: apt-get install gcc libc6-dev"
}

# pip without its chatter; the whole of it is shown when it fails twice.
pip_install() {
    local folder=$1 log=$1/install.log
    shift
    "$folder/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" >"$log" 2>&1 && return
    say "the installation stumbled, trying once more"
    "$folder/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" >"$log" 2>&1 && return
    tail -n 20 "$log" >&2
    give_up "the installation failed; the whole log is $log"
}

# set_up FOLDER CONSTRAINTS EXTRAS WHAT: an environment, made anew only where what it is made of has changed.
set_up() {
    local folder=$1 constraints=$2 extras=$3 what=$4 python wanted index
    wanted=$(pwd | cat - "$constraints" pyproject.toml | cksum)
    if "$folder/bin/python" -c '' 2>/dev/null && [ "$wanted" = "$(cat "$folder/made-of" 2>/dev/null)" ]; then
        return
    fi
    if "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
        say "bringing $folder up to date"
    else
        python=$(find_python)
        need_venv "$python"
        say "making $folder with $("$python" --version)"
        "$python" -m venv --clear "$folder" || give_up "$python could not make $folder"
    fi
    say "installing $what"
    index=$(cpu_index "$folder" "$constraints")
    # shellcheck disable=SC2086  # empty or two words
    pip_install "$folder" $index -c "$constraints" -e ".[$extras]"
    printf '%s\n' "$wanted" >"$folder/made-of"
}

# For the CPU environment: nothing where the configured index offers a CPU build of torch by itself, else PyTorch's
# own index of CPU builds.
cpu_index() {
    local folder=$1 constraints=$2
    [ "$constraints" = constraints-cpu.txt ] || return 0
    "$folder/bin/python" -m pip install --disable-pip-version-check --quiet --dry-run --no-deps --ignore-installed \
        --report - "$(grep '^torch==' "$constraints")" 2>/dev/null | grep -q '"version": *"[0-9.]*+cpu"' ||
        printf -- '--extra-index-url %s' "$CPU_INDEX"
}

set_up_main() {
    want_compiler
    set_up .venv constraints.txt models,vision,fast,compression,quant,prune,kernels,web,dev "PyTorch and the rest (about 6.5 GB, some minutes the first time)"
}

set_up_cpu() {
    set_up .venv-cpu constraints-cpu.txt models,compression,web,dev "a CPU build of PyTorch for the portable engine (about 1.5 GB)"
}

# stage NAME COMMAND...: run it, remember how it went and how long it took.
failed=0
summary=()
stage() {
    local name=$1 began=$SECONDS verdict=ok
    shift
    say "── $name"
    "$@" || { verdict=FAILED; failed=1; }
    summary+=("$(printf '%-6s %4d s  %s' "$verdict" $((SECONDS - began)) "$name")")
}

report() {
    printf '\n'
    printf 'memfit: %s\n' "${summary[@]}"
    [ "$failed" = 0 ] && say "all passed in $SECONDS s" || say "something failed"
    exit "$failed"
}

lint() {
    .venv/bin/ruff check --quiet src tests && .venv/bin/ruff format --check --quiet src tests
}

checks() {
    stage "ruff: lint and format" lint
    stage "mypy: types" .venv/bin/python -m mypy
    stage "pytest: this environment" .venv/bin/python -m pytest -q -n 2 -m "not slow"
}

# Only the parts that act otherwise with another build of torch; the rest is tested above.
cpu_tests() {
    .venv-cpu/bin/python -m pytest -q -n 2 -m "not dryrun and not slow" \
        tests/capture tests/planning tests/cli tests/test_face.py tests/test_manager.py
}

portable_fit() {
    .venv-cpu/bin/python -m memfit fit hf:gpt2,n_layer=4,batch=4,seq=512 --gpu rtx3060-12gb --budget 2.5GiB
}

# One thread per process: the two test processes share two cores.
export OMP_NUM_THREADS=1

case ${1:-fit} in
fit)
    set_up_main
    exec .venv/bin/python -m memfit fit hf:gpt2,batch=8,seq=1024 --gpu rtx3060-12gb --report memfit-report.html
    ;;
test)
    want_browser
    set_up_main
    set_up_cpu
    SECONDS=0
    checks
    stage "pytest: CPU build of torch" cpu_tests
    stage "memfit fit: CPU build of torch, portable engine" portable_fit
    report
    ;;
slow)
    set_up_main
    exec .venv/bin/python -m pytest -q -n 2 -m slow
    ;;
check)
    set_up_main
    .venv/bin/ruff format --quiet src tests
    SECONDS=0
    checks
    report
    ;;
docs)
    set_up_main
    pip_install .venv -c constraints.txt -e ".[docs]"
    exec .venv/bin/python -m mkdocs build --strict
    ;;
setup)
    set_up_main
    ;;
help | -h | --help)
    usage
    ;;
*)
    usage >&2
    exit 2
    ;;
esac

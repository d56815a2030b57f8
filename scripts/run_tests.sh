#!/usr/bin/env bash
# run_tests.sh MARKERS [ARGUMENT...]: the tests that match MARKERS, with further arguments of pytest.
# First those that are marked alone, since they measure, one by one; then all others, TEST_WORKERS
# at a time, a file's tests by one worker. Most of them wait: more workers than cores keep these busy.
set -euo pipefail
cd "$(dirname "$0")/.."
markers=$1
shift
workers=${TEST_WORKERS:-3}
found=

run() {
    printf '== pytest -m "%s"\n' "$1"
    local status=0
    .venv/bin/python -m pytest -q -m "$@" || status=$?
    # Status 5: no test matched, which is an error only if it is so for both parts.
    [ "$status" -ne 5 ] || return 0
    [ "$status" -eq 0 ] || exit "$status"
    found=yes
}

# Only their files, where no path is given: to collect all tests takes a while.
mapfile -t measuring < <(grep -rlE 'mark\.alone' --include='test_*.py' tests)
for argument in "$@"; do
    [ ! -e "${argument%%::*}" ] || measuring=()
done
run "($markers) and alone" "${measuring[@]}" "$@"
run "($markers) and not alone" --numprocesses "$workers" --dist loadfile --no-loadscope-reorder "$@"
[ -n "$found" ] || exit 5

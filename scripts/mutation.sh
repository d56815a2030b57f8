#!/usr/bin/env bash
# mutation.sh SOURCE[,SOURCE...] TEST...: how many small faults in those files the tests notice.
# It works on a copy; mutmut is installed beside it, not in .venv. MUTATION_FOLDER keeps both, so that
# a later run goes on. Not part of CI: it takes a second or so for each fault. State tables are
# data, not functions, so mutmut leaves them: tests/architecture/test_rules_fire.py covers these.
#   scripts/mutation.sh src/kvferry/blocks/lease.py tests/unit/blocks/test_lease.py
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${MUTATION_FOLDER:-$(mktemp -d)}
sources=${1:?"name the files to have faults in, with commas between them"}
shift
python=$root/.venv/bin/python

list() { printf '"%s", ' "$@"; }

"$python" -m pip install -qq --disable-pip-version-check --upgrade --target "$folder/mutmut" mutmut==3.8.1
mkdir -p "$folder/tree"
cp -r "$root"/{docs,pyproject.toml,scripts,src,tests} "$folder/tree"
cd "$folder/tree"
IFS=, read -ra mutated <<< "$sources"
cat >> pyproject.toml <<TOML

[tool.mutmut]
source_paths = ["src"]
only_mutate = [$(list "${mutated[@]}")]
also_copy = ["docs", "scripts"]
pytest_add_cli_args_test_selection = [$(list "$@")]
pytest_add_cli_args = ["-p", "no:cacheprovider", "-o", "timeout=0"]
TOML
mkdir -p mutants/src # Python remembers which folders of its path are not there.
export PYTHONPATH=$PWD/mutants/src:$PWD/mutants:$folder/mutmut
nice -n 15 "$python" -m mutmut run
nice -n 15 "$python" -m mutmut results --all true > "$folder/results.txt"
sed -E 's/^ *([a-z_.]+)\.[^.]*: (.*)$/\1 \2/' "$folder/results.txt" | sort | uniq -c
printf 'each fault: %s\n' "$folder/results.txt"

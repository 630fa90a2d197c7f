#!/usr/bin/env bash
# The fast tests with what users have: each row below in a virtual environment of its own, one after the other.
#   scripts/matrix.sh            every row; a table at the end
#   scripts/matrix.sh 3 7        rows 3 and 7
#   TESTS="tests/unit/weights" scripts/matrix.sh     these tests alone
# Environments and logs lie in $MATRIX (default out/matrix); an environment is deleted once its tests have run, for one
# with torch for CUDA takes 5 GB. Exit code 1 where a row failed. A Python that is not here is said and left out.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${MATRIX:-out/matrix}
mkdir -p "$folder"

# Python, then what pip is asked for. "oldest" is the oldest version of everything that pyproject.toml allows.
rows=(
  "3.11 oldest"
  "3.11 torch==2.6.0 numpy==1.26.4 pillow==11.0.0"
  "3.11 torch numpy pillow"
  "3.12 torch==2.6.0 numpy==1.26.4 pillow==11.0.0"
  "3.12 torch numpy pillow"
  "3.13 torch==2.6.0 numpy==2.1.0 pillow==11.0.0"
  "3.13 torch numpy pillow"
  "3.14 torch numpy pillow"
)

find_python() {
  command -v "python$1" || ls -d "$HOME/.pyenv/versions/$1."*/bin/python 2>/dev/null | tail -1
}

# Extras that the fast tests look at, and `tables` where it goes with NumPy; tests of the others are skipped.
extras=heic,plot,serve,video
failed=0
table="$folder/table.md"
printf '| row | Python | torch | numpy | Pillow | result |\n|---|---|---|---|---|---|\n' >"$table"
for number in $(seq ${#rows[@]}); do
  [[ $# -gt 0 && " $* " != *" $number "* ]] && continue
  read -r version asked <<<"${rows[number - 1]}"
  python=$(find_python "$version")
  if [[ -z $python || ! -x $python ]]; then
    echo "| $number | $version | | | | not run: no such Python here |" | tee -a "$table"
    continue
  fi
  venv="$folder/venv-$number" log="$folder/row-$number.log"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  constraint=()
  wanted=$extras,tables
  [[ $asked == oldest || $asked == *numpy==1* ]] && wanted=$extras
  if [[ $asked == oldest ]]; then
    asked=""
    "$python" scripts/oldest.py "$wanted" >"$folder/oldest.txt"
    constraint=(-c "$folder/oldest.txt")
  fi
  # shellcheck disable=SC2086
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check "${constraint[@]}" $asked -e ".[$wanted]" \
    'pytest>=8.3' 'hypothesis>=6.120' httpx >"$log" 2>&1; then
    outcome="not installed: $(grep -m1 ERROR "$log")"
    failed=1
  else
    # What other versions warn of is no failure of ours.
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pytest -q --fast -p no:cacheprovider -W default::DeprecationWarning \
      -W default::PendingDeprecationWarning -W default::FutureWarning ${TESTS:-} >>"$log" 2>&1
    code=$?
    outcome="$(tail -1 "$log" | tr -d '=')"
    [[ $code == 0 ]] || failed=1
  fi
  versions=$("$venv/bin/python" -c "
from importlib.metadata import version
import platform
print(platform.python_version(), *(version(name) for name in ('torch', 'numpy', 'pillow')), sep=' | ')" 2>/dev/null)
  echo "| $number | ${versions:-$version | | |} | $outcome |" | tee -a "$table"
  [[ -n ${KEEP:-} ]] || rm -rf "$venv"
done
echo
cat "$table"
exit $failed

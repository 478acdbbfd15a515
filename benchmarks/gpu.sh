#!/usr/bin/env bash
# Measures HAPI on one machine that has a CUDA GPU and no network.
set -uo pipefail

usage() {
    cat <<'END'
usage: benchmarks/gpu.sh WHEELS_DIR [--data DIR] [--out DIR] [--minutes N]
                         [--full] [--dry-run]
       benchmarks/gpu.sh --list-wheels

Measures what needs a GPU: a worker on cuda beside a client on the CPU, both on
cuda, the worker alone, and the tests that are skipped without a GPU.  Python
with torch and torchvision for CUDA has to be installed; everything else that
is missing comes from WHEELS_DIR, and nothing from a network.

  --data DIR     WebDataset tars of photographs; else HAPI_TEST_DATA
  --out DIR      new folder of the results (default gpu-results)
  --minutes N    of everything together (default 25); what does not fit is
                 left out, and told
  --full         all settings of the opponents and long windows; takes hours
  --dry-run      prints each command and what is there, and runs nothing
  --list-wheels  prints which wheels are needed, and how to download them
  --python PATH  default python3
  --device NAME  default cuda; cpu tries the script where there is no GPU
END
}

ROOT=$(cd "$(dirname "$0")/.." && pwd)
LIST=$ROOT/benchmarks/gpu-wheels.txt
wheels='' data=${HAPI_TEST_DATA:-} out=gpu-results minutes=25 python=python3
device=cuda dry='' quick=(--quick --rounds 3 --scale 32)

wrong() {
    echo "gpu.sh: $1" >&2
    usage >&2
    exit 2
}

list_wheels() {
    cat "$LIST"
    cat <<END

# On a machine with a network, for another one with Python 3.12 on x86-64:
#   pip download --no-deps --only-binary :all: --python-version 3.12 \\
#       --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \\
#       --dest WHEELS_DIR --requirement benchmarks/gpu-wheels.txt
# What has no wheel there (pip names it) is left out of a copy of the file.
END
}

while [ $# -gt 0 ]; do
    case $1 in
    --list-wheels) list_wheels && exit 0 ;;
    --help | -h) usage && exit 0 ;;
    --dry-run) dry=yes ;;
    --full) quick=(--scale 64) ;;
    --data | --out | --minutes | --python | --device)
        [ $# -gt 1 ] || wrong "$1 needs a value"
        declare "${1#--}=$2"
        shift
        ;;
    -*) wrong "there is no option $1" ;;
    *)
        [ -z "$wheels" ] || wrong "one folder of wheels, not also $1"
        wheels=$1
        ;;
    esac
    shift
done
[ "$device" = cuda ] || quick=(--quick)
[ -n "$wheels" ] || wrong "give the folder of the wheels"
[[ $minutes =~ ^[1-9][0-9]*$ ]] || wrong "--minutes is $minutes; 1 or more"
[ -n "$data" ] || wrong "give --data, or set HAPI_TEST_DATA"
out=$(realpath -m "$out") data=$(realpath -m "$data")
wheels=$(realpath -m "$wheels") python=$(command -v "$python")
[ -n "$python" ] || wrong "there is no Python; give it with --python"

# -- what is there --------------------------------------------------------

there() { # there WHAT COMMAND...: whether the command succeeds, told
    local what=$1
    shift
    if "$@" >/dev/null 2>&1; then
        echo "there: $what"
    else
        echo "MISSING: $what"
        return 1
    fi
}

# Names of the list that no distribution here has.
not_installed() {
    "$1" - "$LIST" <<'END'
import sys
from importlib.metadata import PackageNotFoundError, version

for line in open(sys.argv[1]):
    name = line.strip()
    if not name or name.startswith("#"):
        continue
    if name == "legacy-cgi" and sys.version_info < (3, 13):
        continue
    try:
        version(name)
    except PackageNotFoundError:
        print(name)
END
}

has_wheel() {
    local file name
    for file in "$wheels"/*.whl; do
        name=$(basename "${file%%-*}" | tr 'A-Z_.' 'a-z--')
        [ "$name" = "$1" ] && return 0
    done
    return 1
}

check() {
    there "the folder of wheels $wheels" test -d "$wheels"
    there "photographs in $data" sh -c "ls '$data'/*.tar || test -f '$data'"
    there "$python" "$python" -c 'import sys; assert sys.version_info >= (3, 10)' ||
        return 0
    there "torch and torchvision" "$python" -c '
from importlib.util import find_spec
assert find_spec("torch") and find_spec("torchvision")'
    there "a CUDA device" \
        "$python" -c 'import torch; assert torch.cuda.is_available()'
    there "two cores or more" \
        "$python" -c 'import os; assert len(os.sched_getaffinity(0)) > 1'
    sort_missing
    [ ${#found[@]} -eq 0 ] || echo "there as wheels, to install: ${found[*]}"
    [ ${#lacking[@]} -eq 0 ] ||
        echo "MISSING, neither installed nor as wheels: ${lacking[*]}"
    if [ ${#network[@]} -gt 0 ]; then
        echo "no link will be shaped: $unshaped"
    fi
}

# What is not installed: found, with a wheel, and lacking.
sort_missing() {
    local name
    found=() lacking=()
    for name in $(not_installed "$python"); do
        if has_wheel "$name"; then
            found+=("$name")
        else
            lacking+=("$name")
        fi
    done
}

# Why no namespaces can be made; nothing where they can.
no_namespaces() {
    "$python" -c '
from benchmarks.network import missing_requirements
print(", ".join(missing_requirements()))' 2>&1
}

# -- steps ----------------------------------------------------------------

deadline=$(($(date +%s) + 60 * minutes))
failed=0
child=''
least=120 # seconds of any step, if they are left

# Told to end, it ends what runs: timeout has a process group of its own.
stop() {
    if [ -n "$child" ]; then
        kill "$child" 2>/dev/null
        wait "$child"
    fi
    exit 130
}
trap stop INT TERM HUP

# step NAME PERCENT COMMAND...: runs it for no longer than that part of the
# time, and no longer than is left.  Its failure stops no other step.
step() {
    local name=$1 most=$((60 * minutes * $2 / 100)) began left status
    shift 2
    echo "+ $*"
    [ -n "$dry" ] && return 0
    began=$(date +%s)
    left=$((deadline - began))
    if [ "$left" -lt 10 ]; then
        tell "$name" "left out: no time was left"
        failed=1
        return 1
    fi
    most=$((most < least ? least : most))
    timeout --kill-after 60 $((most < left ? most : left)) "$@" \
        >"$out/$name.log" 2>&1 &
    child=$!
    wait "$child"
    status=$?
    child=''
    case $status in
    0) tell "$name" "done in $(($(date +%s) - began)) s" ;;
    124 | 137) tell "$name" "ended by its time; $name.log" ;;
    *) tell "$name" "FAILED with status $status; $name.log" ;;
    esac
    [ $status -eq 0 ] || failed=1
    return $status
}

tell() {
    echo "$1: $2" | tee -a "$out/summary.txt"
}

install_wheels() {
    sort_missing
    if [ -z "$dry" ] && [ ${#lacking[@]} -gt 0 ]; then
        tell wheels "neither installed nor there: ${lacking[*]}"
    fi
    [ ${#found[@]} -gt 0 ] || return 0
    step wheels 20 "$venv/bin/python" -m pip install --quiet --no-index \
        --no-deps --find-links "$wheels" "${found[@]}"
}

# Halves of the cores: "FIRST SECOND", as lists.
halves() {
    "$python" -c '
import os
cores = sorted(os.sched_getaffinity(0))
half = len(cores) // 2
print(",".join(map(str, cores[:half])), ",".join(map(str, cores[half:])))'
}

suite() { # suite NAME PERCENT OPTIONS...
    local name=$1 percent=$2 cores
    shift 2
    read -r -a cores <<<"$(halves)"
    step "$name" "$percent" "$venv/bin/python" -m benchmarks run grid \
        "${quick[@]}" "${network[@]}" --only 'resnet18/backbone/*' \
        --storage-cores "${cores[0]:-}" --client-cores "${cores[1]:-}" \
        --data "$data" --json "$out/$name.json" "$@"
    step "$name-page" 5 "$venv/bin/python" -m benchmarks report \
        "$out/$name.json" --html "$out/$name"
}

cd "$ROOT" || exit 1
PYTHONPATH=$ROOT
for part in protocol splitter swift_middleware client deploy; do
    PYTHONPATH=$PYTHONPATH:$ROOT/$part
done
export PYTHONPATH PYTHONUNBUFFERED=1
network=() unshaped=$(no_namespaces)
[ -z "$unshaped" ] || network=(--no-netns)
if [ -n "$dry" ]; then
    check
    venv=VENV
else
    [ -e "$out" ] && wrong "$out is there; give another folder with --out"
    mkdir -p "$out" || exit 1
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    venv=$scratch/venv
    check | tee "$out/machine.txt"
    nvidia-smi >>"$out/machine.txt" 2>&1 || echo "no nvidia-smi"
fi

# Without ensurepip, the pip of the system does.
pip=()
"$python" -c 'import ensurepip' 2>/dev/null || pip=(--without-pip)
step venv 5 "$python" -m venv --system-site-packages "${pip[@]}" "$venv"
# A venv of a venv sees what the system has, and not what that one has.
read -r -a sites <<<"$("$python" -c '
import site
print(*site.getsitepackages())')"
install_wheels
step checkout 5 "$venv/bin/python" benchmarks/checkout_path.py \
    "${sites[@]}"
step tests 15 "$venv/bin/python" -m pytest -q -rs \
    tests/unit/training/test_checkpoint_file.py tests/unit/test_benchmarks_devices.py
suite worker-on-gpu 30 --worker-device "$device"
suite both-on-gpu 30 --worker-device "$device" --client-device "$device"
step worker-alone 25 "$venv/bin/python" -m benchmarks.worker \
    --device "$device" --data "$data" \
    --json "$out/worker-alone.json"
[ -n "$dry" ] && exit 0
echo
cat "$out/summary.txt"
echo "results are in $out"
exit $failed

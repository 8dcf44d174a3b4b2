#!/usr/bin/env bash
# All checks this machine can run: ruff, mypy, pytest. Sets itself up (see _setup.sh). Arguments go to pytest:
#   scripts/test.sh -k quantize
# Fails if a check fails or if no test ran. Skipped tests are listed with their reasons.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
setup dev test
cd "$ROOT"

gpu=$("$PYTHON" -c 'import torch; print(int(torch.cuda.is_available()))')
failed=()

has() { "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

check() { # check NAME MODULE ARGUMENTS...
    local name=$1 module=$2
    shift 2
    if ! has "$module"; then
        echo "-- $name: not run, $module is not installed and nothing can be installed here"
        return
    fi
    echo "-- $name"
    "$PYTHON" -m "$module" "$@" || failed+=("$name")
}

check "ruff check" ruff check --output-format concise .
check "mypy (strict)" mypy

# Two workers on a CPU, one thread each: the interpreter is single-threaded. On a GPU the tests share one device.
workers=()
if [ "$gpu" = 0 ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    if has xdist; then workers=(-n "${MXMOE_TEST_WORKERS:-2}" --dist worksteal); fi
fi

echo "-- pytest"
status=0
"$PYTHON" -m pytest -rs ${workers[@]+"${workers[@]}"} "$@" || status=$?
case $status in
    0) ;;
    5) failed+=("pytest (no test ran)") ;;
    *) failed+=("pytest (exit $status)") ;;
esac

if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi

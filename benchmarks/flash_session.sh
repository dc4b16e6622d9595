#!/usr/bin/env bash
# One piece of the large sweep on a lent GPU: restore what earlier pieces left, run until the deadline, bring back
# results, logs and compiled programs. Run from the root of the repository.
#
#   WHEELS=.whl LAYERS=28 DEADLINE_S=540 OUT=/tmp/out benchmarks/flash_session.sh [flags of benchmarks.flash_sweep]
#
# $OUT receives flash_sweep.json, the logs and programs.tar.xz.NN (pieces of 15 MB). To go on where this
# ended, put flash_sweep.json back into benchmarks/results and the pieces into out/programs, and run it again: programs
# are found by source, shapes and versions, so any change to the model's code compiles anew.
set -uo pipefail
OUT=${OUT:-out/flash}
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-.whl}
LAYERS=${LAYERS:-28}
DEADLINE_S=${DEADLINE_S:-540}
CACHE=${CACHE:-/tmp/dspark_flash}
PROGRAMS=${PROGRAMS:-out/programs}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TF_CPP_MIN_LOG_LEVEL=2 PYTHONUNBUFFERED=1
mkdir -p "$OUT" "$CACHE"

if compgen -G "$WHEELS/*.whl" >/dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site \
    "$WHEELS"/*.whl || exit
  export PYTHONPATH=$PYTHONPATH:/tmp/site
fi
if compgen -G "$PROGRAMS/programs.tar.xz.*" >/dev/null; then
  cat "$PROGRAMS"/programs.tar.xz.* | tar -xJ -C "$CACHE" || echo "stored programs are unreadable" >&2
fi
if [[ ! -e $OUT/flash_sweep.json && -e benchmarks/results/flash_sweep.json ]]; then
  cp benchmarks/results/flash_sweep.json "$OUT/"
fi

status=0
"$PYTHON" -m benchmarks.flash_sweep --layers "$LAYERS" --deadline-s "$((DEADLINE_S - SECONDS))" \
  --cache-dir "$CACHE" --output "$OUT/flash_sweep.json" --log "$OUT/server.log" \
  --gpu-memory-utilization 0.92 --compile-processes "${COMPILE_PROCESSES:-4}" "$@" 2>&1 | tee "$OUT/sweep.log" || status=$?

echo "== sweep: status $status after ${SECONDS}s; $(ls "$CACHE/programs" | wc -l) programs, $(du -sm "$CACHE" | cut -f1) MiB"
rm -f "$OUT"/programs.tar.xz.*
XZ_OPT='-T0 -2' tar -cJ -C "$CACHE" programs profiles 2>/dev/null | split -b 15000000 -d - "$OUT/programs.tar.xz."
ls -la "$OUT"
exit "$status"

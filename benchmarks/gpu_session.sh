#!/usr/bin/env bash
# All that one visit to a GPU machine should bring back, most valuable first, each stage within its own time:
# about eight minutes together. Run from the root of the repository; results go to $OUT (default: out/gpu).
#
#   PYTHON=python3 WHEELS=out/whl TEXT_CPU=out/text_cpu.json OUT=/tmp/out benchmarks/gpu_session.sh
#
# WHEELS is a folder of wheels that the machine lacks; TEXT_CPU what `python -m benchmarks.device_text --write` of the
# same bundled model gave on a CPU in float32. Both may be absent.
set -uo pipefail
OUT=${OUT:-out/gpu}
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-out/whl}
TEXT_CPU=${TEXT_CPU:-out/text_cpu.json}
export OUT XLA_PYTHON_CLIENT_PREALLOCATE=false TF_CPP_MIN_LOG_LEVEL=2 PYTHONPATH=$PWD
mkdir -p "$OUT"
failed=()

# stage NAME SECONDS COMMAND...: output to $OUT/NAME.log and, its end, to the terminal.
stage() {
  local name=$1 limit=$2 status=0
  shift 2
  timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1 || status=$?
  ((status == 0)) || failed+=("$name:$status")
  echo "== $name: status $status after ${SECONDS}s"
  tail -n "${TAIL:-12}" "$OUT/$name.log"
}

if compgen -G "$WHEELS/*.whl" >/dev/null; then
  "$PYTHON" -m pip install -q --no-deps --no-index "$WHEELS"/*.whl || failed+=(wheels)
fi

# The project's pytest settings name plugins that the machine may lack.
gpu_tests=("$PYTHON" -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q -m gpu --timeout 140 -W ignore)

# Compiling needs cores and no work of the GPU, so it runs beside the tests that do. Pallas wants to see one.
timeout --kill-after=5 230 "${gpu_tests[@]}" -n 10 tests/kernels/test_compile.py \
  >"$OUT/compile.log" 2>&1 &
compiling=$!
TAIL=40 stage tests 130 "${gpu_tests[@]}" -n 4 tests/kernels/test_compiled.py
stage memory 60 "${gpu_tests[@]}" -s tests/kernels/test_memory.py
wait "$compiling" || failed+=("compile:$?")
echo "== compile after ${SECONDS}s"
tail -n 20 "$OUT/compile.log"

TAIL=120 stage kernels 260 "$PYTHON" -m benchmarks.kernels --limit-s 235 --tune-s 9 \
  --only sparse_mla expert_mlp linear hyper index_topk expert_plan compress allocate \
  --tune "flash decode_2048" "flash prefill_2048" "fp4 8 tokens" "fp4 64 tokens" "fp4 256 tokens" \
  "fp4 2048 tokens" "fp8 16 tokens" "fp8 256 tokens" 256x4x4096 2048x4x4096

compare=()
[[ -f $TEXT_CPU ]] && compare=(--compare "$TEXT_CPU")
small=(--max-num-seqs 8 --max-num-batched-tokens 64 --bucket-ladder doubling --max-model-len 1024
  --compilation-cache-dir /tmp/dspark_programs)
stage text_float32 60 "$PYTHON" -m benchmarks.device_text --write "$OUT/text_float32.json" "${compare[@]}" \
  -- "${small[@]}" --dtype float32
stage text_bfloat16 60 "$PYTHON" -m benchmarks.device_text --write "$OUT/text_bfloat16.json" "${compare[@]}" \
  -- "${small[@]}"

echo "== ${SECONDS}s; failed: ${failed[*]:-none}"
((${#failed[@]} == 0))

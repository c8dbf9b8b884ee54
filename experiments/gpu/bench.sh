#!/usr/bin/env bash
# The GPU measurement, in one call and less than 8 minutes on one recent data-centre GPU:
#
#   bash experiments/gpu/bench.sh
#   OUT=results SPEC_BENCH=question.jsonl bash experiments/gpu/bench.sh
#   TINY=1 bash experiments/gpu/bench.sh   # the same on a CPU with a tiny model: does it run?
#
# OUT then has the machine, the bench (bench/), and a cost table and the reads per step of each
# model (*.json). A part that fails or takes too long leaves a line in failed.txt, and the others
# go on.
set -uo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-experiments/gpu/out}
SPEC_BENCH=${SPEC_BENCH:-}          # question.jsonl; without it the demo prompts
TINY=${TINY:-}
# The parts' shares; what is left over is for starting and loading.
BENCH_SECONDS=${BENCH_SECONDS:-200}
DEFAULT_SECONDS=${DEFAULT_SECONDS:-70}
SMALL_SECONDS=${SMALL_SECONDS:-50}
LARGE_SECONDS=${LARGE_SECONDS:-60}
PYTHON=${PYTHON:-python}

mkdir -p "$OUT"
rm -f "$OUT/failed.txt"
begin=$(date +%s)

part() { # name, seconds, command...: its output is in name.log
  local name=$1 seconds=$2
  shift 2
  echo "== $name (at most $seconds s)"
  timeout --signal=INT --kill-after=20 "$seconds" "$@" >"$OUT/$name.log" 2>&1
  local code=$?
  if [ $code -ne 0 ]; then
    local last
    last=$(tail -n 1 "$OUT/$name.log" | cut -c 1-200)
    echo "$name ended with exit code $code: $last" | tee -a "$OUT/failed.txt"
  fi
  tail -n 12 "$OUT/$name.log"
}

{
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader \
    2>/dev/null || echo "no GPU"
  $PYTHON - << 'PY'
import sys, torch, transformers
print(sys.version.split()[0], "torch", torch.__version__, "transformers", transformers.__version__)
PY
  git describe --always --dirty 2>/dev/null
} | tee "$OUT/machine.txt"

overrides=(experiment=bench_gpu "hydra.run.dir=$OUT/bench")
if [ -n "$SPEC_BENCH" ]; then
  overrides+=("prompts.path=$SPEC_BENCH")
else
  overrides+=(prompts=demo "~prompts.per_category")
fi
if [ -n "$TINY" ]; then
  overrides+=(model@target=tiny target.device=cpu target.dtype=float32 compiled=true
    drafter=untrained "budget.max_nodes=7" sampling.max_new_tokens=8 prompts.limit=2
    bench.repeats=1 "bench.systems=[AR,ngram,cost_aware]")
  tables=(--device cpu --dtype float32 --compiled true --contexts 64 128)
else
  tables=(--dtype bfloat16)
fi

# The seconds given to a table end it by itself, with what it has; the part's limit is only for what
# hangs.
table() { # shape, seconds, room, options...
  local shape=$1 seconds=$2 room=$3
  shift 3
  part "$shape" $((seconds + room)) $PYTHON experiments/gpu/cost_table.py --shape "$shape" \
    --out "$OUT/$shape.json" --seconds "$seconds" "$@" "${tables[@]}"
}

rm -rf "$OUT/bench"
part bench "$BENCH_SECONDS" $PYTHON -m specens.bench "${overrides[@]}"
if [ -n "$TINY" ]; then
  table tiny "$DEFAULT_SECONDS" 60
else
  table default "$DEFAULT_SECONDS" 20
  table 1.5b "$SMALL_SECONDS" 20
  # A quantised copy of the 8B shape would first be written to the disk.
  table 8b "$LARGE_SECONDS" 20 --quantization none
fi
echo "took $(($(date +%s) - begin)) s; everything is in $OUT"
[ ! -e "$OUT/failed.txt" ]

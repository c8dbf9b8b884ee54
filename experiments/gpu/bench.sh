#!/usr/bin/env bash
# The GPU measurement, in one call and less than 8 minutes on one recent data-centre GPU:
#
#   bash experiments/gpu/bench.sh
#   OUT=results SPEC_BENCH=question.jsonl bash experiments/gpu/bench.sh
#   TINY=1 bash experiments/gpu/bench.sh        # the same program on a CPU with a tiny model, in a minute: does it run through?
#
# OUT then has what machine it was, the bench (bench/), and a cost table and the reads of a step for each model (*.json). A part
# that fails or takes too long leaves a line in failed.txt, and the others go on.
set -uo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-experiments/gpu/out}
SPEC_BENCH=${SPEC_BENCH:-}          # question.jsonl; without it the demo prompts
TINY=${TINY:-}
BENCH_SECONDS=${BENCH_SECONDS:-200} # the parts' shares; what is left over at the end is for starting and loading
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
    echo "$name ended with exit code $code: $(tail -n 1 "$OUT/$name.log" | cut -c 1-200)" | tee -a "$OUT/failed.txt"
  fi
  tail -n 12 "$OUT/$name.log"
}

{
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader 2>/dev/null || echo "no GPU"
  $PYTHON -c "import sys, torch, transformers; print(sys.version.split()[0], 'torch', torch.__version__, 'transformers', transformers.__version__)"
  git describe --always --dirty 2>/dev/null
} | tee "$OUT/machine.txt"

words=(experiment=bench_gpu "hydra.run.dir=$OUT/bench")
if [ -n "$SPEC_BENCH" ]; then
  words+=("prompts.path=$SPEC_BENCH")
else
  words+=(prompts=demo "~prompts.per_category")
fi
if [ -n "$TINY" ]; then
  words+=(model@target=tiny target.device=cpu target.dtype=float32 compiled=true drafter=untrained "budget.max_nodes=7"
    sampling.max_new_tokens=8 prompts.limit=2 bench.repeats=1 "bench.systems=[plain,ngram,cost_aware]")
  tables=(--device cpu --dtype float32 --compiled true --contexts 64 128)
else
  tables=(--dtype bfloat16)
fi

rm -rf "$OUT/bench"
part bench "$BENCH_SECONDS" $PYTHON -m specens.bench "${words[@]}"
# The seconds given to a table end it by itself, with what it has; the part's limit is only for what hangs.
if [ -n "$TINY" ]; then
  part tiny $((DEFAULT_SECONDS + 60)) $PYTHON experiments/gpu/cost_table.py --shape tiny --out "$OUT/tiny.json" --seconds "$DEFAULT_SECONDS" "${tables[@]}"
else
  part default $((DEFAULT_SECONDS + 20)) $PYTHON experiments/gpu/cost_table.py --shape default --out "$OUT/default.json" --seconds "$DEFAULT_SECONDS" "${tables[@]}"
  part 1.5b $((SMALL_SECONDS + 20)) $PYTHON experiments/gpu/cost_table.py --shape 1.5b --out "$OUT/1.5b.json" --seconds "$SMALL_SECONDS" "${tables[@]}"
  # A quantised copy of the 8B shape would first be written to the disk.
  part 8b $((LARGE_SECONDS + 20)) $PYTHON experiments/gpu/cost_table.py --shape 8b --out "$OUT/8b.json" --seconds "$LARGE_SECONDS" --quantization none "${tables[@]}"
fi
echo "took $(($(date +%s) - begin)) s; everything is in $OUT"
[ ! -e "$OUT/failed.txt" ]

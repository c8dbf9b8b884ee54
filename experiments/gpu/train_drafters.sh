#!/usr/bin/env bash
# Corpus, training and evaluation of drafters for one target, in one call and in less than MINUTES
# on one data-centre GPU:
#
#   bash experiments/gpu/train_drafters.sh
#   FOLDER=drafters/long MINUTES=60 TOKENS=50000000 SPEC_BENCH=question.jsonl \
#     bash experiments/gpu/train_drafters.sh
#
# The time is shared out: the corpus takes what it can write in 40% of it, then every training is
# timed for a few steps and gets as many as fit into its share. A second call with the same FOLDER
# resumes where the first one ended. On the disk, a token of the corpus takes 2 bytes for each kept
# layer and hidden dimension (SmolLM2-135M, four layers: 4.6 kB).
set -euo pipefail

FOLDER=${FOLDER:-drafters/gpu}
MINUTES=${MINUTES:-9}
MODEL=${MODEL:-smollm2-135m}        # of conf/model
DEVICE=${DEVICE:-cuda}
DTYPE=${DTYPE:-bfloat16}            # of the target
MIXED=${MIXED:-true}                # bfloat16 mixed precision in training
TOKENS=${TOKENS:-8000000}           # the most that the corpus gets
SHARD_TEXTS=${SHARD_TEXTS:-2048}    # texts decoded at once
MAX_USER=${MAX_USER:-128}
MAX_ANSWER=${MAX_ANSWER:-256}
HIDDEN_LAYERS=${HIDDEN_LAYERS:-null}
DISTILLED_LAYERS=${DISTILLED_LAYERS:-[0,1,2,3]}
BLOCK_LAYERS=${BLOCK_LAYERS:-[16,23]}
POSITIONS=${POSITIONS:-8}
IDS=${IDS:-16384}                   # trimmed output vocabulary
ROW_TOKENS=${ROW_TOKENS:-2048}
ROWS=${ROWS:-8}                     # rows of a step
ANCHORS=${ANCHORS:-256}
LOADERS=${LOADERS:-4}
TIMED_STEPS=${TIMED_STEPS:-24}
NEW_TOKENS=${NEW_TOKENS:-64}
PROMPTS=${PROMPTS:-null}            # of the demo prompts; null: all
SPEC_BENCH=${SPEC_BENCH:-}          # question.jsonl, kept out of the corpus and evaluated on
PER_CATEGORY=${PER_CATEGORY:-1}     # its questions of each category

mkdir -p "$FOLDER"
begin=$(date +%s)
spent() { echo $(($(date +%s) - begin)); }
share() { python -c "print(max(int(60 * $MINUTES * $1), 1))"; }  # seconds
progress() { echo "== $(spent) s: $*"; }

target=("model@target=$MODEL" "target.device=$DEVICE" "target.dtype=$DTYPE")
stage() { python -m specens.train "stage=$1" "${target[@]}" "folder=$FOLDER" "${@:2}"; }

progress "the target writes its corpus"
corpus=("stage.num_tokens=$TOKENS" "stage.shard_texts=$SHARD_TEXTS"
  "stage.max_user_tokens=$MAX_USER" "stage.max_answer_tokens=$MAX_ANSWER"
  "stage.hidden_layers=$HIDDEN_LAYERS")
[ -z "$SPEC_BENCH" ] || corpus+=("stage.exclude=[$SPEC_BENCH]")
code=0
timeout --signal=INT --kill-after=20 "$(share 0.4)" \
  python -m specens.train stage=corpus "${target[@]}" "folder=$FOLDER" "${corpus[@]}" || code=$?
# 124, 137: its time is over; the shards that are finished count
case $code in 0 | 124 | 137) ;; *) exit $code ;; esac

progress "the datastore"
stage datastore

# learn NAME SHARE STAGE OPTIONS...: as many steps as fit into a share of the time.
learn() {
  local name=$1 seconds steps timing="$FOLDER/timing/$1" options=("${@:4}")
  options+=("stage.num_output_ids=$IDS" "stage.row_tokens=$ROW_TOKENS"
    "stage.schedule.rows_per_step=$ROWS" "stage.schedule.bfloat16=$MIXED"
    "stage.schedule.num_loaders=$LOADERS")
  seconds=$(share "$2")
  if [ ! -f "$FOLDER/steps-$name" ]; then
    rm -rf "$timing"
    stage "$3" "${options[@]}" "stage.folder=$timing" "stage.schedule.num_steps=$TIMED_STEPS" \
      "stage.schedule.warmup_steps=0" "stage.schedule.evaluate_every=100000" \
      "stage.schedule.save_every=100000" > "$FOLDER/timing-$name.log" 2>&1 ||
      { tail -5 "$FOLDER/timing-$name.log"; exit 1; }
    python - "$timing" "$seconds" > "$FOLDER/steps-$name" << 'PY'
import json, pathlib, sys
folder, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
(path,) = folder.glob("checkpoints*/curves.jsonl")
entries = map(json.loads, path.open())
timed = next(entry for entry in entries if "train_steps_per_second" in entry)
# The evaluation among the timed steps makes up for the time that loading takes.
print(max(20, int(seconds * timed["train_steps_per_second"])))
PY
  fi
  steps=$(cat "$FOLDER/steps-$name")
  progress "$name: $steps steps"
  stage "$3" "${options[@]}" "stage.schedule.num_steps=$steps" \
    "stage.schedule.warmup_steps=$((steps / 20))" \
    "stage.schedule.evaluate_every=$((steps / 4))" "stage.schedule.save_every=$((steps / 4))"
}

learn distilled 0.12 distilled "stage.layers=$DISTILLED_LAYERS"
sizes=("stage.num_positions=$POSITIONS" "stage.anchors_per_row=$ANCHORS")
learn block 0.12 non_autoregressive \
  stage.architecture=block "stage.layers=$BLOCK_LAYERS" "${sizes[@]}"
learn heads 0.06 non_autoregressive stage.architecture=heads "${sizes[@]}"

ensemble=("${target[@]}" drafter=ensemble budget=fixed tracker=none
  "sampling.max_new_tokens=$NEW_TOKENS" '~drafter@drafter.members.quantized'
  "drafter.members.retrieval.datastore=$FOLDER/datastore"
  "drafter.members.distilled.model.weights=$FOLDER/distilled.safetensors"
  "drafter.members.non_autoregressive.weights=$FOLDER/non_autoregressive-block.safetensors"
  "drafter.members.non_autoregressive.num_draft_tokens=$POSITIONS"
  +drafter@drafter.members.heads=non_autoregressive
  "drafter.members.heads.weights=$FOLDER/non_autoregressive-heads.safetensors"
  "drafter.members.heads.num_draft_tokens=$POSITIONS")
failed=0
run() {
  python -m specens.run "${ensemble[@]}" "hydra.run.dir=$FOLDER/runs/$1-$begin" "${@:2}" ||
    failed=1
}

progress "the demo prompts"
run demo "prompts.limit=$PROMPTS"
if [ -n "$SPEC_BENCH" ]; then
  progress "Spec-Bench"
  run spec-bench prompts=spec_bench "prompts.path=$SPEC_BENCH" \
    "prompts.per_category=$PER_CATEGORY"
fi

progress "done"
python - "$FOLDER" "$begin" << 'PY'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
for card in sorted(folder.glob("*.md")):
    lines = (line for line in card.read_text().splitlines() if line.startswith("| "))
    rows = [line.split("|")[1:3] for line in lines if "loss" not in line]
    found = (f"{name.strip()} {value.strip()}" for name, value in rows if name.strip())
    print(f"{card.stem}:", ", ".join(found))
for path in sorted(folder.glob(f"runs/*-{sys.argv[2]}/summary.json")):
    run = json.loads(path.read_text())
    speed = f"{run['tokens_per_s']:.0f} tok/s, {run['speedup']:.2f}x of AR decoding"
    print(f"{path.parent.name}: {run['num_identical']}/{run['num_prompts']} identical, "
          f"acceptance length {run['acceptance_length']:.2f}, {speed}")
    for name, row in run["drafters"].items():
        print(f"  {name}: alone {row['solo_acceptance_length']:.2f} tokens per step, "
              f"win rate {row['win_rate']:.1%}, {row['draft_ms_per_step']:.2f} ms per step")
PY
exit $failed

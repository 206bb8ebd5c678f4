#!/usr/bin/env bash
# From nothing to a sample: makes byte-level shards of this repository's own sources and
# documents, trains the tiny X-MoD preset on them, draws the loss and generates text. Run by `make quickstart`.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
DIR=quickstart
COMPUTE=6e12 # training FLOPs

say() { printf '\n== %s\n' "$*"; }

say "token shards from this repository's sources and documents"
"$PYTHON" scripts/prepare_data.py README.md LICENSE Makefile train_xmod.cpp ./*.h xmod scripts test/*.cpp test/*.h \
  --out $DIR/data --val-fraction 0.05 --overwrite

say "training the tiny preset for $COMPUTE FLOPs"
rm -rf $DIR/out
./train_xmod train --preset tiny --train-data "$DIR/data/train_*.bin" --val-data "$DIR/data/val_*.bin" \
  --compute $COMPUTE --batch-size 8 --eval-interval 50 --out $DIR/out

say "loss curve"
"$PYTHON" scripts/plot_metrics.py $DIR/out --out $DIR/loss.png

say "a sample"
checkpoint=$(ls -d $DIR/out/step_???????? | tail -n 1)
./train_xmod generate --checkpoint "$checkpoint" --prompt '  for (int64_t i = 0; ' --max-new-tokens 300

say "done: checkpoint $checkpoint, metrics $DIR/out/metrics.csv, picture $DIR/loss.png"

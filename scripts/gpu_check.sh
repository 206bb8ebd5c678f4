#!/usr/bin/env bash
# Checks and measures the CUDA backend on a machine with an NVIDIA GPU, in less than 8 minutes and with nothing to
# download: builds for this GPU, runs the tests of the passes on it, compares it with the CPU, lets
# compute-sanitizer watch a small training step, and runs the benchmark.
#
#   scripts/gpu_check.sh [--out DIR] [--only STAGE,STAGE...] [--dry-run]
#
#   --out DIR     folder for the report and each stage's output (default: build/gpu_check)
#   --only LIST   these stages alone, of: build tests compare memcheck racecheck benchmark
#   --dry-run     list the stages and their time budgets; needs no GPU
#
# Every stage has a time budget and a line of its own; one that fails does not stop the others. Ends with status 0
# when all went well. DIR/report.md has the results as tables for docs/gpu.md.
#
# Needs nvcc, a C++20 compiler, nlohmann/json, GoogleTest and Python with numpy. Where the two libraries cannot be
# installed, their headers and archives may lie anywhere: CPATH=.../include LIBRARY_PATH=.../lib scripts/gpu_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."

STAGES="build tests compare memcheck racecheck benchmark"
PYTHON=${PYTHON:-python3}
export PATH="$PATH:/usr/local/cuda/bin"

say() { printf 'gpu_check.sh: %s\n' "$*"; }
fail() {
  say "$*" >&2
  exit 1
}

# Seconds; all together less than 8 minutes.
budget_of() {
  case "$1" in
    build) echo 190 ;;
    tests) echo 60 ;;
    compare) echo 40 ;;
    memcheck) echo 40 ;;
    racecheck) echo 40 ;;
    benchmark) echo 100 ;;
  esac
}

meaning_of() {
  case "$1" in
    build) echo "train_xmodcu, the device tests, the comparison and the benchmark, for this GPU" ;;
    tests) echo "the pass tests on the GPU (build/test_device_*)" ;;
    compare) echo "some training steps against the CPU (make compare)" ;;
    memcheck) echo "small training steps under compute-sanitizer: memory errors" ;;
    racecheck) echo "a small training step under compute-sanitizer: races in shared memory" ;;
    benchmark) echo "ceilings, passes, whole steps of the 556M backbone (build/bench_xmodcu)" ;;
  esac
}

# ---------------------------------------------------------------------------------------------------
# The stages. Each runs in a process of its own; the last line that it prints stands in the report.

stage_build() {
  make -k "-j$(nproc)" train_xmodcu build/bench_xmodcu build/compare_backends device-test-programs
  echo "$(find build -maxdepth 1 -name 'test_device_*' -perm -u+x -type f | wc -l) test programs"
}

stage_tests() {
  local program log failed="" passed=0 count
  for program in build/test_device_*; do
    [ -x "$program" ] || continue  # make's notes lie there, too
    log=$OUT/$(basename "$program").txt
    if "$program" --gtest_brief=1 >"$log" 2>&1; then
      count=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$log")
      passed=$((passed + ${count:-0}))
      echo "ok $program: ${count:-0} passed"
    else
      failed="$failed $(basename "$program")"
      cat "$log"
    fi
    rm -f "$log"
  done
  [ -z "$failed" ] || { echo "failed:$failed"; return 1; }
  [ "$passed" -gt 0 ] || { echo "no test ran"; return 1; }
  echo "$passed passed"
}

stage_compare() {
  make compare
}

# Trains steps of a small model under a tool of compute-sanitizer.
sanitize() {
  local tool=$1
  shift
  compute-sanitizer --tool "$tool" --error-exitcode 9 ./train_xmodcu train --preset tiny --seq-len 96 \
    --active-layers 4 --precision bf16 --batch-size 2 --eval-batches 1 --train-data "$OUT/data/train_*.bin" \
    --val-data "$OUT/data/val_*.bin" --out "$OUT/trained" "$@"
  rm -rf "$OUT/trained"
}

small_data() {
  command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed"; return 1; }
  "$PYTHON" scripts/prepare_data.py README.md --out "$OUT/data" --val-fraction 0.2 --overwrite >/dev/null
}

stage_memcheck() {
  small_data
  sanitize memcheck --steps 3
  sanitize memcheck --steps 1 --arch moe --experts 4 --experts-per-token 2 --expert-dim 64
  echo "xmod and moe in bf16: no errors"
}

stage_racecheck() {
  small_data
  sanitize racecheck --steps 1
  echo "xmod in bf16: no hazards"
}

stage_benchmark() {
  build/bench_xmodcu | tee "$OUT/benchmark.md"
  echo "$(grep -c '^## .*: ' "$OUT/benchmark.md") models"
}

# ---------------------------------------------------------------------------------------------------
# What is here

require_gpu() {
  local gpus
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
  [ "${gpus:-0}" -gt 0 ] || fail "no GPU found here (nvidia-smi lists none); --dry-run lists what would be done"
  command -v nvcc >/dev/null || fail "nvcc not found: install the CUDA toolkit, or add its bin folder to PATH"
}

# Says what is missing, since it will fail stages.
look_for() {
  printf '#include <%s>\n' "$1" | "${CXX:-g++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
    say "$2 not found: run scripts/install_deps.sh $3, or set CPATH and LIBRARY_PATH to where a copy of it lies"
}

machine() {
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | head -1
}

# ---------------------------------------------------------------------------------------------------

dry_run() {
  local stage all=0
  for stage in $1; do
    printf '%-10s %4d s  %s\n' "$stage" "$(budget_of "$stage")" "$(meaning_of "$stage")"
    all=$((all + $(budget_of "$stage")))
  done
  printf '%-10s %4d s\n' together "$all"
}

# Runs a stage within its budget; adds its line to the report.
run_stage() {
  local stage=$1 log=$OUT/$1.log begin=$SECONDS status=0 result note seconds
  timeout --kill-after=5 "$(budget_of "$stage")" bash "scripts/gpu_check.sh" --run-stage "$stage" --out "$OUT" \
    >"$log" 2>&1 || status=$?
  seconds=$((SECONDS - begin))
  case $status in
    0) result=ok ;;
    124 | 137) result="out of time" ;;
    *) result=FAILED ;;
  esac
  note=$(grep -v '^ *$' "$log" | tail -n 1 | cut -c 1-200)
  printf '%-11s %-10s %4d s of %3d: %s\n' "$result" "$stage" "$seconds" "$(budget_of "$stage")" "$note"
  printf '| %s | %s | %d | %d | %s |\n' "$stage" "$result" "$seconds" "$(budget_of "$stage")" "${note//|//}" \
    >>"$OUT/report.md"
  [ "$status" = 0 ]
}

check() {
  local stage bad=0 begin=$SECONDS
  require_gpu
  mkdir -p "$OUT"
  look_for nlohmann/json.hpp nlohmann/json build
  look_for gtest/gtest.h GoogleTest test
  {
    echo "$(date -u +%Y-%m-%d), $(machine), $(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/CUDA \1/p')," \
      "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    printf '\n| stage | result | seconds | of | last line |\n|---|---|---:|---:|---|\n'
  } >"$OUT/report.md"
  rm -f "$OUT/benchmark.md"
  head -1 "$OUT/report.md"
  for stage in $1; do
    run_stage "$stage" || bad=$((bad + 1))
  done
  if [ -s "$OUT/benchmark.md" ]; then
    cat "$OUT/benchmark.md" >>"$OUT/report.md"
  fi
  rm -rf "$OUT/data" "$OUT/trained" "$OUT/benchmark.md"
  say "$((SECONDS - begin)) s in all; the report is $OUT/report.md, a stage's output $OUT/STAGE.log"
  [ "$bad" = 0 ] || fail "$bad of $(wc -w <<<"$1") stages failed"
}

usage() {
  sed -n '2,/^set/s/^# \{0,1\}//p' scripts/gpu_check.sh
}

main() {
  OUT=build/gpu_check
  local only=$STAGES dry="" run="" stage
  while [ $# -gt 0 ]; do
    case "$1" in
      --out) [ $# -gt 1 ] || fail "--out needs a folder"; OUT=$2; shift ;;
      --only) [ $# -gt 1 ] || fail "--only needs stages: $STAGES"; only=${2//,/ }; shift ;;
      --dry-run) dry=yes ;;
      --run-stage) run=$2; shift ;;
      -h | --help) usage; exit 0 ;;
      *) say "unknown option $1; see scripts/gpu_check.sh --help" >&2; exit 2 ;;
    esac
    shift
  done
  for stage in $only; do
    [ -n "$(budget_of "$stage")" ] || { say "no stage '$stage'; there are: $STAGES" >&2; exit 2; }
  done
  if [ -n "$run" ]; then
    "stage_$run"
  elif [ -n "$dry" ]; then
    dry_run "$only"
  else
    check "$only"
  fi
}

main "$@"

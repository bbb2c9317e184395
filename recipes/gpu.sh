#!/usr/bin/env bash
# Train the family on one GPU that has no network: three calls of under nine minutes each.
#
#   recipes/gpu.sh check OUT    one minute: every step once, and the speed of the real one
#   recipes/gpu.sh base OUT     build/recipes/{pretrain,finetune}.zip -> base
#   recipes/gpu.sh tune OUT     build/recipes/finetune.zip and base   -> chat, draft, two adapters
#
# OUT gets parts of at most 15 MiB and the logs. At home: python -m recipes join OUT, then what
# docs/training.md says after `adapt`. If the machine was given back between `base` and `tune`, join there
# first, or bring build/recipes/base along.
set -euo pipefail
stage=${1:?check, base or tune} out=${2:?folder for the results}
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# a folder of its own, so that it ends even where the environment has none that can be written
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/build/inductor}
work=build/recipes
mkdir -p "$out"

recipes() { ${PYTHON:-python3} -m recipes "$@"; }

case $stage in
check)
    trial=build/recipes-check
    rm -rf $trial && mkdir -p $trial
    ln -s "$PWD"/$work/*.zip $trial/
    few="--work $trial --steps 4 --rows 8 --micro-rows 4"
    {
        time recipes pretrain $few --size tiny
        time recipes finetune $few
        time recipes distill $few --size tiny
        time recipes adapt shakespeare $few
        # the real shape, for the speed alone: the line after step 20 says tokens/s
        rm -rf $trial/base $trial/base.training
        time recipes pretrain --work $trial --dropout 0.1 ${FULL:---minutes 0.8}
        recipes split "$out/check" base draft --work $trial
    } 2>&1 | tee "$out/check.log"
    ;;
base)
    {
        time recipes pretrain --work $work --dropout 0.1 --minutes "${MINUTES:-7.8}"
        recipes split "$out" base --work $work
    } 2>&1 | tee "$out/base.log"
    ;;
tune)
    {
        time recipes finetune --work $work --dropout 0.1 --minutes "${MINUTES:-3.2}"
        time recipes distill --work $work --minutes "${DRAFT_MINUTES:-2.2}"
        # a few epochs each: longer runs learn the text by heart
        time recipes adapt shakespeare --work $work --rows 16 --steps "${SHAKESPEARE_STEPS:-120}"
        time recipes adapt verse --work $work --rows 16 --steps "${VERSE_STEPS:-120}"
        recipes split "$out" chat draft shakespeare verse --work $work
    } 2>&1 | tee "$out/tune.log"
    ;;
*)
    echo "error: $stage is none of check, base, tune" >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# What only a GPU can tell, in 15 minutes on one: bash .ci/on_gpu.sh [harm] [tests] [speed]
#
#   harm    does the paper's harm arise in 16M? At a learning rate of 0.3, with and without a gain
#           in the last LayerNorm, with BF16 and with fp32 logits: four runs side by side, stopped
#           after some six minutes; results/gpu_harm/report.html has their curves
#   tests   the numbers on the device: gradients, roundings, the compiled model, the step
#   speed   a step of 16M and of 221M with each method: writes results/speed/table.txt
#
# DEVICE=cpu bash .ci/on_gpu.sh is a trial of all this with everything tiny.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
: "${DEVICE:=cuda}"
export PYTHONUNBUFFERED=1

if [ "$DEVICE" = cuda ]; then
  seconds=340
  size=16M
  shape='--batch_size=64 --block_size=256'
  bench_sizes='16M 221M'
  bench=''
else
  seconds=60
  size=tiny
  shape='--batch_size=4 --block_size=32'
  bench_sizes='tiny'
  bench='--seconds=2 --batch_size=2 --block_size=128'
fi

harm() {
  python prepare_fineweb.py --source=stdlib --tokenizer=chars --out=data/chars || return
  rm -rf out/gpu_harm
  local gain dtype
  for gain in final_gain no-final_gain; do
    for dtype in bfloat16 float32; do
      timeout "$seconds" python train.py --device=$DEVICE --size=$size --data=data/chars --lr=0.3 \
        --steps=50000 --warmup=200 $shape --$gain --logits_dtype=$dtype --log_every=20 --eval_every=0 \
        --eval_tokens=16384 --out=out/gpu_harm/$gain-$dtype >out/gpu_harm-$gain-$dtype.log 2>&1 &
    done
  done
  wait  # SIGTERM saves and stops them; the same commands without `timeout` would go on
  tail -qn 2 out/gpu_harm-*.log
  python analyze.py out/gpu_harm
}

tests() {
  timeout 200 python -m pytest test_facts.py tests/test_head.py tests/test_model.py tests/test_step.py
}

speed() {
  local table=results/speed/table.txt one_size
  {
    echo "$(git describe --always --dirty), $(python -c 'import torch
cuda = torch.cuda.is_available()
print("PyTorch", torch.__version__, "on", torch.cuda.get_device_name() if cuda else "a CPU")')"
    for one_size in $bench_sizes; do
      timeout 200 python -m tools.bench --device=$DEVICE --size=$one_size $bench \
        --methods=baseline,weight_decay,z_loss,soft_capping,mu_loss,mu_centering
    done
  } >$table.tmp && mv $table.tmp $table
  cat $table
}

mkdir -p out
failed=''
for part in ${*:-harm tests speed}; do
  $part || failed+=" $part"
  echo "$SECONDS s: $part has ended"
done
if [ -n "$failed" ]; then
  echo "failed:$failed" >&2
  exit 1
fi

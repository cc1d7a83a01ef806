#!/usr/bin/env bash
# device_check.sh [REPORT_DIR]: everything that only a GPU can say, in at most ten minutes.
# It needs torch with CUDA, triton 3.6 to 3.9 and this project installed; failures are kept, and the rest still runs.
set -uo pipefail
cd "$(dirname "$0")/../../.."
out=${1:-${OUT:-device-report}}
mkdir -p "$out"
export DEEPINFER_ACCELERATOR=nvidia TORCH_DEVICE_BACKEND_AUTOLOAD=0 TRITON_DEFAULT_FP_FUSION=1
unset DEEPINFER_NVIDIA_INTERPRET TRITON_INTERPRET
status=0
# part SECONDS NAME COMMAND...
part() {
  local limit=$1 name=$2
  shift 2
  echo "== $name"
  timeout "$limit" "$@" > "$out/$name.log" 2>&1 || {
    echo "== $name: status $?" | tee -a "$out/$name.log"
    status=1
  }
  tail -n 15 "$out/$name.log"
}
part 20 machine nvidia-smi
part 30 devices deepinfer devices
part 30 plan deepinfer plan
part 60 generate deepinfer generate "Why is the sky blue?" --temperature 0 --max-tokens 8
part 60 gpu-tests python -m pytest -q -m gpu backends/nvidia/tests
part 260 conformance deepinfer conformance run --driver nvidia --profile quick --report "$out/conformance" --jobs 2
part 60 throughput deepinfer bench throughput
part 40 latency deepinfer bench latency
exit "$status"

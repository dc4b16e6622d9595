#!/usr/bin/env bash
# Pack the binaries that `python -m benchmarks.kernels --peers` compares with: FlashMLA and DeepGEMM as the package
# vllm 0.26.0 holds them (for torch 2.11, CUDA 13). Nothing of it is committed: .peers is ignored by git.
#
#   pip download --no-deps -d DIR vllm==0.26.0 && unzip -q DIR/vllm-*.whl -d DIR
#   benchmarks/peers_pack.sh DIR/vllm [.peers]
#
# gives .peers/peers.tar.gz, about 3 MB. On the machine with the GPU:
#
#   mkdir -p /tmp/peers && tar -xzf .peers/peers.tar.gz -C /tmp/peers
#   python3 -m benchmarks.kernels --peers /tmp/peers
set -euo pipefail
source=${1:?folder vllm of the unpacked wheel}
mkdir -p "${2:-.peers}"
target=$(cd "${2:-.peers}" && pwd)
extension=_C.cpython-${PEERS_PYTHON:-312}-x86_64-linux-gnu.so # DeepGEMM for one version of Python
cd "$source"
ls -d _flashmla_C.abi3.so "third_party/deep_gemm/$extension" third_party/deep_gemm/include >/dev/null
find _flashmla_C.abi3.so third_party/deep_gemm -type f \
  \( ! -name '_C.cpython-*' -o -name "$extension" \) ! -path '*/__pycache__/*' -print0 |
  tar -czf "$target/peers.tar.gz" --null -T -
echo '*' >"$target/.gitignore" # also where the folder lies in another repository
ls -l "$target/peers.tar.gz"

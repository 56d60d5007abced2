#!/usr/bin/env bash
# Builds Horovod for the PyTorch that a Python environment holds, installs it there and tries it on two processes.
#
#     scripts/install_horovod.sh [PYTHON]     PYTHON: that environment's python (default: the active one, or python3)
#
#     HOROVOD_VARIANT=auto|cpu|nccl           auto (default) takes nccl where PyTorch sees a GPU and the toolkit's and
#                                             NCCL's headers work, else cpu (Gloo; it cannot reduce CUDA tensors).
#                                             nccl builds it on a login node without a GPU too, or says why it cannot
#     HOROVOD_SDIST=horovod-0.28.1.tar.gz     a source archive at hand, where the package index cannot be reached
#     TANDEM_CACHE=DIR                        where built wheels are kept (default ~/.cache/tandem)
#
# Needs Linux, Python <= 3.11, PyTorch, g++ and make. Takes minutes the first time, seconds once the wheel is built.
set -Eeuo pipefail

readonly version=0.28.1
readonly variant_wanted=${HOROVOD_VARIANT:-auto}

work=$(mktemp -d "${TMPDIR:-/tmp}/install_horovod.XXXXXX")
readonly work log=$work/log
trap 'rm -rf "$work"' EXIT

say() { echo "install_horovod: $*"; }

fail() {
    echo "install_horovod: error: $*" >&2
    exit 1
}
trap 'fail "line $LINENO of this script failed: $BASH_COMMAND"' ERR

# Runs a command silently; where it fails, shows the end of what it said and keeps the rest.
quietly() {
    local what=$1
    shift
    if ! "$@" >"$log" 2>&1; then
        local kept
        kept=$(mktemp "${TMPDIR:-/tmp}/install_horovod_log.XXXXXX")
        cp "$log" "$kept"
        tail -n 40 "$log" | cut -c 1-300 >&2
        fail "$what failed; the lines above are the end of its output, all of it is in $kept"
    fi
}

# The environment ------------------------------------------------------------------------------------------------------

find_python() {
    local wanted=${1:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}}
    wanted=${wanted:-python3}
    # Only made absolute: following the link of a virtual environment's python would lead out of it.
    python=$(command -v "$wanted") || fail "no such Python: $wanted. Give one: scripts/install_horovod.sh .venv/bin/python"
    [[ $python == /* ]] || python=$PWD/$python
}

check_environment() {
    [[ $(uname -s) == Linux ]] || fail "Horovod is built on Linux only, this is $(uname -s)"
    local release
    release=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>"$log") ||
        fail "$python does not run: $(head -n 1 "$log")"
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] > (3, 11))' ||
        fail "Horovod $version needs Python <= 3.11, $python is $release; make the environment with python3.11"
    local facts
    facts=$("$python" -c '
import torch
print(torch.__version__, torch.__path__[0], torch.cuda.is_available(), torch.version.cuda or "none", sep="\n")' 2>"$log") ||
        fail "$python cannot import torch; install PyTorch there first ($(tail -n 1 "$log"))"
    { read -r torch_version && read -r torch_folder && read -r sees_gpu && read -r torch_cuda; } <<<"$facts"
    python_tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    scripts_folder=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
    export PATH=$scripts_folder:$PATH
    # Installed here rather than with the wheel, because the build needs them too. Instant where they are present.
    quietly "installing what Horovod needs" "$python" -m pip install --disable-pip-version-check \
        "setuptools>=70.1" cloudpickle psutil pyyaml packaging "cffi>=1.4"
}

check_build_tools() {
    local tool
    for tool in g++ make; do
        command -v "$tool" >/dev/null || fail "building Horovod needs $tool; install it (Debian, Ubuntu: apt-get install g++ make)"
    done
    local found
    found=$(cmake --version 2>/dev/null | sed -n 's/^cmake version //p') || true
    if [[ -z $found || $(printf '%s\n' 3.18 "$found" | sort -V | head -n 1) != 3.18 ]]; then
        quietly "installing cmake" "$python" -m pip install --disable-pip-version-check cmake
        hash -r
    fi
}

# CUDA -----------------------------------------------------------------------------------------------------------------

# nvcc on the PATH may be a wrapper or a link far from its toolkit, so nvcc itself is asked where that is.
find_toolkit() {
    local nvcc folder
    for nvcc in "${CUDA_HOME:-}/bin/nvcc" "${CUDA_PATH:-}/bin/nvcc" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
        [[ -x $nvcc ]] || continue
        folder=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p') || continue
        folder=$(readlink -f "$folder") || continue
        [[ -x $folder/bin/nvcc && -e $folder/include/cuda_runtime.h ]] && toolkit=$folder && return
    done
    return 1
}

# PyTorch's own NCCL comes first: it is the one that is loaded in the process.
find_nccl() {
    local own folder library
    own=$("$python" -c 'import nvidia.nccl as nccl; print(list(nccl.__path__)[0])' 2>/dev/null) || own=
    for folder in "${HOROVOD_NCCL_HOME:-}" "$own" "$toolkit" /usr /usr/local; do
        [[ -n $folder && -e $folder/include/nccl.h ]] || continue
        for library in "$folder"/lib/libnccl.so* "$folder"/lib64/libnccl.so* "$folder"/lib/*-linux-gnu/libnccl.so*; do
            [[ -e $library ]] || continue
            # Wheels hold libnccl.so.2 alone; the linker wants a libnccl.so.
            mkdir -p "$work/nccl"
            ln -sf "$library" "$work/nccl/libnccl.so"
            nccl=$folder
            return
        done
    done
    return 1
}

# Compiles and links the headers that Horovod's CUDA sources include; says no more than whether that works.
try_cuda() {
    cat >"$work/probe.cc" <<'SOURCE'
#include <c10/cuda/CUDAStream.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <nccl.h>
int main() { ncclUniqueId id; int n; return ncclGetUniqueId(&id) + cudaGetDeviceCount(&n); }
SOURCE
    echo '__global__ void probe() {}' >"$work/probe.cu"
    "$toolkit/bin/nvcc" -std=c++17 -c "$work/probe.cu" -o "$work/probe.o" >"$log" 2>&1 &&
        g++ "-std=c++$cxx_standard" "-I$toolkit/include" "-I$nccl/include" "-I$torch_folder/include" "$work/probe.cc" \
            -o "$work/probe" "-L$work/nccl" -lnccl "-L$toolkit/lib64" "-L$toolkit/targets/$(uname -m)-linux/lib" -lcudart \
            "-L$torch_folder/lib" -lc10_cuda -lc10 -Wl,--unresolved-symbols=ignore-in-shared-libs >>"$log" 2>&1
}

# Sets `variant` and `reason`, the sentence that says why it is not nccl.
choose_variant() {
    variant=cpu reason=
    if [[ $variant_wanted == cpu ]]; then
        reason="HOROVOD_VARIANT=cpu"
    elif [[ $torch_cuda == none ]]; then
        reason="this PyTorch is built without CUDA"
    elif [[ $variant_wanted == auto && $sees_gpu == False ]]; then
        reason="no GPU here; HOROVOD_VARIANT=nccl builds for GPUs nonetheless"
    elif ! find_toolkit; then
        reason="no CUDA toolkit (nvcc and cuda_runtime.h) was found"
    elif [[ $("$toolkit/bin/nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p') != "${torch_cuda%%.*}" ]]; then
        reason="PyTorch is built for CUDA $torch_cuda and the toolkit in $toolkit is of another major version"
    elif ! find_nccl; then
        reason="NCCL's header or library was not found; HOROVOD_NCCL_HOME may name its folder"
    elif ! try_cuda; then
        reason="a small program with the toolkit in $toolkit and NCCL in $nccl does not compile: $(grep -m 1 -i error "$log" | cut -c 1-200)"
    else
        variant=nccl
    fi
    [[ $variant_wanted != nccl || $variant == nccl ]] || fail "HOROVOD_VARIANT=nccl was asked for, but $reason"
}

# The build ------------------------------------------------------------------------------------------------------------

unpack() {
    local archive=${HOROVOD_SDIST:-}
    if [[ -z $archive ]]; then
        # A plain `pip download` would run the archive's setup.py for its metadata, hence the build isolation is off.
        quietly "downloading Horovod $version (HOROVOD_SDIST=FILE takes an archive at hand)" \
            "$python" -m pip download --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: -d "$work" "horovod==$version"
        archive=$work/horovod-$version.tar.gz
    fi
    quietly "unpacking $archive" tar -xzf "$archive" -C "$work"
    source_folder=$work/horovod-$version
}

# Replaces in one file of the source and insists that something was replaced.
patch_source() {
    local file=$source_folder/$1
    sed -i.before "$2" "$file"
    ! cmp -s "$file" "$file.before" || fail "$1 of Horovod's source is not as expected; is this Horovod $version?"
}

adapt_source() {
    # Two files set C++14, and the second wins for the PyTorch extension.
    patch_source CMakeLists.txt "s/^set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD $cxx_standard)/"
    patch_source horovod/torch/CMakeLists.txt "s/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD $cxx_standard)/"
    if [[ $variant == nccl ]]; then
        patch_source horovod/common/ops/cuda/CMakeLists.txt "s/set(CMAKE_CUDA_STANDARD 11)/set(CMAKE_CUDA_STANDARD 17)/"
    else
        # An nvcc on the PATH, or a PyTorch with CUDA beside it, makes CMake look for the whole toolkit and stop where
        # that is not found. The CPU variant never looks.
        patch_source CMakeLists.txt '/^include(CheckLanguage)/,/^macro(ADD_CUDA)/{/^macro(ADD_CUDA)/!d}'
        patch_source cmake/Modules/FindPytorch.cmake 's/(torch.version.cuda is not None) and (CUDA_HOME is not None)/False/'
    fi
}

set_build_variables() {
    export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    export HOROVOD_WITH_GLOO=1 HOROVOD_CPU_OPERATIONS=GLOO HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_NVTX=1
    export CMAKE_POLICY_VERSION_MINIMUM=3.5                     # CMake 4 refuses what Gloo asks for (2.8) otherwise
    export CXXFLAGS="${CXXFLAGS:-} -include cstdint"            # Gloo relies on an include that GCC 13 no longer makes
    export MAKEFLAGS="-j$(nproc)"                               # and not those of a `make` that calls this script
    unset HOROVOD_GPU_OPERATIONS HOROVOD_GPU
    if [[ $variant == nccl ]]; then
        # PyTorch takes the folder above the first nvcc on the PATH for the toolkit and CMake finds its own: name it.
        export CUDA_HOME=$toolkit CUDAToolkit_ROOT=$toolkit HOROVOD_CUDA_HOME=$toolkit CUDACXX=$toolkit/bin/nvcc
        export PATH=$toolkit/bin:$PATH
        export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
        export HOROVOD_NCCL_INCLUDE=$nccl/include HOROVOD_NCCL_LIB=$work/nccl
    fi
}

# The newest wheel of the cache for this machine's processor, or nothing.
cached_wheel() { ls -t "$cache"/horovod-*_"$(uname -m)".whl 2>/dev/null | head -n 1 || true; }

build() {
    check_build_tools
    unpack
    adapt_source
    say "building Horovod $version ($variant) for PyTorch $torch_version; this takes a few minutes"
    (
        set_build_variables
        quietly "building Horovod" "$python" -m pip wheel --verbose --disable-pip-version-check --no-deps \
            --no-build-isolation --use-pep517 --wheel-dir "$work/wheels" "$source_folder"
    ) || exit 1
    mkdir -p "$cache"
    local built staged
    built=$(ls "$work"/wheels/horovod-*.whl)
    staged=$cache/.$$.$(basename "$built")
    cp "$built" "$staged"
    mv "$staged" "$cache/$(basename "$built")"
}

# Installation and check -----------------------------------------------------------------------------------------------

# Reinstalling what is already there would pull it from under a running job.
is_installed() {
    "$python" - "$1" <<'SOURCE'
import hashlib, importlib.metadata, json, pathlib, sys
try:
    origin = importlib.metadata.distribution("horovod").read_text("direct_url.json") or "{}"
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
wheel = hashlib.sha256(pathlib.Path(sys.argv[1]).read_bytes()).hexdigest()
sys.exit(json.loads(origin).get("archive_info", {}).get("hashes", {}).get("sha256") != wheel)
SOURCE
}

check() {
    cat >"$work/check.py" <<'SOURCE'
import horovod.torch as hvd
import torch

hvd.init()
devices = ["cpu"]
if hvd.nccl_built() and torch.cuda.device_count() >= 2:  # NCCL refuses two processes on one GPU
    devices.append(f"cuda:{hvd.local_rank()}")
for device in devices:
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0], device=device), op=hvd.Sum)
    assert hvd.size() == 2 and total.item() == 3.0, (device, hvd.size(), total)
SOURCE
    quietly "a sum over two processes (horovodrun -np 2)" \
        timeout 300 "$scripts_folder/horovodrun" -np 2 "$python" "$work/check.py"
}

main() {
    [[ $# -le 1 ]] || fail "one argument at most, the Python to install for; got: $*"
    [[ $variant_wanted =~ ^(auto|cpu|nccl)$ ]] || fail "HOROVOD_VARIANT=$variant_wanted: give auto, cpu or nccl"
    [[ -z ${HOROVOD_SDIST:-} || -f $HOROVOD_SDIST ]] || fail "HOROVOD_SDIST=$HOROVOD_SDIST: no such file"
    find_python "$@"
    check_environment
    # PyTorch's own header says which standard it insists on: C++17 up to 2.13, C++20 since.
    if grep -q 202002L "$torch_folder/include/torch/csrc/api/include/torch/all.h"; then
        cxx_standard=20
    else
        cxx_standard=17
    fi
    choose_variant
    cache=${TANDEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tandem}/horovod/$python_tag-$torch_version-$variant
    [[ -n $(cached_wheel) ]] || build
    local wheel
    wheel=$(cached_wheel)
    is_installed "$wheel" ||
        quietly "installing $wheel" "$python" -m pip install --disable-pip-version-check --force-reinstall --no-deps "$wheel"
    check
    say "Horovod $version ($variant${reason:+: $reason}) works with PyTorch $torch_version in ${scripts_folder%/bin}"
}

main "$@"

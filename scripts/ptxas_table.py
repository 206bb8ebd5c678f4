#!/usr/bin/env python3
"""Makes a table of the CUDA kernels from what nvcc -Xptxas -v says of them: registers, shared memory, spills, and the
occupancy to expect.

    ptxas_table.py                          compiles train_xmod.cu for sm_80 and sm_90 (minutes)
    ptxas_table.py --from 80.txt 90.txt     from nvcc's output, saved before
    ptxas_table.py --all                    every instance, not only the hot kernels of the 556M backbone in bf16

Ends with status 1 when a kernel spills registers to memory."""

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ["-std=c++20", "-O3", "-Xcompiler", "-fopenmp", "-Xptxas", "-v", "-I.", "-c", "train_xmod.cu", "-o", "/dev/null"]


@dataclass
class Processor:
    """Of one multiprocessor."""
    shared: int  # bytes for all blocks
    warps: int = 64
    blocks: int = 32
    registers: int = 65536


PROCESSORS = {"80": Processor(164 << 10), "90": Processor(228 << 10)}
SHARED_OF_SYSTEM = 1 << 10  # bytes a block
REGISTERS_AT_A_TIME = 256  # a warp's are handed out in multiples of these

# How the passes launch the hot kernels for the 556M backbone (dim 1024, heads of 128) in bf16: a part of the kernel's
# name, threads of a block, bytes of dynamic shared memory. Sums over rows take a row of floats for each warp and set
# of sums (launch_row_sums in xmod/cuda_sums.h); attention and experts take tiles (*Tiling in xmod/cuda_attention_*.h and
# cuda_expert_matmul.h).
KIB = 1 << 10
HOT = [
    ("forward_kernel<__nv_bfloat16, 64, WholeRows<64>>", 128, 48 * KIB),
    ("forward_kernel<__nv_bfloat16, 128, WholeRows<128>>", 128, 96 * KIB),
    ("query_gradient_kernel<__nv_bfloat16, 64, WholeRows<64>>", 128, 66 * KIB),
    ("query_gradient_kernel<__nv_bfloat16, 128, WholeRows<128>>", 128, 98 * KIB),
    ("key_gradient_kernel<__nv_bfloat16, 64, WholeRows<64>>", 128, 66 * KIB),
    ("key_gradient_kernel<__nv_bfloat16, 128, WholeRows<128>>", 128, 98 * KIB),
    ("rmsnorm_forward_kernel<8, __nv_bfloat16, GatheredRows>", 256, 0),
    ("rmsnorm_forward_kernel<8, __nv_bfloat16, ResidualRows>", 256, 0),
    ("row_sums_kernel<RmsnormBackward<8, __nv_bfloat16, AddedGradient>>", 256, 32 * KIB),
    ("row_sums_kernel<RmsnormBackward<8, __nv_bfloat16, ResidualGradient<__nv_bfloat16>>>", 256, 32 * KIB),
    ("qk_norm_rope_forward_kernel<4, 16, __nv_bfloat16>", 256, 0),
    ("row_sums_kernel<QkNormRopeBackward<4, 16, __nv_bfloat16>>", 256, 16 * KIB),
    ("swiglu_forward_kernel<8, __nv_bfloat16>", 256, 0),
    ("swiglu_backward_kernel<8, __nv_bfloat16>", 256, 0),
    ("router_forward_kernel<8>", 256, 0),
    ("select_topk_kernel", 1024, 0),
    ("gated_scatter_forward_kernel<8>", 256, 0),
    ("row_sums_kernel<GatedScatterBackward<8, __nv_bfloat16>>", 256, 32),
    ("row_sums_kernel<RouterBackward<8>>", 256, 32 * KIB),
    ("scatter_add_kernel<8, float>", 256, 0),
    ("crossentropy_kernel<8, true, __nv_bfloat16>", 1024, 0),
    ("gather_kernel<8, float, float>", 256, 0),
    ("token_order_kernel", 256, 0),
    ("encoder_backward_kernel<8>", 256, 0),
    ("convert_kernel<8, __nv_bfloat16, float>", 256, 0),
    ("tensor_sum_kernel<Square>", 256, 0),
    ("adamw_kernel", 256, 0),
    ("muon_momentum_kernel", 256, 0),
    ("muon_normalise_kernel<__nv_bfloat16>", 256, 0),
    ("muon_polynomial_kernel<__nv_bfloat16>", 256, 0),
    ("muon_update_kernel<__nv_bfloat16>", 256, 0),
    ("rows_kernel<__nv_bfloat16, false>", 128, 24 * KIB),
    ("rows_kernel<__nv_bfloat16, true>", 128, 24 * KIB),
    ("weights_kernel<__nv_bfloat16>", 128, 24 * KIB),
    ("moe_route_forward_kernel", 256, 0),
    ("expert_weight_forward_kernel<8, __nv_bfloat16>", 256, 0),
    ("expert_weight_backward_kernel<8, __nv_bfloat16>", 256, 0),
    ("sum_pairs_add_kernel<8, float, __nv_bfloat16>", 256, 0),
]


@dataclass
class Kernel:
    """As compiled for one architecture."""
    registers: int = 0
    shared: int = 0  # bytes, static
    stack: int = 0  # bytes of a frame in memory
    spills: int = 0  # bytes stored and loaded


def parse(text):
    """{mangled name: {architecture: Kernel}} from nvcc's output for one or several architectures."""
    kernels, kernel = {}, None
    for line in text.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'", line):
            kernel = kernels.setdefault(entry[1], {}).setdefault(entry[2], Kernel())
        elif kernel and (frame := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)):
            kernel.stack, kernel.spills = int(frame[1]), int(frame[2]) + int(frame[3])
        elif kernel and (used := re.search(r"Used (\d+) registers", line)):
            kernel.registers = int(used[1])
            shared = re.search(r"(\d+) bytes smem", line)
            kernel.shared = int(shared[1]) if shared else 0
            kernel = None
    return kernels


def readable(names):
    """What the kernels are called in the source, without namespaces, parameters and casts."""
    run = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    result = {}
    for name, text in zip(names, run.stdout.splitlines()):
        text = text.removeprefix("void ").replace("(bool)1", "true").replace("(bool)0", "false")
        text = re.sub(r"\((int|long)\)", "", re.sub(r"\b(xmod|cuda_attention|cuda_experts)::", "", text)).replace("> >", ">>").replace("> >", ">>")
        depth = 0
        for i, c in enumerate(text):  # parameters begin at the first bracket outside of the template's arguments
            depth += (c == "<") - (c == ">")
            if c == "(" and depth == 0:
                text = text[:i]
                break
        result[name] = text
    return result


def occupancy(kernel, arch, threads, dynamic):
    """Blocks of a multiprocessor, and its share of the warps that it could hold."""
    sm = PROCESSORS[arch]
    warps = (threads + 31) // 32
    of_warp = -(-kernel.registers * 32 // REGISTERS_AT_A_TIME) * REGISTERS_AT_A_TIME
    blocks = min(sm.blocks, sm.warps // warps, sm.registers // (of_warp * warps),
                 sm.shared // (kernel.shared + dynamic + SHARED_OF_SYSTEM))
    return blocks, blocks * warps / sm.warps


def show_bytes(count):
    return f"{count // KIB} KiB" if count and count % KIB == 0 else f"{count} B" if count else ""


def pair(values):
    """One value where all are alike."""
    return str(values[0]) if len(set(values)) == 1 else " / ".join(map(str, values))


def hot_table(kernels, archs):
    by_name = {name: kernel for kernel, name in zip(kernels.values(), readable(list(kernels)).values())}
    lines = [f"| kernel | threads | registers, {' / '.join('sm_' + a for a in archs)} | spills | shared memory, static + dynamic | "
             "blocks an SM | occupancy |", "|---|---:|---:|---:|---:|---:|---:|"]
    for name, threads, dynamic in HOT:
        if name not in by_name:
            sys.exit(f"ptxas_table.py: no kernel {name} in nvcc's output: mend the list HOT")
        of = [by_name[name][arch] for arch in archs]
        seats = [occupancy(kernel, arch, threads, dynamic) for kernel, arch in zip(of, archs)]
        shared = " + ".join(filter(None, (show_bytes(of[0].shared), show_bytes(dynamic))))
        lines.append(f"| `{name}` | {threads} | {pair([k.registers for k in of])} | {pair([k.spills for k in of])} | {shared} | "
                     f"{pair([blocks for blocks, _ in seats])} | {pair([f'{share:.0%}' for _, share in seats])} |")
    return lines


def full_table(kernels, archs):
    names = readable(list(kernels))
    lines = [f"| kernel | registers, {' / '.join('sm_' + a for a in archs)} | stack, B | spills, B | static shared memory |",
             "|---|---:|---:|---:|---:|"]
    for mangled in sorted(kernels, key=names.get):
        of = [kernels[mangled][arch] for arch in archs]
        lines.append(f"| `{names[mangled]}` | {pair([k.registers for k in of])} | {pair([k.stack for k in of])} | "
                     f"{pair([k.spills for k in of])} | {show_bytes(of[0].shared)} |")
    return lines


def compile_with(nvcc, archs):
    texts = []
    for arch in archs:
        print(f"compiling train_xmod.cu for sm_{arch}", file=sys.stderr)
        run = subprocess.run([nvcc, f"-arch=sm_{arch}", *COMMAND], cwd=ROOT, capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"ptxas_table.py: nvcc failed:\n{run.stderr}")
        texts.append(run.stdout + run.stderr)
    return "\n".join(texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="files", nargs="+", metavar="FILE", help="nvcc's output")
    parser.add_argument("--arch", nargs="+", default=["80", "90"], choices=sorted(PROCESSORS), help="default: 80 90")
    parser.add_argument("--nvcc", default=shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", help="default: the one in PATH")
    parser.add_argument("--all", action="store_true", help="every instance")
    options = parser.parse_args()
    try:
        text = "\n".join(Path(f).read_text() for f in options.files) if options.files else compile_with(options.nvcc, options.arch)
    except OSError as error:
        sys.exit(f"ptxas_table.py: {error.strerror}: {error.filename}")
    kernels = parse(text)
    archs = [a for a in options.arch if any(a in of for of in kernels.values())]
    if not archs:
        sys.exit("ptxas_table.py: no kernel of these architectures in nvcc's output: is it of -Xptxas -v?")
    kernels = {name: of for name, of in kernels.items() if all(a in of for a in archs)}
    print("\n".join(full_table(kernels, archs) if options.all else hot_table(kernels, archs)))
    spilling = [name for name, of in kernels.items() if any(of[a].spills for a in archs)]
    names = readable(spilling) if spilling else {}
    print(f"\n{len(kernels)} kernels, {len(spilling)} of them with spills" + "".join(f"\n- `{names[n]}`" for n in spilling))
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())

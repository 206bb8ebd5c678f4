"""scripts/ptxas_table.py on what nvcc says, with and without spills."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "ptxas_table.py"
sys.path.insert(0, str(ROOT / "scripts"))

import ptxas_table  # noqa: E402


def said(name, arch, registers, spills=0, shared=""):
    return f"""ptxas info    : Compiling entry function '{name}' for 'sm_{arch}'
ptxas info    : Function properties for {name}
    {spills} bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers{shared}, 400 bytes cmem[0]
ptxas info    : Compile time = 3.1 ms
"""


# void xmod::crossentropy_kernel<8, true, __nv_bfloat16>(...), void xmod::router_forward_kernel<8>(float*, long)
LOSS = "_ZN4xmod19crossentropy_kernelILi8ELb1E13__nv_bfloat16EEvPfPT1_PKifl"
ROUTER = "_ZN4xmod21router_forward_kernelILi8EEEvPfl"


class PtxasTable(unittest.TestCase):
    def run_script(self, text, *arguments):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("some other line\n" + text)
            file.flush()
            return subprocess.run([sys.executable, SCRIPT, *arguments, "--from", file.name], capture_output=True, text=True)

    def test_every_instance(self):
        text = said(LOSS, 80, 40, shared=", 264 bytes smem") + said(ROUTER, 80, 33) + said(LOSS, 90, 38, shared=", 264 bytes smem") + \
            said(ROUTER, 90, 33)
        done = self.run_script(text, "--all")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("| `crossentropy_kernel<8, true, __nv_bfloat16>` | 40 / 38 | 0 | 0 | 264 B |", done.stdout)
        self.assertIn("| `router_forward_kernel<8>` | 33 | 0 | 0 |  |", done.stdout)
        self.assertIn("2 kernels, 0 of them with spills", done.stdout)

    def test_spills_fail(self):
        done = self.run_script(said(LOSS, 90, 255, 24) + said(ROUTER, 90, 33), "--all")
        self.assertEqual(done.returncode, 1)
        self.assertIn("2 kernels, 1 of them with spills\n- `crossentropy_kernel<8, true, __nv_bfloat16>`", done.stdout)

    def test_hot_kernels_have_to_be_there(self):
        done = self.run_script(said(ROUTER, 90, 33))
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"\Aptxas_table.py: no kernel forward_kernel<.*mend the list HOT\n\Z")

    def test_occupancy(self):
        def seats(registers, arch, threads, dynamic, shared=0):
            return ptxas_table.occupancy(ptxas_table.Kernel(registers=registers, shared=shared), arch, threads, dynamic)

        self.assertEqual(seats(32, "90", 256, 0), (8, 1.0))  # all 64 warps
        self.assertEqual(seats(33, "90", 256, 0), (6, 0.75))  # 40 registers are handed out: 48 warps
        self.assertEqual(seats(255, "90", 128, 96 << 10), (2, 0.125))  # registers for 2 blocks of 4 warps
        self.assertEqual(seats(247, "80", 128, 96 << 10), (1, 0.0625))  # 164 KiB of shared memory
        self.assertEqual(seats(32, "90", 1024, 0, 264), (2, 1.0))
        self.assertEqual(seats(16, "90", 32, 0), (32, 0.5))  # 32 blocks at most

    def test_not_ptxas_output(self):
        done = self.run_script("nothing")
        self.assertEqual(done.returncode, 1)
        self.assertIn("is it of -Xptxas -v?", done.stderr)
        done = subprocess.run([sys.executable, SCRIPT, "--from", "/nowhere/80.txt"], capture_output=True, text=True)
        self.assertEqual(done.stderr, "ptxas_table.py: No such file or directory: /nowhere/80.txt\n")


if __name__ == "__main__":
    unittest.main()

"""What tests of several ranks share."""

import os
import shutil
import subprocess
import unittest

from test_training import BINARY, MODEL, TrainingTest

# Any mpirun may have more processes than there are processors, as root too (Open MPI asks for that). Processes that wait
# give way to others.
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
               "OMPI_MCA_mpi_yield_when_idle": "1", "OMP_WAIT_POLICY": "passive"}


def why_not():
    """Why several ranks cannot run here, or None."""
    if shutil.which("mpirun") is None:
        return "no mpirun here (scripts/install_deps.sh mpi)"
    if b"MPI_Init_thread" not in BINARY.read_bytes():
        return f"{BINARY.name} is built without MPI"
    return None


EMULATED = BINARY.parent / "build" / "emulated_train"  # train_xmodcu with its kernels on the CPU


class RanksTest(TrainingTest):
    binary = BINARY

    @classmethod
    def setUpClass(cls):
        if reason := why_not():
            print(f"skip several ranks: {reason}")
            raise unittest.SkipTest(reason)

    def arguments(self, ranks=2, **changes):
        """A step has 24 sequences whatever the ranks."""
        tokens = 24 * MODEL["seq_len"]
        return super().arguments(**{"batch_size": 24 // ranks // 2, "total_batch_tokens": tokens, **changes})

    def start_ranks(self, *commands, **options):
        """One list of arguments a rank: they may differ."""
        words = []
        for command in commands:
            words += [":"] * bool(words) + ["-np", "1", *map(str, command)]
        return subprocess.Popen(["mpirun", *words], cwd=self.folder, env={**os.environ, **ENVIRONMENT},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)

    def start_alike(self, ranks, **changes):
        return self.start_ranks(*[[self.binary, *self.arguments(ranks, **changes)]] * ranks)

    def finish_alike(self, ranks, **changes):
        """The log."""
        process = self.start_alike(ranks, **changes)
        out, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, err)
        return out

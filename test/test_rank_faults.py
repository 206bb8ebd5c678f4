"""Several ranks of ./train_xmod when something goes wrong on one of them: it is killed, its data is missing, other data
or goes away, its disk is full. Each time all end soon, with a message and an exit status, the last checkpoint is whole,
and the run goes on with another number of ranks. test/two_hosts.sh does more of that between two hosts."""

import os
import shutil
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

from ranks import RanksTest, why_not
from test_training import BINARY, MOE, read_metrics

SECONDS = 10  # until the last process is gone, from the fault on

RANK = [b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK="]


class FaultsTest(RanksTest):
    def processes(self):
        """rank -> process id, of the ranks that run in this test's folder."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or (entry / "exe").resolve() != BINARY or \
                        (entry / "cwd").resolve() != self.folder.resolve():
                    continue
                for variable in (entry / "environ").read_bytes().split(b"\0"):
                    for name in RANK:
                        if variable.startswith(name):
                            found[int(variable[len(name):])] = int(entry.name)
            except OSError:
                continue  # it has just ended, or is another user's
        return found

    def wait_for_step(self, process, step, out="out"):
        path, deadline = self.folder / out / "metrics.csv", time.time() + 60
        while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") > step):
            self.assertLess(time.time(), deadline, "no progress")
            time.sleep(0.01)

    def expect_end(self, process, parts, since):
        """All ranks end in time, with a message and a status that tells."""
        try:
            _, err = process.communicate(timeout=max(0.1, since + SECONDS - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            for pid in self.processes().values():
                os.kill(pid, signal.SIGKILL)
            self.fail(f"still there after {SECONDS} seconds")
        self.assertNotEqual(process.returncode, 0)
        for part in [parts] if isinstance(parts, str) else parts:
            self.assertIn(part, err)
        while self.processes():
            self.assertLess(time.time(), since + SECONDS, f"left behind: {self.processes()}")
            time.sleep(0.05)
        return err

    def last_checkpoint(self, out="out"):
        return max((self.folder / out).glob("step_????????"))

    def expect_whole(self, checkpoint):
        """It loads, and its loss can be computed."""
        self.succeed("eval", "--checkpoint", checkpoint, "--val-data", self.folder / "val_0.bin")

    def expect_to_go_on(self, ranks, **changes):
        """From the last checkpoint to the end, and every step stands in metrics.csv once."""
        checkpoint = self.last_checkpoint()
        self.expect_whole(checkpoint)
        steps = int(checkpoint.name[5:]) + 10
        log = self.finish_alike(ranks, resume=True, **{**changes, "steps": steps})
        self.assertIn(f"resuming from {checkpoint.relative_to(checkpoint.parent.parent)}", log.replace(f"{self.folder}/", ""))
        self.assertEqual([int(row["step"]) for row in read_metrics(self.folder / "out")], list(range(1, steps + 1)))
        self.expect_whole(self.folder / "out" / f"step_{steps:08d}")


class KilledRankTest(FaultsTest):
    # A constant rate, so that the number of steps to come changes nothing.
    LONG = {"steps": 1000000, "eval_interval": 0, "lr_schedule": "constant", "warmup_steps": 0}

    def kill_and_go_on(self, ranks, victim, then, **changes):
        changes = {**self.LONG, **changes}
        process = self.start_alike(ranks, **changes)
        self.wait_for_step(process, 10)
        self.assertEqual(sorted(self.processes()), list(range(ranks)))
        os.kill(self.processes()[victim], signal.SIGKILL)
        self.expect_end(process, [f"rank {victim}", "signal 9"], time.time())
        self.expect_to_go_on(then, **changes)

    def test_another_than_the_first(self):
        self.kill_and_go_on(3, 1, then=2)

    def test_the_first(self):
        self.kill_and_go_on(2, 0, then=3)

    def test_with_shared_optimizer_state(self):
        self.kill_and_go_on(3, 2, then=1, zero=1)

    def test_the_last_of_four_with_experts(self):
        self.kill_and_go_on(4, 3, then=2, zero=1, **MOE)

    def test_at_random_moments(self):
        """Also while a checkpoint is gathered and written, every other step."""
        changes = {**self.LONG, "zero": 1, "checkpoint_interval": 2}
        for attempt in range(4):
            with self.subTest(attempt=attempt):
                process = self.start_alike(2, resume=True if attempt else None, **changes)
                done = len(read_metrics(self.folder / "out")) if attempt else 0
                self.wait_for_step(process, done + 3)
                time.sleep(0.013 * attempt)
                os.kill(self.processes()[attempt % 2], signal.SIGKILL)
                self.expect_end(process, "signal 9", time.time())
                self.expect_whole(self.last_checkpoint())
        self.expect_to_go_on(3, **changes)

    def test_the_launcher(self):
        process = self.start_alike(2, **self.LONG)
        self.wait_for_step(process, 5)
        process.kill()
        since = time.time()
        process.communicate()
        while self.processes():
            self.assertLess(time.time(), since + SECONDS, f"left behind: {self.processes()}")
            time.sleep(0.05)
        self.expect_to_go_on(2, **self.LONG)


class DataTest(FaultsTest):
    def copy_of_data(self):
        other = self.folder / "other_disk"
        other.mkdir()
        for path in self.folder.glob("*.bin"):
            shutil.copy(path, other)
        return other

    def start_with_own_data(self, data, **changes):
        """Rank 1 of two has its own."""
        own = {**changes, "train_data": data / "train_*.bin", "val_data": data / "val_0.bin"}
        return self.start_ranks([BINARY, *self.arguments(2, **changes)], [BINARY, *self.arguments(2, **own)])

    def expect_refusal(self, data, parts):
        since = time.time()
        self.expect_end(self.start_with_own_data(data), parts, since)
        self.assertFalse((self.folder / "out" / "metrics.csv").exists(), "nobody trained")

    def test_a_copy_is_as_good(self):
        process = self.start_with_own_data(self.copy_of_data(), steps=3)
        _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, err)

    def test_missing_from_the_start(self):
        self.expect_refusal(self.folder / "nowhere", ["rank 1", "--train-data", "nowhere"])

    def test_one_shard_less(self):
        data = self.copy_of_data()
        (data / "train_1.bin").unlink()
        self.expect_refusal(data, ["--train-data", "rank 1 has", "rank 0 has"])

    def test_one_other_token(self):
        data = self.copy_of_data()
        content = bytearray((data / "train_2.bin").read_bytes())
        content[1024 + 2 * 100] ^= 1
        (data / "train_2.bin").write_bytes(content)
        self.expect_refusal(data, ["--train-data", "rank 1 has", "rank 0 has"])

    def test_other_validation_data(self):
        data = self.copy_of_data()
        content = bytearray((data / "val_0.bin").read_bytes())
        content[1024] ^= 1
        (data / "val_0.bin").write_bytes(content)
        self.expect_refusal(data, ["--val-data", "rank 1 has", "rank 0 has"])

    def test_damaged(self):
        data = self.copy_of_data()
        (data / "train_0.bin").write_bytes((data / "train_0.bin").read_bytes()[:-2])
        self.expect_refusal(data, ["rank 1", "train_0.bin"])

    def test_other_flags(self):
        for flag, value in (("--lr", "0.01"), ("--dim", "24"), ("--precision", "bf16")):
            with self.subTest(flag=flag):
                since = time.time()
                first = [BINARY, *self.arguments(2), "--instructions", "portable"]  # which can bf16 anywhere
                process = self.start_ranks(first, [*first, flag, value])
                self.expect_end(process, [f"{flag}: rank 1 has {value}", "rank 0 has"], since)
                self.assertFalse((self.folder / "out" / "metrics.csv").exists(), "nobody trained")

    def test_gone_in_the_middle_of_training(self):
        for gone in range(2):
            with self.subTest(rank=gone):
                shutil.rmtree(self.folder / "out", ignore_errors=True)
                shutil.rmtree(self.folder / "other_disk", ignore_errors=True)
                data = self.copy_of_data()
                commands = [[BINARY, *self.arguments(2, **KilledRankTest.LONG)] for _ in range(2)]
                commands[gone] = [BINARY, *self.arguments(2, **KilledRankTest.LONG, train_data=data / "train_*.bin")]
                process = self.start_ranks(*commands)
                self.wait_for_step(process, 5)
                since = time.time()
                for path in data.glob("train_*"):
                    path.unlink(missing_ok=True)
                self.expect_end(process, "other_disk/train_", since)
                self.expect_to_go_on(3, **KilledRankTest.LONG)


class DiskTest(FaultsTest):
    """The first rank alone writes, so its disk is the one that matters."""
    RUN = {"steps": 1000000, "eval_interval": 0, "lr_schedule": "constant", "warmup_steps": 0, "keep_checkpoints": 1,
           "zero": 1}

    def test_file_size_limit_on_one(self):
        # Of 512 bytes each: one checkpoint file is larger.
        limited = ["sh", "-c", 'ulimit -f 60; exec "$@"', "sh", BINARY, *self.arguments(2, **self.RUN, resume=True)]
        self.finish_alike(2, **{**self.RUN, "steps": 6})
        since = time.time()
        err = self.expect_end(self.start_ranks(limited, [BINARY, *self.arguments(2, **self.RUN, resume=True)]),
                              ["cannot write", "step_00000009", "file size limit"], since)
        self.assertNotIn("rank 1 on", err, "one message is enough")
        self.assertEqual(self.last_checkpoint().name, "step_00000006")
        self.expect_to_go_on(3, **self.RUN)

    def test_full_disk(self):
        out = self.mount_small_disk()
        self.finish_alike(2, **{**self.RUN, "steps": 6})
        filler = self.fill_disk(out)
        since = time.time()
        self.expect_end(self.start_alike(2, **self.RUN, resume=True), ["cannot write", "No space left"], since)
        filler.unlink()
        self.assertEqual(self.last_checkpoint().name, "step_00000006")
        self.expect_to_go_on(3, **self.RUN)


class TwoHostsTest(unittest.TestCase):
    def test_two_hosts(self):
        if reason := why_not():
            self.skipTest(reason)
        script = Path(__file__).parent / "two_hosts.sh"
        run = subprocess.run([script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
        if run.returncode == 77:
            print(run.stdout.strip())
            self.skipTest(run.stdout.strip())
        self.assertEqual(run.returncode, 0, run.stdout)


if __name__ == "__main__":
    sys.exit(unittest.main())

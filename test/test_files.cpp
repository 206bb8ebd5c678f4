// Files and checkpoints are whole or not there: on a full disk, past the file size limit, and when the
// process is killed at any moment.
#include "xmod/files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "expect_error.h"

#include "xmod/error.h"

namespace xmod {
namespace {

using Names = std::vector<std::string>;

class Files : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "xmod_files_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  void put(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    std::ofstream(path(name)) << text;
  }

  std::string folder_;
};

// A child process and what became of it.
struct Outcome {
  int status;  // as waitpid reports it
  std::string message;
};

// Runs `action` in a process of its own, as main() would: an Error is printed and becomes the exit status.
Outcome run_in_child(const std::function<void()>& action, const std::function<void(pid_t)>& meanwhile = {}) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      action();
    } catch (const Error& error) {
      const std::string message = error.what();
      if (::write(ends[1], message.data(), message.size()) < 0) ::_exit(99);
      ::_exit(error.exit_code);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  if (meanwhile) meanwhile(child);
  Outcome outcome{0, ""};
  char buffer[4096];
  for (ssize_t n; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;) outcome.message.append(buffer, n);
  ::close(ends[0]);
  EXPECT_EQ(::waitpid(child, &outcome.status, 0), child);
  return outcome;
}

void limit_file_size(rlim_t bytes) {
  ::signal(SIGXFSZ, SIG_IGN);  // so that write() returns EFBIG
  const rlimit limit{bytes, bytes};
  if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(98);
}

// ----------------------------------------------------------------------------
// reading and writing

TEST_F(Files, RoundTrip) {
  const std::string bytes = std::string("a\0b\n", 4) + std::string(3 << 20, 'x');
  write_file_atomically(path("f"), bytes);
  EXPECT_EQ(read_file(path("f")), bytes);
  write_file_atomically(path("f"), "");
  EXPECT_EQ(read_file(path("f")), "");
  EXPECT_EQ(directory_entries(folder_), Names{"f"});
}

TEST_F(Files, ReadRefusesWhatIsNotAReasonableFile) {
  put("big", "12345");
  EXPECT_EQ(read_file(path("big"), 5), "12345");
  expect_error([&] { read_file(path("big"), 4); }, {path("big"), "5 bytes", "at most 4"});
  expect_error([&] { read_file(path("missing")); }, {path("missing"), "No such file", "check the path"});
  expect_error([&] { read_file(folder_); }, {folder_, "a directory"});
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  expect_error([&] { read_file(path("pipe")); }, {path("pipe"), "not a regular file"});
}

TEST_F(Files, ReadPastTheEndIsAnError) {
  put("short", "12345");
  const FileDescriptor file = open_for_reading(path("short"));
  char buffer[4];
  read_fully_at(file, buffer, 4, 1, path("short"));
  EXPECT_EQ(std::string(buffer, 4), "2345");
  expect_error([&] { read_fully_at(file, buffer, 4, 3, path("short")); },
               {path("short"), "ends at byte 5", "2 bytes"});
}

TEST_F(Files, OffsetsBeyond4GiB) {
  put("sparse", "");
  const int64_t size = (int64_t{5} << 30) + 3;
  std::filesystem::resize_file(path("sparse"), size);
  std::ofstream(path("sparse"), std::ios::in | std::ios::out).seekp(size - 3) << "end";
  const FileDescriptor file = open_for_reading(path("sparse"));
  EXPECT_EQ(file_size(file, path("sparse")), size);
  char buffer[3];
  read_fully_at(file, buffer, 3, size - 3, path("sparse"));
  EXPECT_EQ(std::string(buffer, 3), "end");
}

TEST_F(Files, WriteToAFullDevice) {
  if (::access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full on this system";
  const FileDescriptor full = open_file("/dev/full", O_WRONLY, "write");
  expect_error([&] { write_fully(full, "text", 4, "/dev/full"); },
               {"cannot write /dev/full", "No space left", "free space"});
}

TEST_F(Files, AtomicFileLeavesTheOldOneUntilCommitted) {
  put("f", "old");
  {
    AtomicFile file(path("f"));
    file.write("new", 3);
    EXPECT_EQ(read_file(path("f")), "old");
  }
  EXPECT_EQ(read_file(path("f")), "old");
  EXPECT_EQ(directory_entries(folder_), Names{"f"});
}

TEST_F(Files, AtomicFileTakesOverAStaleTemporary) {
  put("f.tmp", "left by a killed run, and longer than what follows");
  write_file_atomically(path("f"), "new");
  EXPECT_EQ(read_file(path("f")), "new");
  EXPECT_EQ(directory_entries(folder_), Names{"f"});
}

TEST_F(Files, AtomicFileReplacesRegularFilesOnly) {
  std::filesystem::create_directory(path("d"));
  expect_error([&] { write_file_atomically(path("d"), "x"); }, {path("d"), "not a regular file"});
  std::filesystem::create_symlink("/dev/null", path("link"));
  expect_error([&] { write_file_atomically(path("link"), "x"); }, {path("link"), "not a regular file"});
  expect_error([&] { write_file_atomically(path("missing/f"), "x"); }, {path("missing/f"), "check the path"});
}

TEST_F(Files, FileSizeLimitKeepsTheOldFile) {
  put("f", "old");
  const Outcome outcome = run_in_child([&] {
    limit_file_size(64 << 10);
    write_file_atomically(path("f"), std::string(1 << 20, 'x'));
  });
  ASSERT_TRUE(WIFEXITED(outcome.status));
  EXPECT_EQ(WEXITSTATUS(outcome.status), 1);
  EXPECT_NE(outcome.message.find("File too large; raise the file size limit"), std::string::npos)
      << outcome.message;
  EXPECT_EQ(read_file(path("f")), "old");
  EXPECT_EQ(directory_entries(folder_), Names{"f"});
}

// ----------------------------------------------------------------------------
// directories that appear whole

TEST_F(Files, TransactionAppearsAtCommit) {
  DirectoryTransaction transaction(path("out/step_00000001/"));
  EXPECT_EQ(transaction.directory(), path("out/step_00000001"));
  write_file_atomically(transaction.file("a"), "one");
  std::ofstream(transaction.file("b")) << "two";
  EXPECT_FALSE(path_exists(path("out/step_00000001")));
  transaction.commit();
  EXPECT_EQ(directory_entries(path("out")), Names{"step_00000001"});
  EXPECT_EQ(directory_entries(path("out/step_00000001")), (Names{"a", "b"}));
  EXPECT_EQ(read_file(path("out/step_00000001/b")), "two");
}

TEST_F(Files, AbandonedTransactionLeavesNothing) {
  put("out/step_00000001/a", "old");
  {
    DirectoryTransaction transaction(path("out/step_00000001"));
    write_file_atomically(transaction.file("a"), "new");
  }
  EXPECT_EQ(directory_entries(path("out")), Names{"step_00000001"});
  EXPECT_EQ(read_file(path("out/step_00000001/a")), "old");
}

TEST_F(Files, TransactionReplacesADirectoryAndDropsStaleFiles) {
  put("d/old", "1");
  put("d.tmp/stale", "2");
  DirectoryTransaction transaction(path("d"));
  write_file_atomically(transaction.file("new"), "3");
  transaction.commit();
  EXPECT_EQ(directory_entries(folder_), Names{"d"});
  EXPECT_EQ(directory_entries(path("d")), Names{"new"});
}

TEST_F(Files, TransactionDoesNotReplaceAFile) {
  put("d", "text");
  expect_error([&] { DirectoryTransaction transaction(path("d")); }, {path("d"), "a file of that name"});
  expect_error([&] { DirectoryTransaction transaction(path("d/step_00000001")); }, {path("d/step_00000001")});
  EXPECT_EQ(read_file(path("d")), "text");
}

TEST_F(Files, FileSizeLimitKeepsThePreviousCheckpoint) {
  put("out/step_00000001/model", "old");
  const Outcome outcome = run_in_child([&] {
    limit_file_size(64 << 10);
    DirectoryTransaction transaction(path("out/step_00000002"));
    write_file_atomically(transaction.file("config"), "small");
    write_file_atomically(transaction.file("model"), std::string(1 << 20, 'x'));
    transaction.commit();
  });
  ASSERT_TRUE(WIFEXITED(outcome.status));
  EXPECT_EQ(WEXITSTATUS(outcome.status), 1);
  EXPECT_NE(outcome.message.find("model: File too large; raise the file size limit"), std::string::npos)
      << outcome.message;
  EXPECT_EQ(directory_entries(path("out")), Names{"step_00000001"});
  EXPECT_EQ(read_file(path("out/step_00000001/model")), "old");
}

// ----------------------------------------------------------------------------
// the checkpoints of a run

TEST_F(Files, CheckpointNames) {
  EXPECT_EQ(checkpoint_name(500), "step_00000500");
  EXPECT_EQ(checkpoint_step("step_00000500"), 500);
  EXPECT_EQ(checkpoint_step("step_00000000"), 0);
  EXPECT_EQ(checkpoint_name(1234567890), "step_1234567890");
  EXPECT_EQ(checkpoint_step("step_1234567890"), 1234567890);
  for (const char* other : {"", "step_", "step_500", "step_000000500", "step_-0000005", "step_+0000500",
                            "step_ 0000500", "step_00000500.tmp", "step_00000500x", "step_0000x500",
                            "Step_00000500", "step_99999999999999999999"}) {
    EXPECT_EQ(checkpoint_step(other), -1) << other;
  }
}

TEST_F(Files, CheckpointsAreListedByStep) {
  EXPECT_TRUE(list_checkpoints(path("missing")).empty());
  for (const char* name : {"step_100000000", "step_00000900", "step_00001000", "step_00001100.tmp",
                           "step_00001200.replaced", "step_1300", "other"}) {
    put("out/" + std::string(name) + "/f", "");
  }
  put("out/step_00000800", "a file");
  const std::vector<CheckpointEntry> found = list_checkpoints(path("out"));
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0].step, 900);
  EXPECT_EQ(found[0].directory, path("out/step_00000900"));
  EXPECT_EQ(found[1].step, 1000);
  EXPECT_EQ(found[2].step, 100000000);
  expect_error([&] { list_checkpoints(path("out/step_00000800")); }, {"step_00000800"});
}

TEST_F(Files, KeepNewest) {
  for (int step : {1, 2, 3, 10}) put("out/" + checkpoint_name(step) + "/f", "");
  keep_newest_checkpoints(path("out"), 5);
  EXPECT_EQ(directory_entries(path("out")).size(), 4u);
  keep_newest_checkpoints(path("out"), 2);
  EXPECT_EQ(directory_entries(path("out")), (Names{"step_00000003", "step_00000010"}));
  expect_error([&] { remove_checkpoint(path("out/step_00000001")); },
               {path("out/step_00000001"), "No such file"});
}

TEST_F(Files, RecoveryClearsWhatAKilledRunLeft) {
  put("out/step_00000001/f", "whole");
  put("out/step_00000002.tmp/f", "half written, or half removed");
  put("out/step_00000003.replaced/f", "old");  // killed between the two renames
  put("out/step_00000003.tmp/f", "new");
  put("out/step_00000004.replaced/f", "old");  // killed after them
  put("out/step_00000004/f", "new");
  put("out/notes.tmp/f", "somebody else's");
  put("out/metrics.csv", "");
  recover_checkpoints(path("out"));
  EXPECT_EQ(directory_entries(path("out")),
            (Names{"metrics.csv", "notes.tmp", "step_00000001", "step_00000003", "step_00000004"}));
  EXPECT_EQ(read_file(path("out/step_00000003/f")), "old");
  EXPECT_EQ(read_file(path("out/step_00000004/f")), "new");
  recover_checkpoints(path("missing"));
}

// Writes a checkpoint twice, so that old and new are exchanged, and prunes.
void write_checkpoint(const std::string& out, int64_t step) {
  for (int twice = 0; twice < 2; twice++) {
    DirectoryTransaction transaction(checkpoint_directory(out, step));
    for (const char* name : {"a", "b", "c", "d"}) {
      write_file_atomically(transaction.file(name), std::string(5000, *name));
    }
    transaction.commit();
  }
  keep_newest_checkpoints(out, 2);
}

void expect_whole(const std::string& directory) {
  ASSERT_EQ(directory_entries(directory), (Names{"a", "b", "c", "d"})) << directory;
  for (const char* name : {"a", "b", "c", "d"}) {
    ASSERT_EQ(read_file(directory + "/" + name), std::string(5000, *name)) << directory;
  }
}

// A child writes checkpoints until it is killed. Whatever is listed then must be whole, and no step may be
// lost.
TEST_F(Files, KilledAtAnyMoment) {
  const std::string out = path("out");
  const auto before = std::chrono::steady_clock::now();
  write_checkpoint(out, 1);
  const auto duration = std::chrono::steady_clock::now() - before;
  int64_t newest = 1;
  const int kKills = 20;
  for (int kill = 0; kill < kKills; kill++) {
    const auto train = [&] {
      for (int64_t step = newest + 1;; step++) write_checkpoint(out, step);
    };
    const Outcome outcome = run_in_child(train, [&](pid_t child) {
      std::this_thread::sleep_for(duration * 2 * (kill + 1) / kKills);
      ::kill(child, SIGKILL);
    });
    ASSERT_TRUE(WIFSIGNALED(outcome.status)) << outcome.message;
    recover_checkpoints(out);
    const std::vector<CheckpointEntry> found = list_checkpoints(out);
    ASSERT_EQ(found.size(), directory_entries(out).size());
    ASSERT_FALSE(found.empty());
    for (const CheckpointEntry& checkpoint : found) expect_whole(checkpoint.directory);
    ASSERT_GE(found.back().step, newest);
    newest = found.back().step;
  }
  EXPECT_GT(newest, 1) << "no child lived long enough to write a checkpoint";
}

}  // namespace
}  // namespace xmod

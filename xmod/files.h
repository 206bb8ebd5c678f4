// Files that are either whole or not there. A run may be killed, or its disk fill up, at any moment:
// everything here first writes under a temporary name, forces it to the disk, and only then renames it to the
// name that readers look for. A rename is atomic, so a reader sees the old state or the new one, never half
// of one.
//
//   AtomicFile            one file
//   DirectoryTransaction  a directory of files that belong together: a checkpoint
//   list_checkpoints ...  the directories OUT/step_00000500 of a run
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "xmod/error.h"

namespace xmod {

// ----------------------------------------------------------------------------
// errors: what failed, on which path, why, and what to do about it

inline const char* io_remedy(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "; free space on that disk or choose another directory";
    case EFBIG:
      return "; raise the file size limit (ulimit -f) or choose another directory";
    case EIO:
      return "; the disk reports an error, check it or choose another directory";
    case EACCES:
    case EPERM:
      return "; check the permissions";
    case EROFS:
      return "; that file system is read-only, choose another directory";
    case ENOENT:
      return "; check the path";
    case ENOTDIR:
      return "; a part of that path is a file, not a directory";
    case EMFILE:
    case ENFILE:
      return "; raise the limit of open files (ulimit -n)";
    default:
      return "";
  }
}

[[noreturn]] inline void fail_io(const std::string& action, const std::string& path, int error) {
  fail("cannot ", action, " ", path, ": ", std::generic_category().message(error), io_remedy(error));
}

// ----------------------------------------------------------------------------
// descriptors: plain POSIX calls, made whole

// Owns a file descriptor; closes it at the end of the scope.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }

  // Some file systems (NFS) report a failed write only here.
  void close(const std::string& path) {
    const int fd = std::exchange(fd_, -1);
    if (fd >= 0 && ::close(fd) != 0 && errno != EINTR) fail_io("write", path, errno);
  }

 private:
  int fd_ = -1;
};

inline FileDescriptor open_file(const std::string& path, int flags, const char* action) {
  int fd;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) fail_io(action, path, errno);
  return FileDescriptor(fd);
}

// Opens a regular file. O_NONBLOCK: opening a pipe would wait for a writer instead of reaching the check.
inline FileDescriptor open_for_reading(const std::string& path) {
  FileDescriptor file = open_file(path, O_RDONLY | O_NONBLOCK, "read");
  struct stat status;
  if (::fstat(file.get(), &status) != 0) fail_io("read", path, errno);
  if (!S_ISREG(status.st_mode)) {
    fail("cannot read ", path, ": it is ", S_ISDIR(status.st_mode) ? "a directory" : "not a regular file",
         "; give the path of a file");
  }
  return file;
}

inline int64_t file_size(const FileDescriptor& file, const std::string& path) {
  struct stat status;
  if (::fstat(file.get(), &status) != 0) fail_io("read", path, errno);
  return status.st_size;
}

// One call may transfer at most 2 GiB on Linux and macOS, so larger transfers are cut into pieces.
inline constexpr int64_t kLargestTransfer = int64_t{1} << 30;

inline void write_fully(const FileDescriptor& file, const void* data, int64_t bytes,
                        const std::string& path) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(file.get(), next, std::min(bytes, kLargestTransfer));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_io("write", path, errno);
    if (written == 0) fail_io("write", path, ENOSPC);
    next += written;
    bytes -= written;
  }
}

inline void read_fully_at(const FileDescriptor& file, void* out, int64_t bytes, int64_t offset,
                          const std::string& path) {
  char* next = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got = ::pread(file.get(), next, std::min(bytes, kLargestTransfer), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_io("read", path, errno);
    if (got == 0) {
      fail("cannot read ", path, ": it ends at byte ", offset, ", ", bytes,
           " bytes short; was it cut off while in use?");
    }
    next += got;
    offset += got;
    bytes -= got;
  }
}

inline void fsync_path(const std::string& path) {
  const FileDescriptor file = open_file(path, O_RDONLY, "write");
  // EINVAL, ENOTSUP: this file system has nothing to force out (some do not for directories).
  if (::fsync(file.get()) != 0 && errno != EINVAL && errno != ENOTSUP) fail_io("write", path, errno);
}

// A created, renamed or removed name is on the disk only once its directory is.
inline void fsync_directory(const std::string& path) {
  fsync_path(path.empty() ? "." : path);
}

inline std::string parent_directory(const std::string& path) {
  return std::filesystem::path(path).parent_path().string();
}

// ----------------------------------------------------------------------------
// whole files

inline constexpr int64_t kTextFileLimit = int64_t{64} << 20;

// The whole file; more than `limit` bytes is an error, so that a wrong path cannot fill the memory.
inline std::string read_file(const std::string& path, int64_t limit = kTextFileLimit) {
  const FileDescriptor file = open_for_reading(path);
  const int64_t bytes = file_size(file, path);
  if (bytes > limit) {
    fail("cannot read ", path, ": it has ", bytes, " bytes, at most ", limit,
         " are expected; is it the right file?");
  }
  std::string text(bytes, '\0');
  read_fully_at(file, text.data(), bytes, 0, path);
  return text;
}

// A file written piece by piece to `path`.tmp that becomes `path` in commit(). Without commit(), or when
// writing fails, the temporary file is removed and an older file at `path` stays as it was.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path) : path_(path), temporary_(path + ".tmp") {
    struct stat status;
    if (::lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
      fail("cannot write ", path, ": something that is not a regular file is there; choose another name");
    }
    if (::unlink(temporary_.c_str()) != 0 && errno != ENOENT) fail_io("write", temporary_, errno);
    file_ = open_file(temporary_, O_WRONLY | O_CREAT | O_EXCL, "write");
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile() {
    if (!committed_) ::unlink(temporary_.c_str());
  }

  const std::string& path() const { return path_; }
  void write(const void* data, int64_t bytes) { write_fully(file_, data, bytes, path_); }

  void commit() {
    if (::fsync(file_.get()) != 0) fail_io("write", path_, errno);
    file_.close(path_);
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_io("write", path_, errno);
    committed_ = true;
    fsync_directory(parent_directory(path_));
  }

 private:
  std::string path_, temporary_;
  FileDescriptor file_;
  bool committed_ = false;
};

inline void write_file_atomically(const std::string& path, std::string_view bytes) {
  AtomicFile file(path);
  file.write(bytes.data(), static_cast<int64_t>(bytes.size()));
  file.commit();
}

// ----------------------------------------------------------------------------
// directories

inline bool path_exists(const std::string& path) {
  struct stat status;
  return ::lstat(path.c_str(), &status) == 0;
}

inline bool is_directory(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

inline void create_directories(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) fail_io("create directory", path, error.value());
  if (!is_directory(path))
    fail("cannot create directory ", path, ": a file of that name is there; choose another");
}

inline void remove_tree(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) fail_io("remove", path, error.value());
}

inline void rename_path(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_io("rename to " + to, from, errno);
}

// Two runs that write to one directory would spoil each other's checkpoints. The lock ends with the
// descriptor or the process, however that ends; a file system without locks (some NFS) goes without.
inline FileDescriptor lock_directory(const std::string& path) {
  FileDescriptor directory = open_file(path, O_RDONLY | O_DIRECTORY, "lock");
  if (::flock(directory.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    fail(path, ": another run is writing there; wait for its end or choose another directory");
  return directory;
}

// The names in a directory, sorted.
inline std::vector<std::string> directory_entries(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(path, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error) fail_io("read directory", path, error.value());
  std::sort(names.begin(), names.end());
  return names;
}

// While a directory D is made or unmade, its contents lie under one of two other names:
//   D.tmp       not yet a whole D, or no longer one: never to be read, removed by the next run
//   D.replaced  the whole old D, set aside for a moment while a new one takes its place
inline constexpr std::string_view kTemporarySuffix = ".tmp";
inline constexpr std::string_view kReplacedSuffix = ".replaced";

// Clears what a killed run left beside `directory`. When it died while exchanging old and new, the old
// returns.
inline void recover_directory(const std::string& directory) {
  const std::string replaced = directory + std::string(kReplacedSuffix);
  if (path_exists(replaced) && !path_exists(directory)) rename_path(replaced, directory);
  remove_tree(replaced);
  remove_tree(directory + std::string(kTemporarySuffix));
}

// Removes a directory so that no crash leaves a half-deleted one under its name.
inline void remove_directory_atomically(const std::string& directory) {
  const std::string temporary = directory + std::string(kTemporarySuffix);
  remove_tree(temporary);
  rename_path(directory, temporary);
  remove_tree(temporary);
}

// A directory whose files appear all at once:
//
//   DirectoryTransaction checkpoint("out/step_00000500");
//   write_file_atomically(checkpoint.file("config.json"), ...);   // goes to
//   out/step_00000500.tmp/config.json checkpoint.commit();                                          // now
//   out/step_00000500 is there, and whole
//
// Without commit(), or when it fails, the temporary directory is removed and everything else stays. A
// directory that already has the final name is replaced, since a run resumed from an earlier step writes the
// later ones anew.
class DirectoryTransaction {
 public:
  explicit DirectoryTransaction(std::string directory) : directory_(std::move(directory)) {
    while (directory_.size() > 1 && directory_.back() == '/') directory_.pop_back();
    temporary_ = directory_ + std::string(kTemporarySuffix);
    if (path_exists(directory_) && !is_directory(directory_)) {
      fail("cannot write ", directory_,
           ": a file of that name is there; remove it or choose another directory");
    }
    recover_directory(directory_);
    create_directories(temporary_);
  }
  DirectoryTransaction(const DirectoryTransaction&) = delete;
  DirectoryTransaction& operator=(const DirectoryTransaction&) = delete;
  ~DirectoryTransaction() {
    std::error_code ignored;
    if (!committed_) std::filesystem::remove_all(temporary_, ignored);
  }

  const std::string& directory() const { return directory_; }
  std::string file(const std::string& name) const { return temporary_ + "/" + name; }

  void commit() {
    for (const std::string& name : directory_entries(temporary_)) fsync_path(file(name));
    fsync_directory(temporary_);
    const std::string replaced = directory_ + std::string(kReplacedSuffix);
    const bool replacing = path_exists(directory_);
    if (replacing) rename_path(directory_, replaced);
    if (::rename(temporary_.c_str(), directory_.c_str()) != 0) {
      const int error = errno;
      if (replacing) rename_path(replaced, directory_);
      fail_io("write", directory_, error);
    }
    committed_ = true;
    fsync_directory(parent_directory(directory_));
    if (replacing) remove_tree(replaced);
  }

 private:
  std::string directory_, temporary_;
  bool committed_ = false;
};

// ----------------------------------------------------------------------------
// the checkpoints of a run: OUT/step_00000500, OUT/step_00001000, ...

struct CheckpointEntry {
  int64_t step;
  std::string directory;
};

inline std::string checkpoint_name(int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "step_%08lld", static_cast<long long>(step));
  return name;
}

inline std::string checkpoint_directory(const std::string& out, int64_t step) {
  return (std::filesystem::path(out) / checkpoint_name(step)).string();
}

// The step of a checkpoint's name; -1 for any other name.
inline int64_t checkpoint_step(std::string_view name) {
  constexpr std::string_view prefix = "step_";
  if (name.substr(0, prefix.size()) != prefix) return -1;
  int64_t step = -1;
  std::from_chars(name.data() + prefix.size(), name.data() + name.size(), step);
  return step >= 0 && checkpoint_name(step) == name ? step : -1;
}

// The complete checkpoints in `out`, earliest first; none when there is no such directory.
inline std::vector<CheckpointEntry> list_checkpoints(const std::string& out) {
  std::vector<CheckpointEntry> checkpoints;
  if (!path_exists(out)) return checkpoints;
  for (const std::string& name : directory_entries(out)) {
    const int64_t step = checkpoint_step(name);
    if (step < 0 || !is_directory(checkpoint_directory(out, step))) continue;
    checkpoints.push_back({step, checkpoint_directory(out, step)});
  }
  std::sort(checkpoints.begin(), checkpoints.end(),
            [](const CheckpointEntry& a, const CheckpointEntry& b) { return a.step < b.step; });
  return checkpoints;
}

// Clears what a killed run left in `out`; call it before list_checkpoints when a run starts or resumes.
inline void recover_checkpoints(const std::string& out) {
  if (!path_exists(out)) return;
  for (const std::string& name : directory_entries(out)) {
    for (const std::string_view suffix : {kTemporarySuffix, kReplacedSuffix}) {
      if (!name.ends_with(suffix)) continue;
      const int64_t step = checkpoint_step(std::string_view(name).substr(0, name.size() - suffix.size()));
      if (step >= 0) recover_directory(checkpoint_directory(out, step));
    }
  }
}

inline void remove_checkpoint(const std::string& directory) {
  remove_directory_atomically(directory);
}

// Removes the earliest checkpoints until `keep` are left.
inline void keep_newest_checkpoints(const std::string& out, int64_t keep) {
  const std::vector<CheckpointEntry> checkpoints = list_checkpoints(out);
  const int64_t surplus = static_cast<int64_t>(checkpoints.size()) - keep;
  for (int64_t i = 0; i < surplus; i++) remove_checkpoint(checkpoints[i].directory);
}

}  // namespace xmod

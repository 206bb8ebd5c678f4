// The ranks of a run: processes, on one host or many, that train one model together, each on its share of
// every batch. They speak MPI where the program is built with it (XMOD_MPI); without, a run has one rank and
// nothing to say.
//
// What is summed here is summed in the order of the ranks, so results do not depend on how an MPI library
// sums, nor on who came first.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <limits>
#include <string>
#include <vector>

#ifdef XMOD_MPI
#include <mpi.h>
#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif
#endif

#include "xmod/error.h"

namespace xmod {

// ---------------------------------------------------------------------------------------------------
// Who started this process

// What a launcher says of a process, in variables that are there before MPI is.
struct Launch {
  bool found = false;  // by mpirun or its like
  int64_t rank = 0, size = 1;
};

inline Launch find_launch() {
  struct Names {
    const char *rank, *size;
  };
  for (const Names& names : {Names{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},  // Open MPI
                             Names{"PMI_RANK", "PMI_SIZE"},  // MPICH, Intel MPI; Slurm's srun --mpi=pmi2
                             Names{"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}}) {  // srun
    const char *rank = std::getenv(names.rank), *size = std::getenv(names.size);
    if (rank && size) return {true, std::atoll(rank), std::atoll(size)};
  }
  return {};
}

inline std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown host";
}

// For commands that are not shared out.
inline void require_one_process(const std::string& command) {
  const Launch launch = find_launch();
  if (launch.size == 1) return;
  usage_error(command, " runs in one process, ", launch.size,
              " were started; start it without mpirun: only train takes several");
}

// ---------------------------------------------------------------------------------------------------
// The ranks

class Communicator {
 public:
  // A single rank. One that a launcher started becomes one of its ranks by join().
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }  // among those of this host
  int local_size() const { return local_size_; }
  bool is_root() const { return rank_ == 0; }

  // Seconds that this rank has spent waiting for others.
  double waited() const { return waited_; }

#ifdef XMOD_MPI
  // Where an error is on its way to main, the others are not at their ends: abort_ranks() is for them.
  ~Communicator() {
    if (!joined_ || std::uncaught_exceptions() > 0) return;
    MPI_Finalize();
  }

  void join() {
    const Launch launch = find_launch();
    if (!launch.found) return;
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
    joined_ = true;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    if (size_ != launch.size) {
      fail(launch.size, " processes were started, but the MPI that this program was built with sees ", size_,
           "; start it with the mpirun of that MPI, or build it again with the other one's mpicxx");
    }
    MPI_Comm host;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &local_rank_);
    MPI_Comm_size(host, &local_size_);
    MPI_Comm_free(&host);
  }

  // Whether messages may begin and end in a GPU's memory.
  bool reads_device_memory() const {
#if defined(MPIX_CUDA_AWARE_SUPPORT)
    return MPIX_Query_cuda_support() == 1;
#elif defined(MPICH_NUMVERSION) && MPICH_NUMVERSION >= 40000000
    int supported = 0;
    return MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA, &supported) == MPI_SUCCESS && supported;
#else
    return false;
#endif
  }

  // values (n) become their sums over the ranks, everywhere the same bits.
  void sum(double* values, int64_t n) {
    sum_in_order(values, n, MPI_DOUBLE);
  }
  void sum(float* values, int64_t n) {
    sum_in_order(values, n, MPI_FLOAT);
  }

  // The root's bytes reach all.
  void broadcast(void* data, int64_t bytes) {
    if (size_ == 1) return;
    const Waiting waiting(*this);
    char* begin = static_cast<char*>(data);
    for (int64_t first = 0; first < bytes; first += kLargest) {
      const int count = static_cast<int>(std::min(kLargest, bytes - first));
      MPI_Bcast(begin + first, count, MPI_BYTE, 0, MPI_COMM_WORLD);
    }
  }

  // The same, by the root.
  void broadcast_from_here(const void* data, int64_t bytes) {
    broadcast(const_cast<void*>(data), bytes);
  }

  void send(const float* data, int64_t n, int to) {
    const Waiting waiting(*this);
    MPI_Send(data, count_of(n), MPI_FLOAT, to, kTag, MPI_COMM_WORLD);
  }
  void receive(float* data, int64_t n, int from) {
    const Waiting waiting(*this);
    MPI_Recv(data, count_of(n), MPI_FLOAT, from, kTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  }

  // One text of each rank, in their order.
  std::vector<std::string> gather(const std::string& text) {
    std::vector<std::string> all(static_cast<size_t>(size_), text);
    if (size_ == 1) return all;
    const Waiting waiting(*this);
    int length = count_of(static_cast<int64_t>(text.size()));
    std::vector<int> lengths(all.size()), places(all.size());
    MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, MPI_COMM_WORLD);
    for (size_t r = 1; r < all.size(); r++) places[r] = places[r - 1] + lengths[r - 1];
    std::string joint(static_cast<size_t>(places.back() + lengths.back()), '\0');
    MPI_Allgatherv(text.data(), length, MPI_CHAR, joint.data(), lengths.data(), places.data(), MPI_CHAR,
                   MPI_COMM_WORLD);
    for (size_t r = 0; r < all.size(); r++) all[r] = joint.substr(places[r], lengths[r]);
    return all;
  }

 private:
  friend class Messages;
  static constexpr int64_t kLargest = int64_t{1} << 28;  // bytes of a message
  static constexpr int kTag = 0;

  static int count_of(int64_t n) {
    if (n > std::numeric_limits<int>::max()) fail("a message of ", n, " numbers is too long for MPI");
    return static_cast<int>(n);
  }

  template <class Number>
  void sum_in_order(Number* values, int64_t n, MPI_Datatype type) {
    if (size_ == 1 || n == 0) return;
    const Waiting waiting(*this);
    std::vector<Number> all(static_cast<size_t>(n * size_));
    MPI_Allgather(values, count_of(n), type, all.data(), count_of(n), type, MPI_COMM_WORLD);
    std::copy_n(all.data(), n, values);
    for (int64_t i = n; i < n * size_; i++) values[i % n] += all[static_cast<size_t>(i)];
  }

  bool joined_ = false;  // MPI runs
#else
  void join() {
    const Launch launch = find_launch();
    if (launch.size == 1) return;
    fail(launch.size, " processes were started, but this program was built without MPI; install it (",
         "scripts/install_deps.sh mpi) and run make again, or start the program without mpirun");
  }
  bool reads_device_memory() const {
    return false;
  }
  void sum(double*, int64_t) {}
  void sum(float*, int64_t) {}
  void broadcast(void*, int64_t) {}
  void broadcast_from_here(const void*, int64_t) {}
  void send(const float*, int64_t, int) {}
  void receive(float*, int64_t, int) {}
  std::vector<std::string> gather(const std::string& text) {
    return {text};
  }

 private:
  friend class Messages;
#endif

  // Counts the time while it lives.
  class Waiting {
   public:
    explicit Waiting(Communicator& ranks) : ranks_(ranks) {}
    ~Waiting() { ranks_.waited_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    using Clock = std::chrono::steady_clock;
    Communicator& ranks_;
    Clock::time_point start_ = Clock::now();
  };

  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
  double waited_ = 0;
};

// Ends the other ranks of a run in which this one has failed.
inline void abort_ranks([[maybe_unused]] int exit_code) {
#ifdef XMOD_MPI
  int joined = 0, left = 0;
  MPI_Initialized(&joined);
  MPI_Finalized(&left);
  if (joined && !left) MPI_Abort(MPI_COMM_WORLD, exit_code);
#endif
}

// ---------------------------------------------------------------------------------------------------
// Messages under way

// Numbers that travel while the program computes, each message with an id of the caller's. What is sent, or
// received into, must stay untouched until its id has come back.
class Messages {
 public:
  explicit Messages(Communicator& ranks) : ranks_(ranks) {}

  Communicator& ranks() const { return ranks_; }

#ifdef XMOD_MPI
  static constexpr int kTags = 32767;  // every MPI has as many

  void send(const void* data, int64_t bytes, int to, int tag, int64_t id) {
    MPI_Request& request = add(id);
    MPI_Isend(data, Communicator::count_of(bytes), MPI_BYTE, to, tag, MPI_COMM_WORLD, &request);
  }
  void receive(void* data, int64_t bytes, int from, int tag, int64_t id) {
    MPI_Request& request = add(id);
    MPI_Irecv(data, Communicator::count_of(bytes), MPI_BYTE, from, tag, MPI_COMM_WORLD, &request);
  }

  // Ids of messages that have arrived or left since the last call, each once for every message.
  std::vector<int64_t> completed() {
    return take_completed(false);
  }
  // The same, at least one; none only where none is under way.
  std::vector<int64_t> wait() {
    const Communicator::Waiting waiting(ranks_);
    return take_completed(true);
  }

 private:
  MPI_Request& add(int64_t id) {
    ids_.push_back(id);
    requests_.push_back(MPI_REQUEST_NULL);
    return requests_.back();
  }

  std::vector<int64_t> take_completed(bool wait) {
    std::vector<int64_t> ids;
    if (requests_.empty()) return ids;
    const int count = static_cast<int>(requests_.size());
    std::vector<int> done(requests_.size());
    int n = 0;
    (wait ? MPI_Waitsome : MPI_Testsome)(count, requests_.data(), &n, done.data(), MPI_STATUSES_IGNORE);
    for (int i = 0; i < n; i++) ids.push_back(ids_[static_cast<size_t>(done[static_cast<size_t>(i)])]);
    size_t kept = 0;
    for (size_t i = 0; i < requests_.size(); i++) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      requests_[kept] = requests_[i];
      ids_[kept++] = ids_[i];
    }
    requests_.resize(kept);
    ids_.resize(kept);
    return ids;
  }

  std::vector<MPI_Request> requests_;
  std::vector<int64_t> ids_;  // of each request
#else
  static constexpr int kTags = 32767;
  void send(const void*, int64_t, int, int, int64_t) {}
  void receive(void*, int64_t, int, int, int64_t) {}
  std::vector<int64_t> completed() {
    return {};
  }
  std::vector<int64_t> wait() {
    return {};
  }

 private:
#endif
  Communicator& ranks_;
};

}  // namespace xmod

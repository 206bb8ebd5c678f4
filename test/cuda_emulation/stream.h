// Streams, events and graphs. Work runs when it is given to a stream, unless the stream is being captured:
// then it becomes a node of a graph.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace cuda_emulation {

enum class NodeKind { kernel, copy, fill, library, event };

struct Node {
  NodeKind kind;
  std::function<void()> work;
};

struct Graph {
  std::vector<Node> nodes;
};

struct Executable {
  std::vector<Node> nodes;
};

struct Stream;

struct Capture {
  struct Member {
    Stream* stream;
    int64_t work = 0;     // that it got, and its entry
    int64_t awaited = 0;  // how much of it another member waits for
  };

  std::vector<Member> members;  // first the stream whose capture it is, then those that joined
  bool relaxed;
  bool broken = false;
  Graph graph;

  Stream* origin() const { return members[0].stream; }
  Member* find(const Stream* stream) {
    for (Member& member : members) {
      if (member.stream == stream) return &member;
    }
    return nullptr;
  }
};

struct Stream {
  bool blocking = true;  // waits for the default stream
  std::shared_ptr<Capture> capture;
  std::vector<std::function<void()>> deliveries;  // of what host memory gets when the stream is waited for

  void deliver() {
    for (const auto& delivery : std::exchange(deliveries, {})) delivery();
  }
};

struct Event {
  std::chrono::steady_clock::time_point time;
  bool recorded = false;
  bool timed = true;
  Stream* stream = nullptr;
  std::shared_ptr<Capture> capture;
  int64_t captured_work = 0;  // of the stream, until it was recorded
};

}  // namespace cuda_emulation

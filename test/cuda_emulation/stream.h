// Streams, events and graphs. Work runs when it is given to a stream, unless the stream is being captured:
// then it becomes a node of a graph.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace cuda_emulation {

enum class NodeKind { kernel, copy, fill, library };

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
  Stream* origin;
  std::vector<Stream*> streams;  // origin, and those that joined
  bool relaxed;
  bool broken = false;
  Graph graph;
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
};

}  // namespace cuda_emulation

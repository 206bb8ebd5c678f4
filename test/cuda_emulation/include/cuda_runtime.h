// CUDA's runtime on the CPU, for tests: kernels compiled by a plain C++ compiler run as they are, one fiber
// per thread. It stops with a message where a device would behave in an undefined way:
//   a barrier that not all threads of a block reach, a warp function whose mask is not the lanes that come,
//   writes outside of allocations, host code that touches device memory, work that cannot be captured
// and it makes other errors visible: fresh memory is not a number, and threads may run in any order
// (CUDA_EMULATION_SEED=n, or cuda_emulation::set_thread_order(n)).
//
// Programs that use it have no thread_local variables of their own: that is where static shared memory lives.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "../control.h"
#include "../device_functions.h"
#include "../runtime.h"
#include "../warp_functions.h"

// used: a compiler that believes to see every access would not look for poison, or for what other threads
// wrote.
#define __shared__ static thread_local __attribute__((used))

#define CUDART_VERSION 13000

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

// ---------------------------------------------------------------------------------------------------
// Errors

inline const char* cudaGetErrorName(cudaError_t error) {
  return cuda_emulation::error_text(error).first;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return cuda_emulation::error_text(error).second;
}
inline cudaError_t cudaGetLastError() {
  return cuda_emulation::runtime().last_error(true);
}
inline cudaError_t cudaPeekAtLastError() {
  return cuda_emulation::runtime().last_error(false);
}

// ---------------------------------------------------------------------------------------------------
// Devices

inline cudaError_t cudaSetDevice(int device);
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = cuda_emulation::runtime().devices;
  return *count ? cudaSetDevice(0) : cuda_emulation::runtime().result(cudaErrorNoDevice);
}
inline cudaError_t cudaSetDevice(int device) {
  auto& runtime = cuda_emulation::runtime();
  if (runtime.device_error != cudaSuccess) return runtime.result(runtime.device_error);
  if (runtime.devices == 0) return runtime.result(cudaErrorNoDevice);
  return runtime.result(device >= 0 && device < runtime.devices ? cudaSuccess : cudaErrorInvalidDevice);
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSetDevice(0);
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = cuda_emulation::device_properties();
  return cudaSetDevice(device);
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = cuda_emulation::device_attribute(attribute);
  return cudaSetDevice(device);
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
  return cuda_emulation::runtime().wait_for_all();
}

// ---------------------------------------------------------------------------------------------------
// Memory

template <class T>
cudaError_t cudaMalloc(T** data, size_t bytes) {
  auto& runtime = cuda_emulation::runtime();
  *data = nullptr;
  if (const cudaError_t error = runtime.outside_of_captures()) return error;
  if (bytes == 0) return cudaSuccess;
  *data = static_cast<T*>(runtime.memory.allocate(bytes));
  return runtime.result(*data ? cudaSuccess : cudaErrorMemoryAllocation);
}
inline cudaError_t cudaFree(void* data) {
  auto& runtime = cuda_emulation::runtime();
  if (!data) return cudaSuccess;
  if (const cudaError_t error = runtime.wait_for_all()) return error;
  return runtime.result(runtime.memory.release(data) ? cudaSuccess : cudaErrorInvalidValue);
}
template <class T>
cudaError_t cudaMallocHost(T** data, size_t bytes, unsigned = 0) {
  *data = static_cast<T*>(std::malloc(bytes));
  return cuda_emulation::runtime().result(*data ? cudaSuccess : cudaErrorMemoryAllocation);
}
template <class T>
cudaError_t cudaHostAlloc(T** data, size_t bytes, unsigned) {
  return cudaMallocHost(data, bytes);
}
inline cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const auto& memory = cuda_emulation::runtime().memory;
  *total = memory.capacity;
  *free = memory.capacity - memory.used();
  return cudaSetDevice(0);
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
  return cuda_emulation::copy(to, from, bytes, kind, stream);
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  auto& runtime = cuda_emulation::runtime();
  if (const cudaError_t error = runtime.outside_of_captures()) return error;
  if (const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind)) return error;
  return runtime.wait_for_all();
}
inline cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream = nullptr) {
  return cuda_emulation::fill(data, value, bytes, stream);
}
inline cudaError_t cudaMemset(void* data, int value, size_t bytes) {
  if (const cudaError_t error = cuda_emulation::runtime().outside_of_captures()) return error;
  return cudaMemsetAsync(data, value, bytes);
}

// ---------------------------------------------------------------------------------------------------
// Streams and events

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = new CUstream_st;
  (*stream)->blocking = !(flags & cudaStreamNonBlocking);
  cuda_emulation::runtime().add(*stream);
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  auto& runtime = cuda_emulation::runtime();
  if (!stream) return runtime.result(cudaErrorInvalidResourceHandle);
  stream->deliver();
  runtime.remove(stream);
  delete stream;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  auto& runtime = cuda_emulation::runtime();
  return runtime.wait_for(runtime.stream(stream));
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return cudaStreamSynchronize(stream);
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st;
  (*event)->timed = !(flags & cudaEventDisableTiming);
  return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
  cuda_emulation::Stream& s = cuda_emulation::runtime().stream(stream);
  event->time = std::chrono::steady_clock::now();
  event->recorded = true;
  event->stream = &s;
  event->capture = s.capture;
  if (s.capture) event->captured_work = s.capture->find(&s)->work;
  return cudaSuccess;
}
// External: as a node of the graph that the stream is being captured for, it is recorded whenever that runs.
inline cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  auto& runtime = cuda_emulation::runtime();
  if (flags != cudaEventRecordExternal || !runtime.stream(stream).capture)
    return cudaEventRecord(event, stream);
  return runtime.submit(stream, cuda_emulation::NodeKind::event, [=] { cudaEventRecord(event, stream); });
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  auto& runtime = cuda_emulation::runtime();
  if (event->capture) {
    event->capture->broken = true;
    return runtime.result(cudaErrorStreamCaptureUnsupported);
  }
  return event->recorded ? runtime.wait_for(*event->stream) : cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  return cudaEventSynchronize(event);
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const bool good = begin->recorded && end->recorded && begin->timed && end->timed;
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return cuda_emulation::runtime().result(good ? cudaSuccess : cudaErrorInvalidResourceHandle);
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
  auto& runtime = cuda_emulation::runtime();
  if (event->capture) runtime.join_capture(runtime.stream(stream), *event);
  return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------
// Graphs

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  auto& runtime = cuda_emulation::runtime();
  return runtime.begin_capture(runtime.stream(stream), mode == cudaStreamCaptureModeRelaxed);
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  auto& runtime = cuda_emulation::runtime();
  return runtime.end_capture(runtime.stream(stream), graph);
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const auto& capture = cuda_emulation::runtime().stream(stream).capture;
  *status = !capture          ? cudaStreamCaptureStatusNone
            : capture->broken ? cudaStreamCaptureStatusInvalidated
                              : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
inline cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  const size_t wanted = nodes ? std::min(*count, graph->nodes.size()) : 0;
  for (size_t i = 0; i < wanted; i++) nodes[i] = &graph->nodes[i];
  *count = graph->nodes.size();
  return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                        unsigned long long = 0) {
  *executable = new CUgraphExec_st{{graph->nodes}};
  return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  for (const cuda_emulation::Node& node : executable->nodes) {
    if (const cudaError_t error = cuda_emulation::runtime().submit(stream, node.kind, node.work))
      return error;
  }
  return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------
// Kernels

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  auto& runtime = cuda_emulation::runtime();
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<size_t>(value) > cuda_emulation::kSharedBytesOptin)
    return runtime.result(cudaErrorInvalidValue);
  runtime.allow_shared_bytes(kernel, static_cast<size_t>(value));
  return cudaSuccess;
}
template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  auto& runtime = cuda_emulation::runtime();
  cuda_emulation::Launch launch;
  launch.grid = config->gridDim;
  launch.block = config->blockDim;
  launch.shared_bytes = config->dynamicSmemBytes;
  launch.address = reinterpret_cast<const void*>(kernel);
  const cuda_emulation::KernelCall<Parameters...> call(kernel, std::forward<Arguments>(arguments)...);
  if (const cudaError_t error = runtime.valid(launch)) return runtime.result(error);
  return runtime.submit(config->stream, cuda_emulation::NodeKind::kernel,
                        [call, launch] { call.run(launch); });
}

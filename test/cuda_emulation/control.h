// What tests set and ask, and what stands behind the functions of cuda_runtime.h.
#pragma once

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "runtime.h"

namespace cuda_emulation {

// ---------------------------------------------------------------------------------------------------
// For tests

// The order in which threads and blocks run; 0: as they are numbered.
inline void set_thread_order(uint64_t seed) {
  runtime().thread_order = seed;
}

// Stops if somebody wrote outside of an allocation; every launch and cudaFree ask too.
inline void check_memory() {
  runtime().memory.check([] { return std::string("check_memory"); });
}

// Kernels run so far.
inline int64_t launches() {
  return runtime().launches;
}

inline void set_memory_bytes(size_t bytes) {
  runtime().memory.capacity = bytes;
}

inline void set_device_count(int count) {
  runtime().devices = count;
}

// Whether the driver can give memory to a part of an address range.
inline void set_virtual_memory(bool has) {
  runtime().has_virtual_memory = has;
}

// What every use of a device returns, such as cudaErrorInsufficientDriver; cudaSuccess: none.
inline void set_device_error(cudaError_t error) {
  runtime().device_error = error;
}

// ---------------------------------------------------------------------------------------------------
// For cuda_runtime.h

inline std::pair<const char*, const char*> error_text(cudaError_t error) {
  switch (error) {
#define CUDA_EMULATION_ERROR(name, text) \
  case name:                             \
    return {#name, text};
    CUDA_EMULATION_ERROR(cudaSuccess, "no error")
    CUDA_EMULATION_ERROR(cudaErrorInvalidValue, "invalid argument")
    CUDA_EMULATION_ERROR(cudaErrorMemoryAllocation, "out of memory")
    CUDA_EMULATION_ERROR(cudaErrorInitializationError, "initialization error")
    CUDA_EMULATION_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument")
    CUDA_EMULATION_ERROR(cudaErrorInsufficientDriver,
                         "CUDA driver version is insufficient for CUDA runtime version")
    CUDA_EMULATION_ERROR(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable")
    CUDA_EMULATION_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function")
    CUDA_EMULATION_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected")
    CUDA_EMULATION_ERROR(cudaErrorInvalidDevice, "invalid device ordinal")
    CUDA_EMULATION_ERROR(cudaErrorNoKernelImageForDevice,
                         "no kernel image is available for execution on the device")
    CUDA_EMULATION_ERROR(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered")
    CUDA_EMULATION_ERROR(cudaErrorUnsupportedPtxVersion,
                         "the provided PTX was compiled with an unsupported toolchain.")
    CUDA_EMULATION_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle")
    CUDA_EMULATION_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state")
    CUDA_EMULATION_ERROR(cudaErrorNotReady, "device not ready")
    CUDA_EMULATION_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered")
    CUDA_EMULATION_ERROR(cudaErrorLaunchFailure, "unspecified launch failure")
    CUDA_EMULATION_ERROR(cudaErrorNotSupported, "operation not supported")
    CUDA_EMULATION_ERROR(cudaErrorSystemDriverMismatch,
                         "system has unsupported display driver / cuda driver combination")
    CUDA_EMULATION_ERROR(cudaErrorCompatNotSupportedOnDevice,
                         "forward compatibility was attempted on non supported HW")
    CUDA_EMULATION_ERROR(cudaErrorStreamCaptureUnsupported,
                         "operation not permitted when stream is capturing")
    CUDA_EMULATION_ERROR(cudaErrorStreamCaptureInvalidated,
                         "operation failed due to a previous error during capture")
    CUDA_EMULATION_ERROR(cudaErrorStreamCaptureUnmatched,
                         "capture was not ended in the same stream as it began")
    CUDA_EMULATION_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")
    CUDA_EMULATION_ERROR(cudaErrorStreamCaptureIsolation,
                         "dependency created on uncaptured work in another stream")
    CUDA_EMULATION_ERROR(cudaErrorStreamCaptureImplicit,
                         "operation would make the legacy stream depend on a capturing blocking stream")
    CUDA_EMULATION_ERROR(cudaErrorUnknown, "unknown error")
#undef CUDA_EMULATION_ERROR
  }
  return {"unrecognized error code", "unrecognized error code"};
}

inline cudaDeviceProp device_properties() {
  cudaDeviceProp p = {};
  std::snprintf(p.name, sizeof p.name, "CPU in the place of a GPU");
  p.totalGlobalMem = runtime().memory.capacity;
  p.sharedMemPerBlock = kSharedBytes;
  p.sharedMemPerBlockOptin = kSharedBytesOptin;
  p.sharedMemPerMultiprocessor = 228 << 10;
  p.reservedSharedMemPerBlock = 1 << 10;
  p.regsPerBlock = p.regsPerMultiprocessor = 64 << 10;
  p.warpSize = kWarp;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  p.maxGridSize[0] = 0x7fffffff;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.major = 9;
  p.multiProcessorCount = 132;
  p.memoryBusWidth = 6144;
  p.l2CacheSize = 50 << 20;
  return p;
}

inline int device_attribute(cudaDeviceAttr attribute) {
  const cudaDeviceProp p = device_properties();
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      return p.maxThreadsPerBlock;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return static_cast<int>(p.sharedMemPerBlock);
    case cudaDevAttrWarpSize:
      return p.warpSize;
    case cudaDevAttrClockRate:
      return 1980000;
    case cudaDevAttrMultiProcessorCount:
      return p.multiProcessorCount;
    case cudaDevAttrMemoryClockRate:
      return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return p.memoryBusWidth;
    case cudaDevAttrL2CacheSize:
      return p.l2CacheSize;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return p.maxThreadsPerMultiProcessor;
    case cudaDevAttrComputeCapabilityMajor:
      return p.major;
    case cudaDevAttrComputeCapabilityMinor:
      return p.minor;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return static_cast<int>(p.sharedMemPerMultiprocessor);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return static_cast<int>(p.sharedMemPerBlockOptin);
  }
  return 0;
}

// Whether a copy may touch [data, data + bytes) as what its kind says it is.
inline bool valid_range(const void* data, size_t bytes, bool on_device) {
  const DeviceMemory& memory = runtime().memory;
  return on_device ? memory.allocated(data, bytes) : !memory.contains(data);
}

// Whether it lies on the stack of the function that called, or above: gone when a graph is launched.
inline bool on_stack(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  return at >= here && at - here < (uintptr_t{8} << 20);
}

// What a copy to the host writes arrives when the host waits for the stream; until then it is poison.
inline cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t on) {
  if (bytes == 0) return cudaSuccess;
  const bool to_device = kind == cudaMemcpyDefault
                             ? runtime().memory.contains(to)
                             : kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDefault
                               ? runtime().memory.contains(from)
                               : kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (!valid_range(to, bytes, to_device) || !valid_range(from, bytes, from_device))
    return runtime().result(cudaErrorInvalidValue);
  if (runtime().stream(on).capture && (on_stack(to) || on_stack(from)))
    stop(
        "a graph would copy from or to a variable of a function that has returned when the graph is "
        "launched");
  const auto work = [=] {
    const DeviceMemory::Access access(runtime().memory);
    if (to_device || !from_device) {
      std::memmove(to, from, bytes);
      return;
    }
    std::vector<char> kept(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    poison(to, bytes);
    runtime().stream(on).deliveries.push_back(
        [to, kept = std::move(kept)] { std::memcpy(to, kept.data(), kept.size()); });
  };
  return runtime().submit(on, NodeKind::copy, work);
}

inline cudaError_t fill(void* data, int value, size_t bytes, cudaStream_t on) {
  if (bytes == 0) return cudaSuccess;
  if (!valid_range(data, bytes, true)) return runtime().result(cudaErrorInvalidValue);
  return runtime().submit(on, NodeKind::fill, [=] {
    const DeviceMemory::Access access(runtime().memory);
    std::memset(data, value, bytes);
  });
}

}  // namespace cuda_emulation

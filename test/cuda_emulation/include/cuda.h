// The driver's virtual memory management, as far as the trainer uses it. Programs find these functions by
// name (cudaGetDriverEntryPointByVersion in cuda_runtime.h).
#pragma once

#include <cstddef>

#include "../runtime.h"

enum CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
};

using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;  // here: how many bytes it has

enum CUmemAllocationType { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum CUmemLocationType { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum CUmemAccess_flags { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };
enum CUmemAllocationGranularity_flags { CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0 };

struct CUmemLocation {
  CUmemLocationType type;
  int id;
};
struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemLocation location;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
};

inline CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                              CUmemAllocationGranularity_flags) {
  *granularity = cuda_emulation::DeviceMemory::page_bytes();
  return CUDA_SUCCESS;
}
inline CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr,
                                    unsigned long long) {
  void* data = cuda_emulation::runtime().memory.reserve(bytes);
  *address = reinterpret_cast<CUdeviceptr>(data);
  return data ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
inline CUresult cuMemAddressFree(CUdeviceptr address, size_t) {
  const bool found = cuda_emulation::runtime().memory.release_addresses(reinterpret_cast<void*>(address));
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
inline CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                            unsigned long long) {
  const auto& memory = cuda_emulation::runtime().memory;
  *handle = bytes;
  return memory.used() + bytes <= memory.capacity ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
inline CUresult cuMemRelease(CUmemGenericAllocationHandle) {
  return CUDA_SUCCESS;
}
inline CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                         unsigned long long) {
  const bool good =
      bytes == handle && cuda_emulation::runtime().memory.map(reinterpret_cast<void*>(address), bytes);
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
inline CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}
inline CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  cuda_emulation::runtime().memory.unmap(reinterpret_cast<void*>(address), bytes);
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------
// Functions by name

enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
};
constexpr unsigned long long cudaEnableDefault = 0;

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> functions = {
#define CUDA_EMULATION_ENTRY(name) {#name, reinterpret_cast<void*>(name)}
      CUDA_EMULATION_ENTRY(cuMemGetAllocationGranularity),
      CUDA_EMULATION_ENTRY(cuMemAddressReserve),
      CUDA_EMULATION_ENTRY(cuMemAddressFree),
      CUDA_EMULATION_ENTRY(cuMemCreate),
      CUDA_EMULATION_ENTRY(cuMemRelease),
      CUDA_EMULATION_ENTRY(cuMemMap),
      CUDA_EMULATION_ENTRY(cuMemSetAccess),
      CUDA_EMULATION_ENTRY(cuMemUnmap),
#undef CUDA_EMULATION_ENTRY
  };
  const auto found = functions.find(symbol);
  const bool known = found != functions.end() && cuda_emulation::runtime().has_virtual_memory;
  *function = known ? found->second : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

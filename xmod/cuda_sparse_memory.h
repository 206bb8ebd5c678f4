// Memory of the GPU with holes: an address for each of n bytes, and memory behind some of them only. So a
// rank can speak of weights that it does not have by the address that they would have.
//
// This is the driver's virtual memory management. Its functions are asked for at run time: nothing is linked
// but CUDA's runtime.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "xmod/cuda_common.h"
#include "xmod/parameter_table.h"

namespace xmod {

// Memory comes in pieces of so many bytes. Emulated: a page of the CPU.
#ifdef __CUDACC__
constexpr int64_t kSparseGranule = int64_t{2} << 20;
#else
constexpr int64_t kSparseGranule = int64_t{4} << 10;
#endif

inline int64_t whole_granules(int64_t bytes) {
  return (bytes + kSparseGranule - 1) / kSparseGranule * kSparseGranule;
}

// The bytes that parts of numbers of `width` bytes need: whole granules, ascending, none touching another.
inline std::vector<NumberRange> granules_of(std::vector<NumberRange> parts, int64_t width) {
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
  std::vector<NumberRange> runs;
  for (const NumberRange& part : parts) {
    const int64_t begin = part.offset * width / kSparseGranule * kSparseGranule;
    const int64_t end = whole_granules((part.offset + part.size) * width);
    if (runs.empty() || begin > runs.back().offset + runs.back().size) {
      runs.push_back({begin, end - begin});
    } else {
      runs.back().size = std::max(runs.back().size, end - runs.back().offset);
    }
  }
  return runs;
}

class CudaSparseMemory {
 public:
  // runs: of bytes, as granules_of() gives them. Null where the driver has no such memory.
  static std::unique_ptr<CudaSparseMemory> make(int64_t bytes, const std::vector<NumberRange>& runs) {
    Driver driver;
    if (!driver.load()) return nullptr;
    CUmemAllocationProp memory = {};
    memory.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    memory.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    cuda_check(cudaGetDevice(&memory.location.id));
    size_t granularity = 0;
    const CUresult asked = driver.granularity(&granularity, &memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (asked != CUDA_SUCCESS || granularity == 0 || kSparseGranule % static_cast<int64_t>(granularity) != 0)
      return nullptr;
    std::unique_ptr<CudaSparseMemory> made(new CudaSparseMemory(driver, bytes));
    for (const NumberRange& run : runs) made->map(memory, run);
    return made;
  }

  ~CudaSparseMemory() {
    cudaDeviceSynchronize();  // as cudaFree does
    for (const NumberRange& run : mapped_) driver_.unmap(address(run), size_of(run));
    driver_.release_addresses(begin_, size_);
  }
  CudaSparseMemory(const CudaSparseMemory&) = delete;
  CudaSparseMemory& operator=(const CudaSparseMemory&) = delete;

  void* data() const { return reinterpret_cast<void*>(begin_); }

 private:
  struct Driver {
    decltype(&cuMemGetAllocationGranularity) granularity;
    decltype(&cuMemAddressReserve) reserve_addresses;
    decltype(&cuMemAddressFree) release_addresses;
    decltype(&cuMemCreate) create;
    decltype(&cuMemRelease) release;
    decltype(&cuMemMap) map;
    decltype(&cuMemSetAccess) set_access;
    decltype(&cuMemUnmap) unmap;

    bool load() {
      return find("cuMemGetAllocationGranularity", granularity) &&
             find("cuMemAddressReserve", reserve_addresses) && find("cuMemAddressFree", release_addresses) &&
             find("cuMemCreate", create) && find("cuMemRelease", release) && find("cuMemMap", map) &&
             find("cuMemSetAccess", set_access) && find("cuMemUnmap", unmap);
    }

    template <class Function>
    static bool find(const char* name, Function& function) {
      void* entry = nullptr;
      cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
      constexpr unsigned kSince = 10020;  // the version of CUDA that brought all of these
      const cudaError_t error =
          cudaGetDriverEntryPointByVersion(name, &entry, kSince, cudaEnableDefault, &found);
#else
      const cudaError_t error = cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found);
#endif
      function = reinterpret_cast<Function>(entry);
      return error == cudaSuccess && found == cudaDriverEntryPointSuccess && entry;
    }
  };

  CudaSparseMemory(const Driver& driver, int64_t bytes)
      : driver_(driver), size_(static_cast<size_t>(whole_granules(bytes))) {
    check(driver_.reserve_addresses(&begin_, size_, static_cast<size_t>(kSparseGranule), 0, 0),
          "cuMemAddressReserve");
  }

  void map(const CUmemAllocationProp& memory, const NumberRange& run) {
    CUmemGenericAllocationHandle handle = 0;
    check(driver_.create(&handle, size_of(run), &memory, 0), "cuMemCreate");
    const CUresult mapped = driver_.map(address(run), size_of(run), 0, handle, 0);
    driver_.release(handle);  // it goes when it is mapped nowhere any more
    check(mapped, "cuMemMap");
    mapped_.push_back(run);
    const CUmemAccessDesc access = {memory.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    check(driver_.set_access(address(run), size_of(run), &access, 1), "cuMemSetAccess");
  }

  CUdeviceptr address(const NumberRange& run) const {
    return begin_ + static_cast<size_t>(run.offset);
  }
  static size_t size_of(const NumberRange& run) {
    return static_cast<size_t>(run.size);
  }

  // The runtime's errors have the driver's numbers.
  static void check(CUresult result, const char* tried) {
    detail::check_cuda(static_cast<cudaError_t>(result), tried);
  }

  const Driver driver_;
  const size_t size_;
  CUdeviceptr begin_ = 0;
  std::vector<NumberRange> mapped_;
};

}  // namespace xmod

// What CUDA code needs of its tools, in one place: launches, checks of errors, shared memory, and the device
// instructions that have no function in CUDA's headers.
//
// nvcc brings the three CUDA headers itself. Tests compile the same code with a plain C++ compiler, whose
// include path leads to headers of the same names that run kernels on the CPU.
#pragma once

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "xmod/error.h"

namespace xmod {

// ---------------------------------------------------------------------------------------------------
// Errors

namespace detail {

inline std::string cuda_remedy(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "use a smaller --batch-size, or --recompute block";
    case cudaErrorNoDevice:
      return "train without a GPU: ./train_xmod takes the same flags";
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
      return "update the NVIDIA driver, or train without a GPU: ./train_xmod takes the same flags";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return "build for this GPU: make clean && make, or name its compute capability, such as CUDA_ARCH=90";
    case cudaErrorDevicesUnavailable:
      return "another program holds the GPU: nvidia-smi shows which";
    case cudaErrorECCUncorrectable:
      return "the GPU's memory is damaged: restart from the last checkpoint on another one";
    default:
      return "this should not happen: please report it with what `compute-sanitizer` prints before this line";
  }
}

// "cudaMalloc" of "cudaMalloc(&data, bytes)"
inline std::string called_function(const std::string& call) {
  return call.substr(0, call.find('('));
}

inline void check_cuda(cudaError_t error, const std::string& tried) {
  if (error == cudaSuccess) return;
  fail("CUDA: ", tried, " failed: ", cudaGetErrorName(error), " (", cudaGetErrorString(error),
       "): ", cuda_remedy(error));
}

inline void check_cuda(cublasStatus_t status, const std::string& tried) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail("cuBLAS: ", tried, " failed: ", cublasGetStatusName(status), ": ",
       cuda_remedy(status == CUBLAS_STATUS_ALLOC_FAILED ? cudaErrorMemoryAllocation : cudaErrorUnknown));
}

}  // namespace detail

// Of a call of CUDA's runtime or of cuBLAS: anything but success ends the program with one line.
#define cuda_check(call) ::xmod::detail::check_cuda(call, ::xmod::detail::called_function(#call))

// ---------------------------------------------------------------------------------------------------
// Launches

// A stream, and the name of the pass that launches on it (for errors).
struct LaunchStream {
  LaunchStream(cudaStream_t stream, const char* pass = __builtin_FUNCTION()) : stream(stream), pass(pass) {}

  cudaStream_t stream;
  const char* pass;
};

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...): grid of any size from 1 up, shared_bytes of
// dynamic shared memory up to all that a block may have. A kernel that is a template is named with its
// arguments: launch(rmsnorm_kernel<float, 4>, grid, block, 0, stream, out, inp, n).
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, LaunchStream on,
            Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "a kernel takes as many arguments as it says");
  constexpr size_t kAlwaysAllowed = 48 << 10;
  const auto check = [&](cudaError_t error) {
    if (error == cudaSuccess) return;
    detail::check_cuda(error, std::string("launching a kernel in ") + on.pass);
  };
  if (shared_bytes > kAlwaysAllowed) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = on.stream;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

// In a kernel: the block's dynamic shared memory as T* name, aligned to 16 bytes.
#ifdef __CUDACC__
#define dynamic_shared(T, name)                                        \
  extern __shared__ __align__(16) unsigned char xmod_dynamic_shared[]; \
  T* const name = reinterpret_cast<T*>(xmod_dynamic_shared)
#else
#define dynamic_shared(T, name) T* const name = static_cast<T*>(cuda_emulation::dynamic_shared_memory())
#endif

// ---------------------------------------------------------------------------------------------------
// Instructions of a warp. All 32 lanes execute them together.

#ifdef __CUDACC__

namespace detail {
__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
}  // namespace detail

// d (16, 8) += a (16, 16) b (16, 8): bf16 factors, fp32 sums. With g = lane / 4 and t = lane % 4 a lane holds
//   a[0], a[1], a[2], a[3]: columns 2t, 2t+1 of rows g and g+8, then columns 2t+8, 2t+9 of the same rows
//   b[0], b[1]: rows 2t, 2t+1 of column g, then rows 2t+8, 2t+9 of it
//   d[0] .. d[3]: columns 2t, 2t+1 of row g, then of row g+8
// The lower half of a register is the one with the lower index.
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads 8 x 8 matrices of 16-bit elements from shared memory: lane 8i + j names row j of matrix i (16 bytes,
// aligned to 16), and r[i] receives elements 2t, 2t+1 of row g of it. With trans: elements 2t, 2t+1 of column
// g.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(detail::shared_address(shared))
               : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(detail::shared_address(shared))
               : "memory");
}
// Two matrices: the addresses of lanes 16 .. 31 do not matter.
__device__ inline void ldmatrix_x2(uint32_t (&r)[2], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(detail::shared_address(shared))
               : "memory");
}
__device__ inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(detail::shared_address(shared))
               : "memory");
}

// 2^x to 2 units in the last place; what is below 2^-126 becomes 0, for which exp2f takes several
// instructions more.
__device__ inline float exp2_flushed(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Starts to copy 16 bytes, aligned to 16, to shared memory; zeros where not valid, and then nothing is read.
__device__ inline void cp_async_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(detail::shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
               : "memory");
}
// The thread's copies since the last commit become a group.
__device__ inline void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most Pending of the thread's latest groups are not there yet. Other threads see what has
// arrived after a barrier.
template <int Pending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

#else

using cuda_emulation::cp_async_16;
using cuda_emulation::cp_async_commit;
using cuda_emulation::cp_async_wait;
using cuda_emulation::ldmatrix_x2;
using cuda_emulation::ldmatrix_x2_trans;
using cuda_emulation::ldmatrix_x4;
using cuda_emulation::ldmatrix_x4_trans;
using cuda_emulation::mma_m16n8k16;

inline float exp2_flushed(float x) {
  const float result = exp2f(x);
  return result < 0x1p-126f ? 0.0f : result;
}

#endif

// ---------------------------------------------------------------------------------------------------
// Sums and maxima. Their order is fixed, and every lane gets the same bits.

inline constexpr unsigned kFullWarp = 0xffffffffu;

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kFullWarp, value, distance);
  return value;
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  return value;
}

// Over a block of Threads threads in one dimension, all of which call it.
template <int Threads>
__device__ float block_sum(float value) {
  static_assert(Threads % 32 == 0 && Threads <= 1024);
  constexpr int kWarps = Threads / 32;
  value = warp_sum(value);
  if constexpr (kWarps == 1) return value;
  __shared__ float of_warp[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();  // the last call's sums have been read
  if (lane == 0) of_warp[warp] = value;
  __syncthreads();
  return warp_sum(lane < kWarps ? of_warp[lane] : 0.0f);
}

}  // namespace xmod

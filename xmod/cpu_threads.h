// OpenMP's threads, or the one there is without it.
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

namespace xmod {

inline int max_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// Of the calling thread, within the innermost parallel region.
inline int thread_number() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

}  // namespace xmod

// Memory that starts with a line of the cache.

#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace burnish {

constexpr std::align_val_t kCacheLine{64};  // vectors across two take twice as long

struct DeleteAligned {
  void operator()(float* memory) const { ::operator delete[](memory, kCacheLine); }
};

using AlignedFloats = std::unique_ptr<float[], DeleteAligned>;

inline AlignedFloats make_aligned(int64_t count) {
  return AlignedFloats(static_cast<float*>(::operator new[](count * sizeof(float), kCacheLine)));
}

}  // namespace burnish

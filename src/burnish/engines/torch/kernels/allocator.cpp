// An allocator of CPU tensors that keeps its pages: what a step frees, the next step gets again, already backed by memory.
//
// Large blocks are cut from one region of addresses, best fit first, and merged with their free neighbours when they come back; pages are
// never returned to the operating system, which would clear them anew. Small blocks come from where PyTorch takes them.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

#include "operators.h"

namespace {

constexpr size_t kSmallest = size_t(256) << 10;  // smaller blocks come from the heap
constexpr size_t kUnit = size_t(64) << 10;
constexpr size_t kRegion = size_t(1) << 40;  // addresses, not memory
constexpr size_t kHugePage = size_t(2) << 20;

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

// How long the system works to supply a huge page, or the small ones in its place, that nothing has touched yet.
double seconds_to_supply(char* huge_page) {
  double before = processor_seconds();
  for (size_t offset = 0; offset < kHugePage; offset += 4096) static_cast<volatile char*>(huge_page)[offset] = 0;
  return processor_seconds() - before;
}

class PageKeepingAllocator final : public c10::Allocator {
 public:
  PageKeepingAllocator() {
    void* region = mmap(nullptr, kRegion + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) return;
    base_ = static_cast<char*>(region) + (kHugePage - reinterpret_cast<uintptr_t>(region) % kHugePage) % kHugePage;
    madvise(base_, kHugePage, MADV_NOHUGEPAGE);
    seconds_of_small_pages_ = seconds_to_supply(base_);
    madvise(base_ + kHugePage, kRegion - kHugePage, MADV_HUGEPAGE);
  }

  bool works() const { return base_ != nullptr; }

  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < kSmallest ? c10::alloc_cpu(bytes) : take((bytes + kUnit - 1) / kUnit * kUnit);
    return {block, block, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  // What oneDNN takes without a DataPtr it gives back through this.
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* target, const void* source, std::size_t count) const override { default_copy_data(target, source, count); }

  static void give_back(void* block);

  bool owns(void* block) const { return block >= base_ && block < base_ + kRegion; }

 private:
  void* take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Addresses cost nothing, so that this has to be told here: the system would end the process where pages run out.
    TORCH_CHECK(bytes <= memory_ && in_use_ <= memory_ - bytes, "out of memory: a tensor of ", bytes, " bytes beside ", in_use_,
                " in use, of ", memory_, " that the machine has");
    size_t offset;
    auto best = by_size_.lower_bound({bytes, 0});
    if (best != by_size_.end()) {
      auto [size, start] = best->first;
      by_size_.erase(best);
      by_offset_.erase(start);
      if (size > bytes) insert(start + bytes, size - bytes);
      offset = start;
    } else {
      // A free block at the end grows; else the region does.
      offset = end_;
      if (!by_offset_.empty()) {
        auto [start, size] = *by_offset_.rbegin();
        if (start + size == end_) {
          remove(start, size);
          offset = start;
        }
      }
      TORCH_CHECK(offset + bytes <= kRegion, "no addresses left for a tensor of ", bytes, " bytes");
      watch_huge_pages(end_, offset + bytes);
      end_ = offset + bytes;
    }
    taken_[base_ + offset] = bytes;
    in_use_ += bytes;
    return base_ + offset;
  }

  void release(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = taken_.find(static_cast<char*>(block));
    size_t offset = static_cast<char*>(block) - base_, size = found->second;
    taken_.erase(found);
    in_use_ -= size;
    auto next = by_offset_.lower_bound(offset);
    if (next != by_offset_.end() && next->first == offset + size) {
      size += next->second;
      remove(next->first, next->second);
    }
    auto before = by_offset_.lower_bound(offset);
    if (before != by_offset_.begin()) {
      --before;
      if (before->first + before->second == offset) {
        offset = before->first;
        size += before->second;
        remove(before->first, before->second);
      }
    }
    insert(offset, size);
  }

  // Goes on with small pages once huge ones turn out dear. They cost a fifth of what as much memory costs in small pages where the
  // processor's own tables translate addresses. Where the host of a virtual machine takes its memory in small pages they have cost
  // six times as much, half of a first step, and made no later step faster; only the first few are cheap there, if they were in use
  // just before.
  void watch_huge_pages(size_t start, size_t end) {
    size_t page = std::max((start + kHugePage - 1) / kHugePage, size_t(1)) * kHugePage;
    if (dear_huge_pages_ == kTolerated || page + kHugePage > end) return;
    if (seconds_to_supply(base_ + page) > 2 * seconds_of_small_pages_) ++dear_huge_pages_;
    if (dear_huge_pages_ == kTolerated) madvise(base_ + page + kHugePage, kRegion - page - kHugePage, MADV_NOHUGEPAGE);
  }

  void insert(size_t offset, size_t size) {
    by_offset_.emplace(offset, size);
    by_size_.emplace(std::make_pair(size, offset), true);
  }

  void remove(size_t offset, size_t size) {
    by_offset_.erase(offset);
    by_size_.erase({size, offset});
  }

  char* base_ = nullptr;
  size_t end_ = 0;
  static constexpr int kTolerated = 2;
  int dear_huge_pages_ = 0;
  double seconds_of_small_pages_ = 0;
  size_t in_use_ = 0;
  const size_t memory_ = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::mutex mutex_;
  std::map<size_t, size_t> by_offset_;
  std::map<std::pair<size_t, size_t>, bool> by_size_;
  std::unordered_map<char*, size_t> taken_;
};

// Never destroyed: tensors may outlive everything else.
PageKeepingAllocator* the_allocator = nullptr;

void PageKeepingAllocator::give_back(void* block) {
  if (the_allocator->owns(block))
    the_allocator->release(block);
  else
    c10::free_cpu(block);
}

// Takes the place of PyTorch's allocator of CPU tensors, once; tells whether it did.
bool keep_pages() {
  static bool kept = [] {
    the_allocator = new PageKeepingAllocator();
    if (!the_allocator->works()) return false;
    c10::SetCPUAllocator(the_allocator, 1);
    return c10::GetCPUAllocator() == the_allocator;
  }();
  return kept;
}

}  // namespace

// Of no tensor, so that no device chooses it.
BURNISH_OPERATORS(CompositeExplicitAutograd) { operators.implement<&keep_pages>("keep_pages"); }

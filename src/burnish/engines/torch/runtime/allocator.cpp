// An allocator of CPU tensors that keeps its pages: what a step frees, the next step gets again, already backed by memory.
//
// It takes the place of PyTorch's, and passes on to that whatever it is asked for outside of burnish's graphs: it serves a thread only
// between serve(true) and serve(false). Large blocks are then cut from one region of addresses, best fit first, and merged with their
// free neighbours when they come back; each goes back to the allocator that it came from, on whatever thread. Pages are kept as long as
// a session is open: the system would clear them anew. Small blocks come from PyTorch's allocator always.
//
// The system gives addresses away without memory behind them, and ends the process where pages run out. So before new pages are needed,
// this looks at what is left: of the machine's memory, and below the limits of the control groups that the process is in.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "operators.h"

namespace {

constexpr size_t kSmallest = size_t(256) << 10;  // smaller blocks come from PyTorch's allocator
constexpr size_t kUnit = size_t(64) << 10;
constexpr size_t kRegion = size_t(1) << 40;  // addresses, not memory
constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kMargin = size_t(32) << 20;  // for what else the process allocates meanwhile, and tables of pages
constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();
constexpr double kSecondsOfTrust = 0.1;

double seconds_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

size_t less(size_t from, size_t what) { return from > what ? from - what : 0; }
size_t sum(size_t left, size_t right) { return left > kUnlimited - right ? kUnlimited : left + right; }

// How much more memory the process may use, and by whose word.
struct Room {
  size_t bytes = kUnlimited;
  std::string of;

  void narrow(size_t other, const std::string& name) {
    if (other < bytes) bytes = other, of = name;
  }
};

// A file of one number; nothing where there is none: no such file, or "max".
std::optional<size_t> number_in(const std::string& path) {
  std::ifstream file(path);
  size_t number;
  if (!(file >> number)) return std::nullopt;
  return number;
}

// A file of lines "name number".
std::map<std::string, size_t> numbers_in(const std::string& path) {
  std::ifstream file(path);
  std::map<std::string, size_t> numbers;
  std::string line, name;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    size_t number;
    if (words >> name >> number) numbers[name] = number;
  }
  return numbers;
}

// The control groups that a process is in, of one hierarchy: its own, and those around it that can be seen.
struct Groups {
  bool second_version;
  std::vector<std::string> folders;
};

bool is_among(const std::string& name, const std::string& list) { return ("," + list + ",").find("," + name + ",") != std::string::npos; }

// A path of mountinfo, where blanks are written \040.
std::string unescaped(const std::string& path) {
  std::string result;
  for (size_t place = 0; place < path.size(); ++place) {
    if (path[place] == '\\' && place + 3 < path.size()) {
      result += static_cast<char>(std::stoi(path.substr(place + 1, 3), nullptr, 8));
      place += 3;
    } else {
      result += path[place];
    }
  }
  return result;
}

// The folders of a group, from where its hierarchy is mounted: the mount may show a part of the hierarchy alone, as in a container.
std::optional<std::vector<std::string>> folders_of(const std::string& root, const std::string& group, bool second_version) {
  std::ifstream mounts(root + "/proc/self/mountinfo");
  std::string line;
  std::optional<std::vector<std::string>> found;
  while (std::getline(mounts, line)) {
    size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream left(line.substr(0, dash)), right(line.substr(dash + 3));
    std::vector<std::string> fields{std::istream_iterator<std::string>(left), {}}, kind{std::istream_iterator<std::string>(right), {}};
    if (fields.size() < 5 || kind.empty()) continue;
    if (second_version ? kind[0] != "cgroup2" : kind[0] != "cgroup" || kind.size() < 3 || !is_among("memory", kind[2])) continue;
    std::string shown = unescaped(fields[3]), top = root + unescaped(fields[4]);
    if (shown == "/") shown = "";
    bool is_inside = group.compare(0, shown.size(), shown) == 0 && (group.size() == shown.size() || group[shown.size()] == '/');
    if (found && !is_inside) continue;
    std::string below = is_inside ? group.substr(shown.size()) : "";
    found.emplace();
    for (; !below.empty() && below != "/"; below.erase(below.rfind('/'))) found->push_back(top + below);
    found->push_back(top);
  }
  return found;
}

std::vector<Groups> groups_of_process(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  std::vector<Groups> groups;
  while (std::getline(file, line)) {
    size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, second - first - 1);
    bool second_version = controllers.empty();
    if (!second_version && !is_among("memory", controllers)) continue;
    if (auto folders = folders_of(root, line.substr(second + 1), second_version)) groups.push_back({second_version, *folders});
  }
  return groups;
}

// What of a group's memory the system takes back where it needs pages: files that it can read again, but for those in use.
size_t reclaimable(const std::map<std::string, size_t>& stat, const std::string& prefix) {
  auto of = [&](const std::string& name) {
    auto found = stat.find(prefix + name);
    return found == stat.end() ? 0 : found->second;
  };
  return less(of("inactive_file") + of("active_file"), of(prefix.empty() ? "file_mapped" : "mapped_file")) + of("slab_reclaimable");
}

void narrow_by_second_version(Room& room, const std::vector<std::string>& folders, size_t swap) {
  for (const std::string& folder : folders)
    if (auto limit = number_in(folder + "/memory.swap.max"))
      swap = std::min(swap, less(*limit, number_in(folder + "/memory.swap.current").value_or(0)));
  for (const std::string& folder : folders) {
    auto limit = number_in(folder + "/memory.max"), used = number_in(folder + "/memory.current");
    if (!limit || !used) continue;
    size_t fixed = less(*used, reclaimable(numbers_in(folder + "/memory.stat"), ""));
    room.narrow(sum(less(*limit, fixed), swap), "memory.max of " + folder);
  }
}

void narrow_by_first_version(Room& room, const std::vector<std::string>& folders, size_t swap) {
  for (const std::string& folder : folders) {
    auto used = number_in(folder + "/memory.usage_in_bytes");
    if (!used) continue;
    auto stat = numbers_in(folder + "/memory.stat");
    size_t files = reclaimable(stat, "total_"), fixed = less(*used, files);
    size_t of_swap = number_in(folder + "/memory.swappiness").value_or(1) ? swap : 0;
    // The smallest of this and the groups around it, also of those that cannot be seen.
    size_t smallest = number_in(folder + "/memory.limit_in_bytes").value_or(kUnlimited);
    if (auto all = stat.find("hierarchical_memory_limit"); all != stat.end()) smallest = std::min(smallest, all->second);
    room.narrow(sum(less(smallest, fixed), of_swap), "memory.limit_in_bytes of " + folder);
    auto both = number_in(folder + "/memory.memsw.usage_in_bytes");
    if (!both) continue;
    smallest = number_in(folder + "/memory.memsw.limit_in_bytes").value_or(kUnlimited);
    if (auto all = stat.find("hierarchical_memsw_limit"); all != stat.end()) smallest = std::min(smallest, all->second);
    room.narrow(less(smallest, less(*both, files)), "memory.memsw.limit_in_bytes of " + folder);
  }
}

// What is left: of the machine, and below the tightest limit of all groups. Everything is read below a root folder, "" for the system's.
Room memory_left(const std::string& root) {
  Room room;
  auto machine = numbers_in(root + "/proc/meminfo");
  size_t swap = machine["SwapFree:"] << 10;
  if (machine.count("MemAvailable:"))
    room.narrow(sum(machine["MemAvailable:"] << 10, swap), "what the machine has available");
  else
    room.narrow(static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE)), "what the machine has");
  for (const Groups& groups : groups_of_process(root)) {
    if (groups.second_version)
      narrow_by_second_version(room, groups.folders, swap);
    else
      narrow_by_first_version(room, groups.folders, swap);
  }
  return room;
}

// Disjoint ranges of offsets.
class Ranges {
 public:
  void add(size_t begin, size_t end) {
    remove(begin, end);
    ranges_[begin] = end;
    total_ += end - begin;
  }

  void remove(size_t begin, size_t end) {
    auto range = ranges_.upper_bound(begin);
    if (range != ranges_.begin()) --range;
    while (range != ranges_.end() && range->first < end) {
      auto [first, last] = *range;
      if (last <= begin) {
        ++range;
        continue;
      }
      range = ranges_.erase(range);
      total_ -= std::min(last, end) - std::max(first, begin);
      if (first < begin) ranges_[first] = begin;
      if (last > end) range = ranges_.emplace(end, last).first;
    }
  }

  size_t within(size_t begin, size_t end) const {
    size_t bytes = 0;
    auto range = ranges_.upper_bound(begin);
    if (range != ranges_.begin()) --range;
    for (; range != ranges_.end() && range->first < end; ++range)
      bytes += less(std::min(range->second, end), std::max(range->first, begin));
    return bytes;
  }

  size_t total() const { return total_; }
  const std::map<size_t, size_t>& all() const { return ranges_; }

 private:
  std::map<size_t, size_t> ranges_;
  size_t total_ = 0;
};

thread_local bool is_served = false;

// How long the system works to supply a huge page, or the small ones in its place, that nothing has touched yet.
double seconds_to_supply(char* huge_page) {
  double before = seconds_of(CLOCK_THREAD_CPUTIME_ID);
  for (size_t offset = 0; offset < kHugePage; offset += 4096) static_cast<volatile char*>(huge_page)[offset] = 0;
  return seconds_of(CLOCK_THREAD_CPUTIME_ID) - before;
}

class PageKeepingAllocator final : public c10::Allocator {
 public:
  explicit PageKeepingAllocator(c10::Allocator* other) : other_(other) {
    // Without rights, so that they count as no memory of the process's until they are used.
    void* region = mmap(nullptr, kRegion + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) return;
    base_ = static_cast<char*>(region) + (kHugePage - reinterpret_cast<uintptr_t>(region) % kHugePage) % kHugePage;
    if (mprotect(base_, kHugePage, PROT_READ | PROT_WRITE)) {
      munmap(region, kRegion + kHugePage);
      base_ = nullptr;
      return;
    }
    end_of_rights_ = kHugePage;
    madvise(base_, kHugePage, MADV_NOHUGEPAGE);
    seconds_of_small_pages_ = seconds_to_supply(base_);
    madvise(base_ + kHugePage, kRegion - kHugePage, MADV_HUGEPAGE);
  }

  bool works() const { return base_ != nullptr; }

  c10::DataPtr allocate(size_t bytes) override {
    if (!is_served || bytes < kSmallest) return other_->allocate(bytes);
    void* block = take(bytes);
    return {block, block, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  // What oneDNN takes without a DataPtr it gives back through this.
  c10::DeleterFnPtr raw_deleter() const override { return other_->raw_deleter() ? &give_back : nullptr; }

  void copy_data(void* target, const void* source, std::size_t count) const override { other_->copy_data(target, source, count); }

  static void give_back(void* block);

  // Counts the sessions that want pages kept. With the last one, all pages that are free go back to the system.
  void keep_for(int more) {
    std::lock_guard<std::mutex> lock(mutex_);
    sessions_ += more;
    if (sessions_ == 0) return_free_pages();
  }

  size_t in_use() {
    std::lock_guard<std::mutex> lock(mutex_);
    return in_use_;
  }

 private:
  struct Place {
    size_t offset;
    size_t free;  // of it and behind it, what is free already
  };

  bool owns(void* block) const { return block >= base_ && block < base_ + kRegion; }

  void* take(size_t wanted) {
    TORCH_CHECK(wanted <= kRegion, "out of memory: a tensor of ", wanted, " bytes");
    size_t bytes = (wanted + kUnit - 1) / kUnit * kUnit;
    std::lock_guard<std::mutex> lock(mutex_);
    Place place = find(bytes);
    size_t unbacked = unbacked_of(place, bytes);
    if (unbacked && !is_left(unbacked)) {
      return_free_pages();
      place = find(bytes);
      TORCH_CHECK(is_left(unbacked_of(place, bytes)), "out of memory: a tensor of ", wanted, " bytes beside ", in_use_,
                  " in use, and ", left_.bytes, " left of ", left_.of);
      unbacked = bytes;
    }
    extend(place.offset + bytes, wanted);
    if (place.free) remove(place.offset, place.free);
    if (place.free > bytes) insert(place.offset + bytes, place.free - bytes);
    if (unbacked) {
      returned_.remove(place.offset, place.offset + bytes);
      untouched_.add(place.offset, place.offset + bytes);
    }
    taken_[base_ + place.offset] = bytes;
    in_use_ += bytes;
    return base_ + place.offset;
  }

  // The smallest free block that is large enough; else the one at the end, which grows; else the end.
  Place find(size_t bytes) const {
    if (auto best = by_size_.lower_bound({bytes, 0}); best != by_size_.end()) return {best->first.second, best->first.first};
    if (!by_offset_.empty()) {
      auto [start, size] = *by_offset_.rbegin();
      if (start + size == end_) return {start, size};
    }
    return {end_, 0};
  }

  // How many bytes of a block have no page behind them.
  size_t unbacked_of(const Place& place, size_t bytes) const {
    return less(place.offset + bytes, std::max(end_, place.offset)) + returned_.within(place.offset, place.offset + bytes);
  }

  void extend(size_t end, size_t wanted) {
    if (end <= end_) return;
    TORCH_CHECK(end <= kRegion, "out of memory: no addresses are left for a tensor of ", wanted, " bytes");
    if (end > end_of_rights_) {
      TORCH_CHECK(!mprotect(base_ + end_of_rights_, end - end_of_rights_, PROT_READ | PROT_WRITE), "out of memory: a tensor of ", wanted,
                  " bytes beside ", in_use_, " in use: ", std::strerror(errno), ", by a limit of the process (ulimit -d)");
      end_of_rights_ = end;
    }
    watch_huge_pages(end_, end);
    end_ = end;
  }

  void release(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = taken_.find(static_cast<char*>(block));
    size_t offset = static_cast<char*>(block) - base_, size = found->second;
    taken_.erase(found);
    in_use_ -= size;
    if (sessions_ == 0) return_pages(offset, size);
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

  void return_free_pages() {
    for (auto [offset, size] : by_offset_)
      if (returned_.within(offset, offset + size) < size) return_pages(offset, size);
  }

  void return_pages(size_t offset, size_t size) {
    madvise(base_ + offset, size, MADV_DONTNEED);
    returned_.add(offset, offset + size);
    untouched_.remove(offset, offset + size);
  }

  // Whether so many bytes more may be used, beside those that were promised and not used yet. For a moment, half of what was left
  // counts as there without another look: the system's files take time to read.
  bool is_left(size_t bytes) {
    double now = seconds_of(CLOCK_MONOTONIC);
    if (now < trusted_until_ && bytes <= trusted_) {
      trusted_ -= bytes;
      return true;
    }
    left_ = memory_left("");
    size_t needed = sum(bytes, kMargin);
    if (left_.bytes < sum(needed, untouched_.total())) find_touched();
    needed = sum(needed, untouched_.total());
    trusted_ = less(left_.bytes, needed) / 2;
    trusted_until_ = now + kSecondsOfTrust;
    left_.bytes = less(left_.bytes, untouched_.total() + kMargin);
    return bytes <= left_.bytes;
  }

  // Takes the pages that memory stands behind by now out of those that were promised.
  void find_touched() {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> is_resident;
    for (auto [begin, end] : std::map<size_t, size_t>(untouched_.all())) {
      is_resident.resize((end - begin + page - 1) / page);
      if (mincore(base_ + begin, end - begin, is_resident.data())) continue;
      for (size_t first = 0, next; first < is_resident.size(); first = next) {
        for (next = first + 1; next < is_resident.size() && (is_resident[next] & 1) == (is_resident[first] & 1);) ++next;
        if (is_resident[first] & 1) untouched_.remove(begin + first * page, begin + next * page);
      }
    }
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

  c10::Allocator* const other_;
  char* base_ = nullptr;
  size_t end_ = 0;
  size_t end_of_rights_ = 0;
  static constexpr int kTolerated = 2;
  int dear_huge_pages_ = 0;
  double seconds_of_small_pages_ = 0;
  int sessions_ = 0;
  size_t in_use_ = 0;
  Room left_;
  size_t trusted_ = 0;
  double trusted_until_ = 0;
  std::mutex mutex_;
  std::map<size_t, size_t> by_offset_;
  std::map<std::pair<size_t, size_t>, bool> by_size_;
  std::unordered_map<char*, size_t> taken_;
  Ranges returned_;   // below end_, given back to the system
  Ranges untouched_;  // handed out, and perhaps without a page until now
};

// Never destroyed: tensors may outlive everything else.
PageKeepingAllocator* the_allocator = nullptr;

void PageKeepingAllocator::give_back(void* block) {
  if (the_allocator->owns(block))
    the_allocator->release(block);
  else
    the_allocator->other_->raw_deleter()(block);
}

// Takes the place of PyTorch's allocator of CPU tensors, once, with no more weight than that one has, and serves this thread; tells
// whether it does.
bool keep_pages() {
  static bool kept = [] {
    the_allocator = new PageKeepingAllocator(c10::GetCPUAllocator());
    if (!the_allocator->works()) return false;
    c10::SetCPUAllocator(the_allocator, 0);
    return c10::GetCPUAllocator() == the_allocator;
  }();
  is_served = kept;
  return kept;
}

}  // namespace

// Called as functions of C: an operator takes longer to call, and this is done twice in every step.
#pragma GCC visibility push(default)
extern "C" {

void burnish_serve(int whether) { is_served = whether; }

void burnish_keep_for(int more) { the_allocator->keep_for(more); }

size_t burnish_in_use() { return the_allocator->in_use(); }

size_t burnish_memory_left(const char* root, char* of, size_t length) {
  Room room = memory_left(root);
  std::strncpy(of, room.of.c_str(), length);
  return room.bytes;
}
}
#pragma GCC visibility pop

// Of no tensor, so that no device chooses it.
BURNISH_OPERATORS(CompositeExplicitAutograd) { operators.implement<&keep_pages>("keep_pages"); }

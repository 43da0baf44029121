// Threads that go through many short turns together, each with a share of every turn: a turn begins once all shares of the one before are
// done. To hand each turn to the engine's threads would take longer than the turn.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace burnish::recurrent {

constexpr int64_t kPatience = 1 << 12;  // looks at what others have done before a thread takes over what they have not begun

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Nothing waits for a thread that never comes, or that the system has stopped between two turns: those that are there do its share.
class Turns {
 public:
  Turns(int64_t shares, int64_t turns) : shares_(shares), turns_(turns), places_(new Place[shares]) {}

  // Called once for every share, be it by one thread after the other. Calls `task(turn, share)`, which must not throw, until all are done.
  template <typename Task>
  void take_part(int64_t own, const Task& task) {
    places_[own].is_there.store(true, std::memory_order_relaxed);
    for (int64_t turn = 0; turn < turns_; ++turn) {
      do_share(own, turn, task);
      for (int64_t looks = 0; done_.load(std::memory_order_acquire) < (turn + 1) * shares_; ++looks) {
        for (int64_t other = 0; other < shares_; ++other)
          if (looks > kPatience || !places_[other].is_there.load(std::memory_order_relaxed)) do_share(other, turn, task);
        if (looks > kPatience)
          std::this_thread::yield();
        else
          pause();
      }
    }
  }

 private:
  struct alignas(64) Place {
    std::atomic<int64_t> begun{0};  // turns of which the share is done or in work
    std::atomic<bool> is_there{false};
  };

  template <typename Task>
  void do_share(int64_t share, int64_t turn, const Task& task) {
    int64_t before = turn;
    if (places_[share].begun.load(std::memory_order_relaxed) != turn) return;
    if (!places_[share].begun.compare_exchange_strong(before, turn + 1, std::memory_order_relaxed)) return;
    task(turn, share);
    done_.fetch_add(1, std::memory_order_acq_rel);
  }

  int64_t shares_, turns_;
  std::unique_ptr<Place[]> places_;
  alignas(64) std::atomic<int64_t> done_{0};  // shares of all turns
};

}  // namespace burnish::recurrent

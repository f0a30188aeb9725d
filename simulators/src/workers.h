/*!
 * \brief Threads that wait for work, because starting a thread takes as long as a small layer.
 */
#ifndef PIMFLOW_SIMULATORS_WORKERS_H_
#define PIMFLOW_SIMULATORS_WORKERS_H_

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

namespace pimflow {

/*! \brief Wait actively until `done()`, which is soon unless the other thread was preempted. */
template <typename Done>
void WaitUntil(Done done) {
  for (int steps = 0; !done(); ++steps) {
#if defined(__x86_64__)
    if (steps < 1000) {
      __builtin_ia32_pause();
      continue;
    }
#endif
    std::this_thread::yield();
  }
}

class Workers {
 public:
  using Work = std::function<void(int64_t thread)>;

  /*!
   * \brief Run work(0) here, and work(1) to work(threads - 1) in parallel; all have ended on return.
   *
   * If the workers are busy, only work(0) runs. So it must be able to do all of the work.
   */
  static void Run(int64_t threads, const Work& work) {
    Workers& workers = Instance();
    const std::unique_lock<std::mutex> turn(workers.turn_, std::try_to_lock);
    if (threads <= 1 || !turn.owns_lock()) return work(0);
    workers.RunAll(threads, work);
  }

 private:
  /*! \brief Never destroyed, since the threads outlive main. A child of fork() gets its own, without threads. */
  static Workers& Instance() {
    static std::mutex mutex;
    static Workers* workers = nullptr;
    static pid_t owner = 0;
    const std::lock_guard<std::mutex> guard(mutex);
    if (owner != getpid()) workers = new Workers(), owner = getpid();
    return *workers;
  }

  void RunAll(int64_t threads, const Work& work) {
    threads = Start(threads);
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      work_ = &work;
      next_ = 1, threads_ = threads;
      ++round_;
    }
    begin_.notify_all();
    work(0);
    {  // threads that have not begun yet have nothing to do
      const std::lock_guard<std::mutex> guard(mutex_);
      next_ = threads_;
    }
    WaitUntil([&] { return running_.load(std::memory_order_acquire) == 0; });
  }

  /*! \brief Start threads up to so many, including this one, if the system allows; returns their number. */
  int64_t Start(int64_t threads) {
    try {
      for (; started_ < threads; ++started_) std::thread(&Workers::Wait, this).detach();
    } catch (const std::system_error&) {
    }
    return std::min(started_, threads);
  }

  [[noreturn]] void Wait() {
    for (uint64_t round = 0;;) {
      // Layers follow each other closely: poll for a moment before sleeping.
      const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(kPollUs);
      WaitUntil([&] { return round_.load() != round || std::chrono::steady_clock::now() > until; });
      int64_t thread;
      {
        std::unique_lock<std::mutex> guard(mutex_);
        begin_.wait(guard, [&] { return round_.load() != round; });
        round = round_.load();
        if (next_ == threads_) continue;
        thread = next_++;
        running_.fetch_add(1);
      }
      (*work_)(thread);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  static constexpr int64_t kPollUs = 100;

  std::mutex turn_;  // held while work runs
  std::mutex mutex_;
  std::condition_variable begin_;
  const Work* work_ = nullptr;
  int64_t started_ = 1;
  int64_t next_ = 0, threads_ = 0;  // the next thread of `work_` to begin, and their number
  std::atomic<uint64_t> round_{0};
  std::atomic<int64_t> running_{0};
};

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_WORKERS_H_

#include "common/cpu/parallel.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

namespace attn::cpu {
namespace {

// ---- The OpenMP runtime of the process ----

/// libgomp's entry point of a parallel region; LLVM's and Intel's runtimes have it too. num_threads 0: the runtime's
/// default.
using GompParallel = void (*)(void (*task)(void*), void* context, unsigned num_threads, unsigned flags);

constexpr char kEntryPoint[] = "GOMP_parallel";

/// The entry point as a loaded object sees it, itself and what it depends on included; nullptr if the object is not
/// loaded.
void* symbol_of_loaded(const char* path) {
  void* handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  void* symbol = dlsym(handle, kEntryPoint);
  dlclose(handle);  // the object stays loaded: another handle holds it
  return symbol;
}

int visit_object(dl_phdr_info* info, size_t, void* result) {
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* name = slash != nullptr ? slash + 1 : info->dlpi_name;
  const bool is_openmp = std::strncmp(name, "libgomp", 7) == 0 || std::strncmp(name, "libiomp5", 8) == 0 ||
                         std::strncmp(name, "libomp", 6) == 0;
  if (!is_openmp) return 0;
  void* symbol = symbol_of_loaded(info->dlpi_name);
  if (symbol == nullptr) return 0;
  *static_cast<void**>(result) = symbol;
  return 1;
}

GompParallel find_openmp() {
  void* symbol = dlsym(RTLD_DEFAULT, kEntryPoint);  // preloaded, or linked into the program: torch calls it as well
  if (symbol == nullptr) symbol = symbol_of_loaded("libtorch_cpu.so");  // torch's dependency
  if (symbol == nullptr) dl_iterate_phdr(visit_object, &symbol);
  return reinterpret_cast<GompParallel>(symbol);
}

// ---- The pool of a process that has no OpenMP runtime ----

int default_num_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const int wanted = std::atoi(text);
    if (wanted > 0) return wanted;
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  const unsigned cores = std::thread::hardware_concurrency();
  return cores > 0 ? static_cast<int>(cores) : 1;
}

class ThreadPool {
 public:
  ThreadPool() : num_workers_(default_num_threads() - 1) {
    for (int i = 0; i < num_workers_; ++i) std::thread([this] { work(); }).detach();
  }

  /// A caller that finds the pool taken by another works alone.
  void run(void (*task)(void*), void* context) {
    std::unique_lock<std::mutex> in_use(in_use_, std::try_to_lock);
    if (!in_use.owns_lock()) {
      task(context);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      context_ = context;
      pending_ = num_workers_;
      ++round_;
    }
    start_.notify_all();
    task(context);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return pending_ == 0; });
  }

 private:
  void work() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      start_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      lock.unlock();
      task_(context_);
      lock.lock();
      if (--pending_ == 0) done_.notify_one();
    }
  }

  const int num_workers_;
  std::mutex in_use_;
  std::mutex mutex_;
  std::condition_variable start_, done_;
  void (*task_)(void*) = nullptr;
  void* context_ = nullptr;
  int pending_ = 0;
  uint64_t round_ = 0;
};

// Never destroyed: its threads may outlive the library's static objects. In a child after fork() the threads are gone
// and a new pool is made.
std::atomic<ThreadPool*> own_pool{nullptr};
std::atomic_flag making_pool = ATOMIC_FLAG_INIT;

ThreadPool& get_own_pool() {
  ThreadPool* pool = own_pool.load(std::memory_order_acquire);
  if (pool == nullptr) {
    while (making_pool.test_and_set(std::memory_order_acquire)) sched_yield();
    pool = own_pool.load(std::memory_order_acquire);
    if (pool == nullptr) {
      pool = new ThreadPool;
      own_pool.store(pool, std::memory_order_release);
    }
    making_pool.clear(std::memory_order_release);
  }
  return *pool;
}

// ---- fork ----

// libgomp keeps a team for each thread that has opened a parallel region. In a child the team of the thread that called
// fork() is listed but its workers are gone: the next region would wait for them for ever. Such a child gets its own
// pool.
thread_local bool opened_a_region = false;
std::atomic<bool> openmp_lost_in_fork{false};

void after_fork_in_child() {
  own_pool.store(nullptr, std::memory_order_release);
  making_pool.clear(std::memory_order_release);  // the thread that was making a pool is gone
  if (opened_a_region) openmp_lost_in_fork.store(true, std::memory_order_relaxed);
}

}  // namespace

void run_on_threads(void (*task)(void*), void* context) {
  static const GompParallel openmp = [] {
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
    return find_openmp();
  }();
  if (openmp != nullptr && !openmp_lost_in_fork.load(std::memory_order_relaxed)) {
    opened_a_region = true;
    openmp(task, context, 0, 0);
  } else {
    get_own_pool().run(task, context);
  }
}

}  // namespace attn::cpu

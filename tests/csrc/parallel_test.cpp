// The threads of the executor in a process and in its children. Prints what is wrong; exits with the number of
// failures.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "common/cpu/parallel.h"

namespace {

int failures = 0;

thread_local bool is_held = false;  // this thread waits in pthread_create()
std::atomic<bool> arrived{false}, released{false};

/// Every index once, whatever the number of threads.
void check_loop(const char* where) {
  constexpr int32_t kCount = 1000;
  std::vector<std::atomic<int32_t>> visits(kCount);
  auto visit = [&](int32_t i) { ++visits[static_cast<size_t>(i)]; };
  attn::cpu::parallel_for(kCount, true, visit);
  int32_t wrong = 0;
  for (const auto& count : visits) wrong += count != 1;
  if (wrong == 0) return;
  std::printf("%s: %d of %d indices were not visited once\n", where, wrong, kCount);
  ++failures;
}

/// Runs `body` in a child and reports what it failed in.
template <class Body>
void in_child(const char* where, const Body& body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    failures = 0;
    body();
    std::fflush(stdout);
    _exit(failures);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    std::printf("%s: a child failed, status %d\n", where, status);
    ++failures;
  }
}

/// A child that is forked while another thread makes the pool. The other thread waits in pthread_create() meanwhile.
void check_fork_while_a_pool_is_made() {
  std::thread maker([] {
    is_held = true;
    check_loop("the thread that makes the pool");
  });
  while (!arrived.load()) std::this_thread::yield();
  in_child("while a pool is made", [] {
    alarm(30);  // it would wait forever
    check_loop("child without a pool");
  });
  released.store(true);
  maker.join();
}

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) {
  if (is_held) {
    arrived.store(true);
    while (!released.load()) std::this_thread::yield();
  }
  static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, run, argument);
}

/// With an argument: the process has no OpenMP runtime.
int main(int argc, char**) {
  if (argc > 1) check_fork_while_a_pool_is_made();
  in_child("before any region", [] { check_loop("the first region of a child"); });
  for (int i = 0; i < 20; ++i) check_loop("parent");
  for (int i = 0; i < 3; ++i) {
    in_child("after regions of this thread", [] {
      for (int round = 0; round < 20; ++round) check_loop("child");
      in_child("child", [] { check_loop("grandchild"); });
      check_loop("child that has children");
    });
    check_loop("parent that has children");
  }
  std::thread([] {
    in_child("of a thread that has opened no region", [] { check_loop("child of another thread"); });
  }).join();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([] {
      for (int round = 0; round < 20; ++round) check_loop("one of several threads");
    });
  for (std::thread& thread : threads) thread.join();
  return failures;
}

// Threads made for one call and joined before it returns: nothing survives into a fork, nothing to shut down. Making one
// costs some 20 microseconds; a segment's update takes tens of milliseconds.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace megatrain {

// Calls body(begin, end) for pieces of [0, count) of at most `piece` elements on up to `num_threads` threads, this one
// among them. Which thread takes which piece is open, so a body may only write what belongs to its piece. Body must not
// throw.
template <typename Body>
void parallel_for(uint64_t count, uint64_t piece, int num_threads, const Body& body) {
  const uint64_t num_pieces = count / piece + (count % piece != 0);
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    for (uint64_t i = next.fetch_add(1); i < num_pieces; i = next.fetch_add(1)) {
      const uint64_t begin = i * piece;
      body(begin, begin + std::min(piece, count - begin));
    }
  };
  std::vector<std::thread> threads;
  const uint64_t wanted = std::min<uint64_t>(num_threads > 0 ? num_threads : 1, num_pieces);
  threads.reserve(wanted);
  try {
    while (threads.size() + 1 < wanted) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // The process may make no more threads: the ones that run do the work, slower.
  }
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace megatrain

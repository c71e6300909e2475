// Streams: work that was started and not done. Work is done only when the program waits for it, so that a missing wait
// has an effect.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace emulator {

struct Stream;

// A point in a stream: when this many of its operations are done.
struct Moment {
    std::shared_ptr<Stream> stream;
    unsigned long position = 0;
};

struct Operation {
    std::function<void()> work; // or
    Moment wait;                // of another stream
};

struct Graph {
    std::vector<Operation> operations;
};

struct Stream {
    std::deque<Operation> queue;
    unsigned long started = 0, done = 0;
    std::shared_ptr<Graph> capture; // operations become part of this and are not started
    bool capture_origin = false;
    bool capture_broken = false;

    Moment now(const std::shared_ptr<Stream>& self) const { return {self, started}; }
};

std::shared_ptr<Stream> new_stream();

// Starts an operation, or captures it.
void start(Stream& stream, Operation operation);
void wait_for(const Moment& moment);
bool has_passed(const Moment& moment);
void wait_for_everything();
// Drops all work that was started.
void forget_everything();
// Does some work, as a device would while the program does something else.
void go_on_a_little();

} // namespace emulator
